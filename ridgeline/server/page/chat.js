// A conversation with the served model, through the same route that other clients use.

import { ask } from "/page/access.js";
import { count, digits, element, seconds } from "/page/format.js";

const get = (id) => document.getElementById(id);
const [log, form, input, send] = [get("chat-log"), get("chat-form"), get("chat-input"), get("chat-send")];
let messages = [];
let running = null; // an AbortController while an answer comes
let model = "";

export function useModel(name) {
  model = name;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else if (input.value.trim()) answer(input.value.trim());
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) form.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
get("chat-new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren();
  input.focus();
});

async function answer(text) {
  input.value = "";
  show("user", text);
  const mine = { role: "user", content: text };
  messages.push(mine);
  const { block, said, note } = show("assistant busy", "");
  const current = running = new AbortController();
  send.textContent = "Stop";
  const so = { text: "", tokens: 0, begun: performance.now(), first: null };
  try {
    await stream(current.signal, so, () => { said.textContent = so.text; follow(); });
    note.textContent = summary(so, "");
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (!isStop) block.classList.add("failed");
    note.textContent = isStop ? summary(so, "stopped") : error.message;
  }
  block.classList.remove("busy");
  if (messages.at(-1) === mine) { // unless a new chat was begun
    if (so.text) messages.push({ role: "assistant", content: so.text });
    else messages.pop(); // templates want an answer to each question
  }
  if (running === current) { running = null; send.textContent = "Send"; }
  follow();
}

async function stream(signal, so, changed) {
  const system = get("chat-system").value.trim();
  const asked = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(get("chat-temperature").value),
    max_completion_tokens: Number(get("chat-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const reply = await ask("/v1/chat/completions", { method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(asked) });
  if (!reply.ok) throw new Error((await reply.json().catch(() => null))?.error?.message ?? `The server answered ${reply.status}.`);
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    so.tokens = event.usage?.completion_tokens ?? so.tokens;
    const piece = event.choices?.[0]?.delta?.content;
    if (!piece) continue;
    so.first ??= performance.now();
    so.last = performance.now();
    so.text += piece;
    changed();
  }
}

/** The JSON of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:") && line.slice(5).trim() !== "[DONE]") yield JSON.parse(line.slice(5));
    }
  }
}

function summary({ tokens, begun, first, last }, state) {
  const parts = [];
  if (tokens) parts.push(`${count(tokens)} token${tokens === 1 ? "" : "s"}`);
  if (first) parts.push(`first token after ${seconds((first - begun) / 1000)}`);
  if (tokens > 1 && last > first) parts.push(`${digits((tokens - 1) / (last - first) * 1000)} tokens/s`);
  if (state) parts.push(state);
  return parts.join(" · ");
}

function show(className, text) {
  const said = element("span", "said", text);
  const note = element("span", "note");
  const block = element("div", `message ${className}`, said, note);
  log.append(block);
  follow();
  return { block, said, note };
}

function follow() {
  log.scrollTop = log.scrollHeight;
}
