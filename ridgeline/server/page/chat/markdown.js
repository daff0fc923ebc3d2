// Markdown as models write it, read into a tree of plain objects; rendering.js makes elements of it.
// What is not known here (HTML above all) stays text.
//
//     parse("**Hi**")        // [{tag: "p", children: [{tag: "strong", children: ["Hi"]}]}]
//
// A stream is read block by block: once a later block has begun on a whole line, nothing that follows
// changes the earlier ones, so that only the last is read again.

import { inline } from "./inline.js";

const MAX_DEPTH = 10; // of quotes and lists
const FENCE = /^( *)(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const TASK = /^\[([ xX])\] /;

export function parse(text) {
  return topBlocks(text).map(({ node }) => node);
}

export class MarkdownStream {
  #rest = "";

  /** What `piece` has closed, never to change again, and the blocks that are still open. */
  add(piece) {
    this.#rest += piece;
    const blocks = piece.includes("\n") ? topBlocks(this.#rest.slice(0, this.#rest.lastIndexOf("\n") + 1)) : [];
    const open = blocks.pop();
    if (blocks.length) this.#rest = this.#rest.slice(open.offset);
    return { closed: blocks.map(({ node }) => node), open: parse(this.#rest) };
  }
}

/** Each block with the offset of its first line. */
function topBlocks(text) {
  const sources = text.split("\n");
  const offsets = [];
  let offset = 0;
  for (const source of sources) {
    offsets.push(offset);
    offset += source.length + 1;
  }
  return blocksOf(sources.map(clean), 0).map(({ node, start }) => ({ node, offset: offsets[start] }));
}

function clean(source) {
  const line = source.endsWith("\r") ? source.slice(0, -1) : source;
  const indent = /^[ \t]*/.exec(line)[0];
  return indent.replaceAll("\t", "    ") + line.slice(indent.length);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let index = 0;
  while (index < lines.length) {
    if (isBlank(lines[index])) {
      index += 1;
      continue;
    }
    const block = blockAt(lines, index, depth);
    blocks.push({ node: block.node, start: index });
    index = block.next;
  }
  return blocks;
}

function blockAt(lines, index, depth) {
  return codeAt(lines, index) ?? headingAt(lines, index) ?? ruleAt(lines, index)
    ?? (depth < MAX_DEPTH ? quoteAt(lines, index, depth) ?? listAt(lines, index, depth) : null)
    ?? tableAt(lines, index) ?? paragraphAt(lines, index, depth);
}

function codeAt(lines, index) {
  const [, indent, fence, info] = FENCE.exec(lines[index]) ?? [];
  if (fence === undefined) return null;
  const isEnd = (line) => {
    const text = line.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  const length = lines.slice(index + 1).findIndex(isEnd);
  const end = length < 0 ? lines.length : index + 1 + length;
  const text = lines.slice(index + 1, end).map((line) => line.slice(Math.min(indent.length, indentOf(line)))).join("\n");
  const language = /^[\w+#.-]{1,20}/.exec(info)?.[0] ?? "";
  return { node: { tag: "pre", language, children: text ? [text] : [] }, next: end + 1 };
}

function headingAt(lines, index) {
  const mark = HEADING.exec(lines[index]);
  if (mark === null) return null;
  const level = Math.min(mark[1].length + 2, 6); // the page has its own of the first two levels
  return { node: { tag: `h${level}`, children: inline(withoutClosing(lines[index].slice(mark[0].length).trim())) }, next: index + 1 };
}

/** `Title ##` is `Title`. */
function withoutClosing(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

function ruleAt(lines, index) {
  return RULE.test(lines[index]) ? { node: { tag: "hr", children: [] }, next: index + 1 } : null;
}

function quoteAt(lines, index, depth) {
  let next = index;
  while (next < lines.length && QUOTE.test(lines[next])) next += 1;
  if (next === index) return null;
  const inside = lines.slice(index, next).map((line) => line.replace(QUOTE, ""));
  return { node: { tag: "blockquote", children: nodesOf(inside, depth + 1) }, next };
}

function listAt(lines, index, depth) {
  const first = ITEM.exec(lines[index]);
  if (first === null) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let next = index;
  while (next < lines.length) {
    const item = itemAt(lines, next, first[1].length, isOrdered);
    if (item === null) break;
    items.push({ tag: "li", children: itemNodes(item.lines, depth + 1) });
    next = item.next;
  }
  const start = isOrdered ? Number.parseInt(first[2], 10) : 1;
  return { node: { tag: isOrdered ? "ol" : "ul", start, children: items }, next };
}

/** The lines of one item, without their indent; null where no item of this list begins. */
function itemAt(lines, index, indent, isOrdered) {
  const mark = ITEM.exec(lines[index]);
  if (mark === null || RULE.test(lines[index])) return null;
  if (mark[1].length > indent + 1 || mark[1].length < indent || /\d/.test(mark[2]) !== isOrdered) return null;
  const width = mark[0].length;
  const inside = [lines[index].slice(width)];
  let next = index + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) inside.push("");
    else if (indentOf(line) > indent + 1 || (indentOf(line) > indent && !ITEM.test(line))) inside.push(line.slice(Math.min(indentOf(line), width)));
    else if (!isBlank(lines[next - 1]) && !ITEM.test(line) && !interrupts(lines, next, 0)) inside.push(line); // its sentence goes on
    else break;
  }
  while (next > index + 1 && isBlank(lines[next - 1])) { // between this item and what follows
    next -= 1;
    inside.pop();
  }
  return { lines: inside, next: skipBlank(lines, next, indent, isOrdered) };
}

/** Past blank lines, where the list goes on behind them. */
function skipBlank(lines, index, indent, isOrdered) {
  let next = index;
  while (next < lines.length && isBlank(lines[next])) next += 1;
  const mark = next < lines.length ? ITEM.exec(lines[next]) : null;
  return mark !== null && mark[1].length >= indent && /\d/.test(mark[2]) === isOrdered ? next : index;
}

function itemNodes(lines, depth) {
  const task = TASK.exec(lines[0]);
  const nodes = nodesOf(task === null ? lines : [lines[0].slice(task[0].length), ...lines.slice(1)], depth);
  const [first, ...rest] = nodes;
  const children = first?.tag === "p" ? [...first.children, ...rest] : nodes;
  return task === null ? children : [{ tag: "span", children: [task[1] === " " ? "☐ " : "☑ "] }, ...children];
}

function tableAt(lines, index) {
  const aligns = tableAligns(lines, index);
  if (aligns === null) return null;
  let next = index + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return { tag: "tr", children: aligns.map((align, column) => ({ tag, align, children: inline(cells[column] ?? "") })) };
  };
  const head = { tag: "thead", children: [row(lines[index], "th")] };
  const body = { tag: "tbody", children: lines.slice(index + 2, next).map((line) => row(line, "td")) };
  return { node: { tag: "table", children: [head, body] }, next };
}

/** How the columns of the table that begins here are aligned; null where none does. */
function tableAligns(lines, index) {
  if (!lines[index].includes("|") || !(lines[index + 1] ?? "").includes("-")) return null;
  const marks = cellsOf(lines[index + 1]);
  if (marks.length !== cellsOf(lines[index]).length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
}

function cellsOf(line) {
  const cells = [""];
  const text = line.trim();
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|") cells.push("");
    else cells[cells.length - 1] += text[at];
  }
  if (text.endsWith("|") && cells.length > 1) cells.pop();
  return cells.map((cell) => cell.trim());
}

function paragraphAt(lines, index, depth) {
  let next = index + 1;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines, next, depth)) next += 1;
  const text = lines.slice(index, next).map((line) => line.trimStart()).join("\n").trimEnd();
  return { node: { tag: "p", children: inline(text) }, next };
}

/** Whether another block begins in the middle of a paragraph; of numbered lists only those from 1. */
function interrupts(lines, index, depth) {
  const line = lines[index];
  const item = ITEM.exec(line);
  const isItem = item !== null && item[0].length < line.length && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || tableAligns(lines, index) !== null
    || (depth < MAX_DEPTH && (isItem || QUOTE.test(line)));
}

function nodesOf(lines, depth) {
  return blocksOf(lines, depth).map(({ node }) => node);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function isBlank(line) {
  return line.trim() === "";
}
