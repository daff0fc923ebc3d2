// Figures as people read them, and small helpers for building elements.

const LARGE = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

/** Three significant digits: 4321 is "4.32 k". */
export function large(value, unit = "") {
  const [factor, prefix] = LARGE.find(([least]) => Math.abs(value) >= least) ?? LARGE.at(-1);
  return `${digits(value / factor)}${prefix || unit ? "\u202f" : ""}${prefix}${unit}`;
}

/** A count as it is up to five figures: 4321 is "4,321". */
export function count(value) {
  return value < 99999.5 ? Math.round(value).toLocaleString("en-US") : large(value);
}

export function seconds(value) {
  if (value < 1e-3) return `${digits(value * 1e6)}\u202fµs`;
  if (value < 1) return `${digits(value * 1e3)}\u202fms`;
  if (value < 60) return `${digits(value)}\u202fs`;
  if (value < 3600) return `${Math.floor(value / 60)}\u202fmin ${Math.floor(value % 60)}\u202fs`;
  return `${Math.floor(value / 3600)}\u202fh ${Math.floor((value % 3600) / 60)}\u202fmin`;
}

export function percent(share) {
  return `${Math.round(100 * share)}%`;
}

/** Three significant digits. */
export function digits(value) {
  return String(Number(value.toPrecision(3)));
}

/** An element with a class and children; text is always text. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** An SVG element with attributes. */
export function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}
