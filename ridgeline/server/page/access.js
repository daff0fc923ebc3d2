// Requests to the server, with the key where one is asked for. It is kept in this tab only.

const KEY = "ridgeline-key";
let asking = null;

export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(options.headers ?? {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const reply = await fetch(path, { ...options, headers });
    if (reply.status !== 401) return reply;
    await newKey();
  }
}

/** One dialog at a time, whoever asks. */
function newKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key-input");
    input.value = "";
    dialog.addEventListener("close", () => {
      if (input.value) sessionStorage.setItem(KEY, input.value.trim());
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
