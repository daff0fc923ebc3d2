// A conversation with the served model, through the same route that other clients use.

import { address, hasKey, request } from "../access.js";
import { announce, copyFrom } from "../clipboard.js";
import { events, Progress } from "./events.js";
import { AnswerView, clearMessages, showQuestion } from "./messages.js";
import { requestFields } from "./options.js";
import { asCurl, asPython } from "./snippets.js";

const ROUTE = "v1/chat/completions";
const get = (id) => document.getElementById(id);
const [form, input, send, problem] = ["chat-form", "chat-input", "chat-send", "chat-problem"].map(get);
const options = [...form.querySelectorAll("[data-field]")];
let messages = [];
let running = null; // an AbortController while an answer comes
let lastBody = null; // of the last request
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
input.addEventListener("input", fit);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
});
get("chat-new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  lastBody = null;
  clearMessages();
  input.focus();
});
for (const field of options) field.addEventListener("input", () => { showProblem(null); countOptions(); });
get("copy-curl").addEventListener("click", (event) => copyRequest(event.target, (body) => asCurl(address(ROUTE), body, hasKey())));
get("copy-python").addEventListener("click", (event) => copyRequest(event.target, (body) => asPython(address("v1"), body, hasKey())));
countOptions();

async function answer(text) {
  const mine = { role: "user", content: text };
  const body = bodyFor([...messages, mine]);
  if (body === null) return;
  input.value = "";
  fit();
  messages.push(mine);
  lastBody = body;
  showQuestion(text);
  const progress = new Progress();
  const view = new AnswerView(progress);
  const current = running = new AbortController();
  send.textContent = "Stop";
  try {
    await stream(body, current.signal, (event) => view.add(progress.take(event)));
    view.finish(progress.summary());
  } catch (error) {
    const isStop = error.name === "AbortError";
    view.finish(isStop ? progress.summary("stopped") : error.message, !isStop);
  }
  if (messages.at(-1) === mine) { // unless a new chat was begun
    if (progress.text) messages.push({ role: "assistant", content: progress.text });
    else messages.pop(); // templates want an answer to each question
  }
  if (running === current) {
    running = null;
    send.textContent = "Send";
  }
}

/** Tokens are counted in each piece, so that their number is known after a stop too. */
async function stream(body, signal, take) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const reply = await request(ROUTE, {
    method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(streamed),
  });
  if (!reply.ok) throw new Error(await messageOf(reply));
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    take(event);
  }
}

async function messageOf(reply) {
  const body = await reply.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${reply.status}.`;
}

/** The request without its streaming fields; null, and the problem is shown, where an option is wrong. */
function bodyFor(conversation) {
  const values = Object.fromEntries(options.map((field) => [field.dataset.field, field.value]));
  const { fields, problem: wrong } = requestFields(values);
  const problemNow = wrong ?? (model ? null : { message: "The server has not answered yet; enter its API key if it requires one." });
  showProblem(problemNow);
  if (problemNow) return null;
  const system = get("chat-system").value.trim();
  return { model, messages: system ? [{ role: "system", content: system }, ...conversation] : [...conversation], ...fields };
}

function showProblem(wrong) {
  problem.textContent = wrong?.message ?? "";
  for (const field of options) {
    if (field.dataset.field === wrong?.field) {
      field.setAttribute("aria-invalid", "true");
      get("chat-options").open = true;
      field.focus();
    } else field.removeAttribute("aria-invalid");
  }
}

/** What Send would send now or, where nothing is written, what it sent last. */
function copyRequest(button, write) {
  const text = input.value.trim();
  const body = text || lastBody === null ? bodyFor([...messages, { role: "user", content: text || "Hello" }]) : lastBody;
  if (body === null) announce(problem.textContent);
  else copyFrom(button, () => write(body));
}

function countOptions() {
  const num = options.filter((field) => field.value.trim() !== field.defaultValue.trim()).length;
  get("chat-options-count").textContent = num ? `(${num} set)` : "";
}

/** As high as its text, within bounds that the style sheet sets. */
function fit() {
  input.rows = Math.min(8, Math.max(2, input.value.split("\n").length));
}
