// What a streamed answer says, and how fast it came.

import { count, digits, seconds } from "../format.js";

/** The JSON of each server-sent event of a body. */
export async function* events(body) {
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

/** Counts and times of one answer, from the moment it is made. */
export class Progress {
  text = "";
  reasoning = "";
  reason = ""; // why the model ended
  #tokens = null; // as the server counts them
  #numPieces = 0; // about one for each token
  #first = null;
  #last = null;

  constructor(clock = () => performance.now()) {
    this.clock = clock;
    this.begun = clock();
  }

  /** Takes an event in; what it adds to the text and to the reasoning. */
  take(event) {
    this.#tokens = event.usage?.completion_tokens ?? this.#tokens;
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    this.reason = choice?.finish_reason ?? this.reason;
    if (text || reasoning) {
      this.#last = this.clock();
      this.#first ??= this.#last;
      this.#numPieces += 1;
    }
    this.text += text;
    this.reasoning += reasoning;
    return { text, reasoning };
  }

  get elapsed() {
    return (this.clock() - this.begun) / 1000;
  }

  /** In a line: tokens, time to the first, tokens per second; `end` is how it ended, if not by itself. */
  summary(end = "") {
    const num = this.#tokens ?? this.#numPieces;
    const mark = this.#tokens === null ? "about " : "";
    const parts = [];
    if (num) parts.push(`${mark}${count(num)} token${num === 1 ? "" : "s"}`);
    if (this.#first !== null) parts.push(`first token after ${seconds((this.#first - this.begun) / 1000)}`);
    if (num > 1 && this.#last > this.#first) parts.push(`${mark}${digits((num - 1) / (this.#last - this.#first) * 1000)} tokens/s`);
    if (end) parts.push(end);
    else if (this.reason === "length") parts.push("cut off: max tokens reached");
    return parts.join(" · ");
  }
}
