// The inside of a paragraph: code, emphasis, links, line breaks. A link goes to the web or to a mail
// address; whatever else looks like one stays the text it was written as, and so does an image,
// which is never fetched: it becomes a link to it.

const MAX_DEPTH = 8; // of emphasis and links in each other
const NEXT = /[\\`*_~[!<\n]|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const TARGET = /\((?:<([^<>\n]*)>|([^\s<>()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const BRACKETED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BREAK = /<br ?\/?>/iy;
const BARE = /https?:\/\/[^\s<>"`|*]+/y;
const SCHEMES = ["http:", "https:", "mailto:"];
const EMPHASIS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

/** The address as the browser will see it; null where it is none that may be followed. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

export function inline(text, depth = 0) {
  return depth > MAX_DEPTH ? [text].filter(Boolean) : new Inline(text, depth).nodes();
}

class Inline {
  #nodes = [];
  #plain = "";
  #missing = new Set(); // closing marks that do not come any more
  #pairs = null; // "[" to its "]", by position

  constructor(text, depth) {
    Object.assign(this, { text, depth });
  }

  nodes() {
    const { text } = this;
    let at = 0;
    while (at < text.length) {
      NEXT.lastIndex = at;
      const next = NEXT.exec(text)?.index ?? text.length;
      this.#plain += text.slice(at, next);
      at = next < text.length ? this.#special(next) : next;
    }
    this.#endPlain();
    return this.#nodes;
  }

  /** Reads what begins at `at`, and says where it ends. */
  #special(at) {
    switch (this.text[at]) {
      case "\\": return this.#escape(at);
      case "\n": return this.#lineBreak(at + 1);
      case "`": return this.#code(at);
      case "[": return this.#link(at, at) ?? this.#literal(at, 1);
      case "!": return (this.text[at + 1] === "[" ? this.#link(at, at + 1) : null) ?? this.#literal(at, 1);
      case "<": return this.#bracketed(at) ?? this.#literal(at, 1);
      case "h": return this.#bare(at) ?? this.#literal(at, 1);
      default: return this.#emphasis(at);
    }
  }

  #endPlain() {
    if (this.#plain) this.#nodes.push(this.#plain);
    this.#plain = "";
  }

  #push(node, end) {
    this.#endPlain();
    this.#nodes.push(node);
    return end;
  }

  #literal(at, length) {
    this.#plain += this.text.slice(at, at + length);
    return at + length;
  }

  #inside(text) {
    return inline(text, this.depth + 1);
  }

  #escape(at) {
    const next = this.text[at + 1] ?? "";
    if (next === "\n") return this.#lineBreak(at + 2);
    if (!PUNCTUATION.test(next)) return this.#literal(at, 1);
    this.#plain += next;
    return at + 2;
  }

  #lineBreak(end) {
    this.#plain = this.#plain.trimEnd();
    return this.#push({ tag: "br", children: [] }, end);
  }

  #code(at) {
    const length = runLength(this.text, at);
    const end = this.#codeEnd(at);
    if (end === null) return this.#literal(at, length);
    const inside = this.text.slice(at + length, end - length).replaceAll("\n", " ");
    const isPadded = inside.trim() && inside.startsWith(" ") && inside.endsWith(" ");
    return this.#push({ tag: "code", children: [isPadded ? inside.slice(1, -1) : inside] }, end);
  }

  /** Behind the code that begins at `at`; null where its marks are not repeated. */
  #codeEnd(at) {
    const length = runLength(this.text, at);
    const mark = "`".repeat(length);
    if (this.#missing.has(mark)) return null;
    for (let next = this.text.indexOf(mark, at + length); next >= 0; next = this.text.indexOf(mark, next)) {
      const other = runLength(this.text, next);
      next += other;
      if (other === length) return next;
    }
    this.#missing.add(mark);
    return null;
  }

  #emphasis(at) {
    const { text } = this;
    const run = runLength(text, at);
    const isDeleted = text[at] === "~";
    const mark = text.slice(at, at + run);
    const isWord = text[at] === "_" && WORD.test(text[at - 1] ?? "");
    if ((isDeleted ? run !== 2 : run > 3) || isWord || !(text[at + run] ?? "").trim()) return this.#literal(at, run);
    const end = this.#closing(mark, at + run);
    if (end === null) return this.#literal(at, run);
    const tags = isDeleted ? ["del"] : EMPHASIS[run];
    const children = this.#inside(text.slice(at + run, end));
    return this.#push(tags.reduceRight((inside, tag) => [{ tag, children: inside }], children)[0], end + run);
  }

  /** Where `mark` closes what begins at `from`; in a run of three it may be the last one or two. */
  #closing(mark, from) {
    if (this.#missing.has(mark)) return null;
    const { text } = this;
    for (let at = from; at < text.length;) {
      if (text[at] === "\\") at += 2;
      else if (text[at] === "`") at = this.#codeEnd(at) ?? at + runLength(text, at);
      else if (text[at] !== mark[0]) at += 1;
      else {
        const run = runLength(text, at);
        const isWord = mark[0] === "_" && WORD.test(text[at + run] ?? "");
        if ((run === mark.length || run === 3) && run >= mark.length && text[at - 1].trim() && !isWord) return at + run - mark.length;
        at += run;
      }
    }
    this.#missing.add(mark);
    return null;
  }

  /** A link or, from `at` before its bracket, an image. */
  #link(at, bracket) {
    this.#pairs ??= bracketPairs(this.text);
    const end = this.#pairs.get(bracket);
    if (end === undefined || this.text[end + 1] !== "(") return null;
    TARGET.lastIndex = end + 1;
    const target = TARGET.exec(this.text);
    const href = target && safeAddress(target[1] ?? target[2]);
    if (!href) return null;
    const label = this.text.slice(bracket + 1, end);
    const children = at === bracket ? this.#inside(label).map(withoutLinks) : [`Image: ${label || href}`];
    return this.#push({ tag: "a", href, children: children.length ? children : [href] }, TARGET.lastIndex);
  }

  #bracketed(at) {
    BREAK.lastIndex = BRACKETED.lastIndex = at;
    if (BREAK.test(this.text)) return this.#push({ tag: "br", children: [] }, BREAK.lastIndex);
    const address = BRACKETED.exec(this.text)?.[1];
    const href = address && safeAddress(address);
    return href ? this.#push({ tag: "a", href, children: [address] }, BRACKETED.lastIndex) : null;
  }

  /** An address in the text, without the sentence's own signs behind it. */
  #bare(at) {
    BARE.lastIndex = at;
    let address = WORD.test(this.text[at - 1] ?? "") ? "" : BARE.exec(this.text)?.[0] ?? "";
    while (/[.,;:!?_~')\]]$/.test(address) && !(address.endsWith(")") && address.includes("("))) address = address.slice(0, -1);
    const href = safeAddress(address);
    return href ? this.#push({ tag: "a", href, children: [address] }, at + address.length) : null;
  }
}

function withoutLinks(node) {
  if (typeof node === "string") return node;
  const children = node.children.map(withoutLinks);
  return node.tag === "a" ? { tag: "span", children } : { ...node, children };
}

function bracketPairs(text) {
  const [open, pairs] = [[], new Map()];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) pairs.set(open.pop(), at);
  }
  return pairs;
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}
