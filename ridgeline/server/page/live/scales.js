// From values to positions, and round values for the axes. The reports are drawn in Python
// (profiling/drawing/scales.py); `decadesInside` is the same rule there, and a test compares them.

/** A function from [low, high] to [from, to]; what it was made of is kept on it. */
export function linearScale(low, high, from, to) {
  return scale({ low, high }, (value) => from + (value - low) / (high - low) * (to - from));
}

/** The same by logarithms; what is below `low` is drawn at it. */
export function logScale(low, high, from, to) {
  const span = Math.log(high / low);
  return scale({ low, high }, (value) => from + Math.log(Math.max(value, low) / low) / span * (to - from));
}

function scale(domain, map) {
  return Object.assign(map, domain);
}

/** Three to five round steps from zero; the last is at or above `highest`. */
export function roundSteps(highest) {
  const rough = highest / 3.2;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.ceil(highest / step - 1e-9) + 1 }, (_, index) => index * step);
}

/** Powers of ten from the last below `low` to the first above `high`. */
export function decadesAround(low, high) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  return powers(first, Math.max(first + 1, Math.ceil(Math.log10(high) - 1e-9)));
}

/** Powers of ten inside, every second one where there are many. */
export function decadesInside(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  return powers(first, last, last - first > 5 ? 2 : 1);
}

function powers(first, last, step = 1) {
  const length = Math.max(0, Math.floor((last - first) / step) + 1);
  return Array.from({ length }, (_, index) => Number(`1e${first + index * step}`));
}
