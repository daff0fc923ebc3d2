// The roofline: what the machine allows, and where its steps are now. Both axes are logarithmic.

import { element, large, percent, shape } from "../format.js";
import { decadesInside, logScale } from "./scales.js";

const HEIGHT = 190;
const EDGE = { left: 58, right: 12, top: 24, bottom: 36 };
const OVER = 1.0005; // of a limit: more is said in words
const TRAIL = 45; // seconds of points that fade behind

export class Roofline {
  constructor(figure) {
    this.figure = figure;
    this.svg = shape("svg", { role: "img" });
    this.legend = element("ul", "legend");
    figure.append(element("h2", "", "Roofline"), this.legend, this.svg);
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  update(roof, verdict, points) {
    Object.assign(this, { roof, points });
    this.phases = [
      { name: "Decode", key: "decode", className: "one", phase: verdict.decode },
      { name: "Prefill", key: "prefill", className: "two", phase: verdict.prefill },
    ];
    this.draw();
  }

  draw() {
    const width = this.figure.clientWidth;
    if (!width || !this.phases) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    if (!this.roof) {
      this.legend.replaceChildren(element("li", "", "This machine's limits are unknown; run “ridgeline hardware” once to measure them."));
      this.svg.setAttribute("aria-label", "Roofline: this machine's limits are unknown.");
      return;
    }
    this.scales(width);
    this.drawAxes(width);
    this.drawRoof();
    this.named = [];
    for (const each of this.phases) if (each.phase) this.drawPhase(each);
    this.showValues();
  }

  scales(width) {
    const { memory, matrix } = this.roof;
    const ridge = matrix.value / memory.value;
    const now = this.phases.filter(({ phase }) => phase?.flops_per_s).map(({ phase }) => phase);
    const low = Math.min(ridge / 100, ...now.map((phase) => phase.intensity / 2));
    const high = Math.max(ridge * 30, ...now.map((phase) => phase.intensity * 2));
    const bottom = Math.min(low * memory.value, ...now.map((phase) => phase.flops_per_s / 2));
    const top = matrix.value * 2.5;
    this.x = logScale(low, high, EDGE.left, width - EDGE.right);
    this.y = logScale(bottom, top, HEIGHT - EDGE.bottom, EDGE.top);
    Object.assign(this, { ridge, low, high });
  }

  drawAxes(width) {
    const end = HEIGHT - EDGE.bottom;
    for (const value of decadesInside(this.x.low, this.x.high)) {
      this.svg.append(
        shape("line", { class: "grid", x1: this.x(value), x2: this.x(value), y1: EDGE.top, y2: end }),
        shape("text", { x: this.x(value), y: end + 15, "text-anchor": "middle" }, plain(value)),
      );
    }
    for (const value of decadesInside(this.y.low, this.y.high)) {
      this.svg.append(
        shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(value), y2: this.y(value) }),
        shape("text", { x: EDGE.left - 8, y: this.y(value) + 4, "text-anchor": "end" }, large(value)),
      );
    }
    this.svg.append(
      shape("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: end, y2: end }),
      shape("text", { x: width - EDGE.right, y: HEIGHT - 4, "text-anchor": "end" }, "FLOP per byte moved"),
      shape("text", { x: EDGE.left - 8, y: 10, "text-anchor": "end" }, "FLOP/s"),
    );
  }

  drawRoof() {
    const { memory, matrix } = this.roof;
    const points = [[this.low, this.low * memory.value], [this.ridge, matrix.value], [this.high, matrix.value]];
    const middle = Math.sqrt(this.low * this.ridge);
    const path = points.map(([x, y]) => `${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("L");
    this.svg.append(
      shape("path", { class: "roof", d: `M${path}` }),
      shape("text", { class: "halo", x: this.x(this.high), y: this.y(matrix.value) - 6, "text-anchor": "end" }, large(matrix.value, "FLOP/s")),
      shape("text", { class: "halo", x: this.x(middle) - 8, y: this.y(middle * memory.value) - 4, "text-anchor": "end" }, large(memory.value, "B/s")),
    );
  }

  drawPhase({ name, key, className, phase }) {
    const recent = this.points.slice(-TRAIL).map((point) => point[key]).filter((each) => each?.flops_per_s);
    for (const each of recent) {
      this.svg.append(shape("circle", { class: `dot trail ${className}`, cx: this.x(each.intensity), cy: this.y(this.drawn(each)), r: 3 }));
    }
    if (!phase.flops_per_s) return;
    const [x, y] = [this.x(phase.intensity), this.y(this.drawn(phase))];
    const limit = this.limit(phase);
    const isRight = phase.intensity > this.ridge;
    this.svg.append(
      shape("line", { class: `drop ${className}`, x1: x, x2: x, y1: this.y(limit), y2: y }),
      key === "decode"
        ? shape("circle", { class: `dot ${className}`, cx: x, cy: y, r: 6 })
        : shape("rect", { class: `dot ${className}`, x: x - 5.5, y: y - 5.5, width: 11, height: 11 }),
      this.label(name, x, y, isRight),
    );
  }

  limit(phase) {
    return Math.min(phase.intensity * this.roof.memory.value, this.roof.matrix.value);
  }

  /** Never over the roof: what exceeds it was measured against too low a limit, and the legend says so. */
  drawn(phase) {
    return Math.min(phase.flops_per_s, this.limit(phase));
  }

  /** Right of the point, or below it where the roof ends; above it where that is taken. */
  label(name, x, y, isRight) {
    const below = { x, y: y + 21, anchor: "middle", left: x - 24 };
    const beside = { x: x + 11, y: y + 5, anchor: "start", left: x + 11 };
    const above = { x, y: y - 12, anchor: "middle", left: x - 24 };
    const isFree = (spot) => this.named.every((other) => Math.abs(other.left - spot.left) > 52 || Math.abs(other.y - spot.y) > 15);
    const spot = [isRight ? below : beside, below, above].find(isFree) ?? above;
    this.named.push(spot);
    return shape("text", { class: "name halo", x: spot.x, y: spot.y, "text-anchor": spot.anchor }, name);
  }

  showValues() {
    const source = this.roof.memory.source === "measured" ? "measured here" : "from the datasheet";
    const entries = this.phases.filter(({ phase }) => phase?.flops_per_s).map(({ name, phase }) => {
      const isMemory = phase.memory_share >= phase.matrix_share;
      const share = Math.max(phase.memory_share, phase.matrix_share);
      const over = share > OVER ? ": above 100%, so this limit was measured too low" : "";
      return [name, percent(share), (isMemory ? "of bandwidth" : "of matrix rate") + over];
    });
    this.legend.replaceChildren(
      ...entries.map(([name, share, what]) => element("li", "", `${name} `, element("b", "", share), ` ${what}`)),
      element("li", "", `limits ${source}`),
    );
    const text = entries.map((parts) => parts.join(" ")).join(", ") || "no step yet";
    this.svg.setAttribute("aria-label", `Roofline. ${text}. Limits ${source}.`);
  }
}

function plain(value) {
  return value >= 1 ? value.toLocaleString("en-US") : String(Number(value.toPrecision(1)));
}
