// Charts over time: one or two lines each, axes with units, values at the pointer.

import { element, shape } from "../format.js";
import { decadesAround, linearScale, logScale, roundSteps } from "./scales.js";

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
    const ticks = this.ticksFor(values);
    const x = linearScale(last - span, last, EDGE.left, width - EDGE.right);
    const y = (this.log ? logScale : linearScale)(ticks[0], ticks.at(-1), HEIGHT - EDGE.bottom, EDGE.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.axes(width, ticks, y), ...timeTicks(span, width, x, last));
    for (const one of this.series) this.svg.append(...lines(shown, one, x, y));
    this.showValues(this.chosen(shown, x, y));
  }

  ticksFor(values) {
    if (this.log) return decadesAround(Math.min(this.least, ...values), Math.max(this.least * 10, ...values));
    return this.ticks ?? roundSteps(Math.max(this.least, ...values));
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
    const distance = (point) => Math.abs(x(point.t) - this.pointer);
    const nearest = shown.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    this.svg.append(shape("line", { class: "cursor", x1: x(nearest.t), x2: x(nearest.t), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    for (const { key, className } of this.series) {
      const value = nearest[key];
      if (value !== null && value !== undefined) this.svg.append(shape("circle", { class: `dot ${className}`, cx: x(nearest.t), cy: y(value), r: 4 }));
    }
    return nearest;
  }

  showValues(point) {
    const entries = this.series.map(({ name, key, className }) => {
      const value = point?.[key];
      const text = value === null || value === undefined ? "–" : this.read(value);
      const mark = shape("svg", { "aria-hidden": "true" });
      mark.append(shape("line", { class: `line ${className}`, x1: 1, x2: 17, y1: 4, y2: 4 }));
      return { item: element("li", "", mark, `${name} `, element("b", "", text)), text: `${name} ${text}` };
    });
    this.legend.replaceChildren(...entries.map(({ item }) => item));
    this.svg.setAttribute("aria-label", `${this.title}. ${entries.map(({ text }) => text).join(", ")}.`);
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

function timeTicks(span, width, x, last) {
  const step = [5, 10, 15, 20, 30, 60].find((each) => span / each <= 5) ?? 60;
  const labels = [];
  for (let ago = 0; ago <= span + 0.5; ago += step) {
    const text = ago === 0 ? "now" : step >= 60 ? `${ago / 60} min` : `${ago} s`;
    const position = x(last - ago);
    if (position < EDGE.left - 1) break;
    labels.push(shape("text", { x: Math.min(position, width - EDGE.right), y: HEIGHT - 5, "text-anchor": ago === 0 ? "end" : "middle" }, ago ? `−${text}` : text));
  }
  return labels;
}
