// Requests to this server, with the API key where it needs one. The key stays in this tab
// (sessionStorage) and is sent to this server only.

const KEY = "ridgeline-key";
const ROOT = new URL("../", import.meta.url); // where the server is mounted, under a proxy's path too
const get = (id) => document.getElementById(id);
let opened = null; // a promise while the dialog is open

export class KeyMissingError extends Error {}

/** The absolute address of a route of this server: `address("v1/models")`. */
export function address(path) {
  return new URL(path, ROOT).href;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** As `fetch`; asks for a key when the server does, and throws KeyMissingError where none is given. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const reply = await send(path, options, key);
    if (reply.status !== 401) return reply;
    if (key !== sessionStorage.getItem(KEY)) continue; // another request has a newer one already
    sessionStorage.removeItem(KEY);
    showKeyButton();
    if (!await askForKey(key === null ? "" : "The server no longer accepts this tab's key.")) {
      throw new KeyMissingError("This server requires an API key.");
    }
  }
}

function send(path, options, key) {
  const headers = { ...options.headers, ...(key === null ? {} : { authorization: `Bearer ${key}` }) };
  return fetch(address(path), { ...options, headers });
}

/** Opens the dialog, one at a time; whether a key was given that the server accepts. */
export function askForKey(message = "") {
  opened ??= new Promise((resolve) => {
    const dialog = get("key-dialog");
    get("key-input").value = "";
    showProblem(message);
    dialog.addEventListener("close", () => {
      opened = null;
      showKeyButton();
      resolve(dialog.returnValue === "accepted");
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
  return opened;
}

async function check(event) {
  event.preventDefault();
  const key = get("key-input").value.trim();
  const button = get("key-send");
  button.disabled = true;
  const problem = await problemOf(key);
  button.disabled = false;
  showProblem(problem);
  if (problem) {
    get("key-input").select();
    return;
  }
  sessionStorage.setItem(KEY, key);
  get("key-input").value = "";
  get("key-dialog").close("accepted");
}

/** Why the server does not take this key; nothing where it does. */
async function problemOf(key) {
  if (!/^[\x21-\x7e]+$/.test(key)) return "A key is letters, digits and signs without spaces.";
  try {
    const reply = await send("v1/models", {}, key);
    return reply.status === 401 || reply.status === 403 ? "The server does not accept this key." : "";
  } catch {
    return "The server is not reachable; try again.";
  }
}

function showProblem(text) {
  get("key-problem").textContent = text;
  if (text) get("key-input").setAttribute("aria-invalid", "true");
  else get("key-input").removeAttribute("aria-invalid");
}

/** Seen once a key has been asked for: to give one, or another. */
function showKeyButton() {
  get("key-change").hidden = false;
  get("key-change").textContent = hasKey() ? "Change key" : "Enter key";
}

get("key-form").addEventListener("submit", check);
get("key-cancel").addEventListener("click", () => get("key-dialog").close(""));
get("key-input").addEventListener("input", () => showProblem(""));
get("key-change").addEventListener("click", () => askForKey());
if (hasKey()) showKeyButton();
