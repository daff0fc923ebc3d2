// What a reader can do here: ask a point for its figures, copy a command (theme.js: choose light or
// dark). Nothing depends on it: figures stand in tables too.

document.addEventListener("DOMContentLoaded", () => {
  points();
  parts();
  commands();
  sections();
});

// Points: one stop of the Tab key for each plot, arrows go from point to point.

const tip = () => document.getElementById("tip");

function show(point) {
  const box = tip();
  box.textContent = point.dataset.tip;
  box.hidden = false;
  const at = point.querySelector(".mark").getBoundingClientRect();
  const room = document.documentElement.clientWidth - box.offsetWidth - 8;
  const left = Math.min(Math.max(at.left + at.width / 2 - box.offsetWidth / 2, 8), room);
  const above = at.top - box.offsetHeight - 10;
  box.style.left = `${left + window.scrollX}px`;
  box.style.top = `${(above > 4 ? above : at.bottom + 10) + window.scrollY}px`;
  light(point, true);
}

function hide(point) {
  tip().hidden = true;
  light(point, false);
}

/** Whatever else in the figure has the same key. */
function light(from, on) {
  const figure = from.closest("figure");
  if (!from.dataset.key || !figure) return;
  for (const each of figure.querySelectorAll("[data-key]")) {
    each.classList.toggle("lit", on && each.dataset.key === from.dataset.key);
  }
}

function points() {
  for (const plot of document.querySelectorAll(".plot")) {
    const all = [...plot.querySelectorAll("[data-tip]")];
    all.forEach((point, index) => {
      point.querySelector("title").remove(); // the browser's own hint would lie over ours
      point.setAttribute("tabindex", index ? "-1" : "0");
      point.addEventListener("pointerenter", () => show(point));
      point.addEventListener("pointerleave", () => hide(point));
      point.addEventListener("focus", () => show(point));
      point.addEventListener("blur", () => hide(point));
      point.addEventListener("keydown", (event) => move(event, all, index));
    });
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip().hidden = true; });
}

function move(event, all, index) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = all[(index + step + all.length) % all.length];
  for (const each of all) each.setAttribute("tabindex", each === next ? "0" : "-1");
  next.focus();
}

/** Rows of tables and parts of bars mark what belongs to them. */
function parts() {
  for (const each of document.querySelectorAll("tr[data-key], rect[data-key]")) {
    each.addEventListener("pointerenter", () => light(each, true));
    each.addEventListener("pointerleave", () => light(each, false));
  }
}

function commands() {
  for (const command of document.querySelectorAll(".command")) {
    if (!navigator.clipboard) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    command.append(button);
  }
}

/** The section on the screen is marked in the list of sections. */
function sections() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const id of links.keys()) watch.observe(document.getElementById(id));
}
