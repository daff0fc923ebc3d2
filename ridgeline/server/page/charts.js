// Charts over time: one or two lines each, axes with units, values at the pointer.

import { element, shape } from "/page/format.js";

const SPAN_S = 300; // shown at most
const EDGE = { left: 46, right: 10, top: 12, bottom: 22 };
const HEIGHT = 190;

export class TimeChart {
  /**
   * `series`: {name, key, className, area}; `read` makes a value readable; `ticks` fixes the scale,
   * `least` is the least top of one that is not fixed, `log` makes it logarithmic.
   */
  constructor(figure, title, { series, read, ticks = null, least = 1, log = false }) {
    Object.assign(this, { figure, title, series, read, ticks, least, log });
    this.points = [];
    this.pointer = null;
    this.svg = shape("svg", { role: "img" });
    this.legend = element("ul", "legend");
    figure.append(element("h2", "", title), this.legend, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  update(points) {
    this.points = points;
    this.draw();
  }

  point(event) {
    this.pointer = event.clientX - this.svg.getBoundingClientRect().left;
    this.draw();
  }

  draw() {
    const width = this.figure.clientWidth;
    if (!width) return;
    const last = this.points.at(-1)?.t ?? 0;
    const first = Math.max(this.points[0]?.t ?? 0, last - SPAN_S);
    const shown = this.points.filter((point) => point.t >= first);
    const span = Math.max(last - first, 10);
    const values = this.series.flatMap(({ key }) => shown.map((point) => point[key])).filter((value) => value > 0);
    const { ticks, share } = this.scale(values);
    const x = (time) => width - EDGE.right - (last - time) / span * (width - EDGE.left - EDGE.right);
    const y = (value) => HEIGHT - EDGE.bottom - share(value) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.axes(width, ticks, y), ...timeTicks(span, width, x, last));
    for (const one of this.series) this.svg.append(...lines(shown, one, x, y));
    this.tell(this.chosen(shown, x, y));
  }

  /** Where the ticks are, and how high a value lies, from 0 to 1. */
  scale(values) {
    if (this.log) {
      const ticks = decades(Math.min(this.least, ...values), Math.max(this.least * 10, ...values));
      const span = Math.log(ticks.at(-1) / ticks[0]);
      return { ticks, share: (value) => Math.max(0, Math.log(value / ticks[0]) / span) };
    }
    const ticks = this.ticks ?? niceTicks(Math.max(this.least, ...values));
    return { ticks, share: (value) => value / ticks.at(-1) };
  }

  axes(width, ticks, y) {
    return ticks.flatMap((tick, index) => [
      shape("line", { class: index ? "grid" : "axis", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: EDGE.left - 8, y: y(tick) + 4, "text-anchor": "end" }, this.read(tick)),
    ]);
  }

  /** The point under the pointer, or the last. */
  chosen(shown, x, y) {
    if (this.pointer === null || !shown.length) return shown.at(-1);
    const found = shown.reduce((best, point) => Math.abs(x(point.t) - this.pointer) < Math.abs(x(best.t) - this.pointer) ? point : best);
    this.svg.append(shape("line", { class: "cursor", x1: x(found.t), x2: x(found.t), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    for (const { key, className } of this.series) {
      const value = found[key];
      if (value !== null && value !== undefined) this.svg.append(shape("circle", { class: `dot ${className}`, cx: x(found.t), cy: y(value), r: 4 }));
    }
    return found;
  }

  tell(point) {
    const told = this.series.map(({ name, key, className }) => {
      const value = point?.[key];
      const text = value === null || value === undefined ? "–" : this.read(value);
      const mark = shape("svg", { "aria-hidden": "true" });
      mark.append(shape("line", { class: `line ${className}`, x1: 1, x2: 17, y1: 4, y2: 4 }));
      return { item: element("li", "", mark, `${name} `, element("b", "", text)), text: `${name} ${text}` };
    });
    this.legend.replaceChildren(...told.map(({ item }) => item));
    this.svg.setAttribute("aria-label", `${this.title}. ${told.map(({ text }) => text).join(", ")}.`);
  }
}

/** Where values are missing the line is. */
function lines(shown, { key, className, area }, x, y) {
  const runs = [[]];
  for (const point of shown) {
    const value = point[key];
    if (value === null || value === undefined) runs.push([]);
    else runs.at(-1).push(`${x(point.t).toFixed(1)} ${y(value).toFixed(1)}`);
  }
  return runs.filter((run) => run.length).flatMap((run) => {
    const path = `M${run.length > 1 ? run.join("L") : `${run[0]}h0`}`;
    const line = shape("path", { class: `line ${className}`, d: path });
    if (!area || run.length < 2) return [line];
    const [from, to] = [run[0].split(" ")[0], run.at(-1).split(" ")[0]];
    return [shape("path", { class: `area ${className}`, d: `${path}L${to} ${y(0)}L${from} ${y(0)}Z` }), line];
  });
}

/** Three to five round steps from zero. */
export function niceTicks(highest) {
  const rough = highest / 3.2;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.ceil(highest / step - 1e-9) + 1 }, (_, index) => index * step);
}

/** Powers of ten, from the last below to the first above. */
function decades(low, high) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.max(first + 1, Math.ceil(Math.log10(high) - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
}

function timeTicks(span, width, x, last) {
  const step = [5, 10, 15, 20, 30, 60].find((each) => span / each <= 5) ?? 60;
  const found = [];
  for (let ago = 0; ago <= span + 0.5; ago += step) {
    const text = ago === 0 ? "now" : step >= 60 ? `${ago / 60} min` : `${ago} s`;
    const where = x(last - ago);
    if (where < EDGE.left - 1) break;
    found.push(shape("text", { x: Math.min(where, width - EDGE.right), y: HEIGHT - 5, "text-anchor": ago === 0 ? "end" : "middle" }, ago ? `−${text}` : text));
  }
  return found;
}
