// The messages of a conversation on the page.

import { announce, copyButton } from "../clipboard.js";
import { element, seconds } from "../format.js";
import { MarkdownView } from "./rendering.js";

const ANNOUNCED = 1000; // characters of an answer that a screen reader is given at its end
const log = document.getElementById("chat-log");
let follows = true; // the end of the conversation, unless the reader has scrolled up

log.addEventListener("scroll", () => {
  follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
});

export function clearMessages() {
  log.replaceChildren();
}

export function showQuestion(text) {
  log.append(element("div", "message user", element("span", "hidden", "You: "), element("div", "text", text)));
  follows = true;
  toEnd();
}

function toEnd() {
  if (follows) log.scrollTop = log.scrollHeight;
}

/** An answer that is coming, drawn from `progress`. */
export class AnswerView {
  #reasoningText = document.createTextNode("");
  #summary = element("summary", "", "Thinking…");
  #reasoning = element("details", "reasoning", this.#summary, element("div", "", this.#reasoningText));
  #text = element("div", "text");
  #note = element("p", "note", "Waiting for the first token…");
  #foot = element("div", "foot", this.#note);
  #view = new MarkdownView(this.#text, toEnd);

  constructor(progress) {
    this.progress = progress;
    this.#reasoning.hidden = true;
    this.block = element("article", "message assistant busy", element("span", "hidden", "Model: "), this.#reasoning, this.#text, this.#foot);
    this.block.setAttribute("aria-busy", "true");
    log.append(this.block);
    announce("The model is answering.");
    toEnd();
  }

  add({ text, reasoning }) {
    if (reasoning) {
      this.#reasoning.hidden = false;
      this.#reasoningText.appendData(reasoning);
      if (this.#reasoning.open) toEnd();
    }
    if (text) {
      if (!this.#reasoning.hidden) this.#endReasoning();
      this.#view.add(text);
    }
    this.#note.textContent = "";
  }

  #endReasoning() {
    if (this.#summary.textContent === "Thinking…") this.#summary.textContent = `Thought for ${seconds(this.progress.elapsed)}`;
  }

  finish(note, hasFailed = false) {
    this.#view.draw();
    this.#endReasoning();
    this.block.classList.remove("busy");
    this.block.classList.toggle("failed", hasFailed);
    this.block.removeAttribute("aria-busy");
    this.#note.textContent = note;
    if (this.progress.text) this.#foot.append(copyButton("Copy this answer as Markdown", () => this.progress.text));
    announce(`${this.progress.text.slice(0, ANNOUNCED)} ${note}`);
    toEnd();
  }
}
