// Elements of a Markdown tree. Text becomes text nodes, never markup; of an element's attributes only
// those set here exist. While an answer streams only what has changed is touched: a selection or a
// focused copy button above stays.

import { copyButton } from "../clipboard.js";
import { element } from "../format.js";
import { MarkdownStream } from "./markdown.js";

const inner = new WeakMap(); // where the children of a node are, if not in its element itself

export class MarkdownView {
  #stream = new MarkdownStream();
  #pending = "";
  #frame = 0;
  #open = []; // the nodes that may still change; the last children of the container
  #numClosed = 0;

  constructor(container, afterDrawing) {
    Object.assign(this, { container, afterDrawing });
  }

  /** Drawn with the next frame, together with what else has come until then. */
  add(piece) {
    this.#pending += piece;
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { closed, open } = this.#stream.add(this.#pending);
    this.#pending = "";
    patch(this.container, this.#open, [...closed, ...open], this.#numClosed);
    this.#numClosed += closed.length;
    this.#open = open;
    this.afterDrawing();
  }
}

/** Makes the children of `parent` from `base` on, which show `before`, show `after`. */
export function patch(parent, before, after, base = 0) {
  after.forEach((node, index) => {
    const [old, child] = [before[index], parent.childNodes[base + index]];
    if (old === undefined) parent.append(build(node));
    else if (!isAlike(old, node)) child.replaceWith(build(node));
    else if (typeof node !== "string") patch(inner.get(child) ?? child, old.children, node.children);
    else if (node.startsWith(old)) child.appendData(node.slice(old.length));
    else child.data = node;
  });
  for (let index = after.length; index < before.length; index += 1) parent.childNodes[base + after.length].remove();
}

function isAlike(one, other) {
  if (typeof one === "string" || typeof other === "string") return typeof one === typeof other;
  return ["tag", "href", "language", "start", "align"].every((name) => one[name] === other[name]);
}

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const children = node.children.map(build);
  switch (node.tag) {
    case "pre": return codeBlock(node.language, children);
    case "table": return wideTable(children);
    case "a": return link(node.href, children);
    case "ol": return Object.assign(element("ol", "", ...children), { start: node.start });
    case "th":
    case "td": return element(node.tag, node.align, ...children);
    default: return element(node.tag, "", ...children);
  }
}

function codeBlock(language, children) {
  const code = element("code", "", ...children);
  const box = element("pre", "", code);
  box.tabIndex = 0; // so that the keyboard can scroll it
  const button = copyButton(`Copy this code${language ? ` (${language})` : ""}`, () => code.textContent);
  const block = element("div", "code", element("div", "code-head", element("span", "", language), button), box);
  inner.set(block, code);
  return block;
}

function wideTable(children) {
  const table = element("table", "", ...children);
  const block = element("div", "table", table);
  block.tabIndex = 0;
  inner.set(block, table);
  return block;
}

function link(href, children) {
  const made = element("a", "", ...children);
  return Object.assign(made, { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}
