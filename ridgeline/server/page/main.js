// Asks the server once a second how it is, and shows it: the verdict, figures, charts, requests.

import { hasKey, KeyMissingError, request } from "./access.js";
import { useModel } from "./chat/chat.js";
import { count, element, large, percent, seconds } from "./format.js";
import { TimeChart } from "./live/charts.js";
import { showRequests } from "./live/requests.js";
import { Roofline } from "./live/roofline.js";

const KEPT = 600; // points
const KINDS = {
  idle: "idle", host: "the host", pages: "KV pages", queue: "the batch", memory: "memory",
  compute: "compute", overhead: "overhead", unknown: "unknown",
};
const get = (id) => document.getElementById(id);
const share = (value) => percent(value);
const rate = (value) => large(value, "");
const series = (name, key, className, area = false) => ({ name, key, className, area });

const charts = [
  new TimeChart(get("throughput"), "Throughput, tokens per second", {
    series: [series("output", "output_per_s", "one", true), series("prompt", "prompt_per_s", "two dashed")], read: rate, least: 10,
  }),
  new TimeChart(get("latency"), "Latency", {
    series: [series("first token p50", "first_p50", "two"), series("p95", "first_p95", "two dashed"),
      series("between tokens p50", "inter_p50", "one"), series("p95", "inter_p95", "one dashed")], read: seconds, least: 0.01, log: true,
  }),
  new TimeChart(get("occupancy"), "Occupancy", {
    series: [series("batch", "batch", "one", true), series("KV pages in use", "pages_used", "two"), series("prefix cache", "pages_cached", "two dashed")],
    read: share, ticks: [0, 0.25, 0.5, 0.75, 1],
  }),
];
const roofline = new Roofline(get("roofline"));
let points = [];
let uptime = -1;
let timer = 0;

async function poll() {
  timer = 0; // until this one is answered
  try {
    const after = points.at(-1)?.t;
    const reply = await request(after === undefined ? "live" : `live?after=${after}`);
    if (!reply.ok) throw new Error(`answers ${reply.status}`);
    show(await reply.json());
    setText("link", "");
  } catch (error) {
    if (error instanceof KeyMissingError) return waitForKey();
    setText("link", "Server not reachable; retrying");
  }
  timer = setTimeout(poll, document.hidden ? 10000 : 1000);
}

/** Nothing is asked for until the reader has given a key. */
function waitForKey() {
  setText("link", "API key required");
  if (uptime < 0) setText("bound", "Enter an API key to see how this server does.");
  get("key-dialog").addEventListener("close", () => (hasKey() ? poll() : waitForKey()), { once: true });
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer) {
    clearTimeout(timer);
    poll();
  }
});

function show(now) {
  if (now.uptime_s < uptime) points = []; // another server: its clock began again
  uptime = now.uptime_s;
  points = [...points, ...now.points.map((point) => ({ ...point, batch: point.running / now.max_batch }))].slice(-KEPT);
  showServed(now);
  showVerdict(now.verdict);
  showFigures(now, points.at(-1));
  for (const chart of charts) chart.update(points);
  roofline.update(now.roof, now.verdict, points);
  showRequests(now.requests, now.viewer);
  useModel(now.model);
}

function showServed(now) {
  const how = [now.scheme ?? now.dtype, now.device, `up ${seconds(now.uptime_s)}`];
  if (now.num_restarts) how.push(`engine restarted ${now.num_restarts === 1 ? "once" : `${now.num_restarts} times`}`);
  get("served").replaceChildren(element("b", "", now.model), ` · ${how.join(" · ")}`);
  document.title = `${now.model} · Ridgeline`;
}

function showVerdict({ kind, bound, facts, next }) {
  setText("verdict-kind", KINDS[kind] ?? kind);
  setText("bound", `${bound[0].toUpperCase()}${bound.slice(1)}.`);
  const text = facts.join(" · ");
  setText("facts", text && `${text[0].toUpperCase()}${text.slice(1)}`);
  get("next").hidden = !next;
  if (get("next").dataset.text === next) return;
  get("next").dataset.text = next;
  const parts = next.split("`").map((part, index) => (index % 2 ? element("code", "", part) : part));
  get("next").replaceChildren(element("b", "", "Next: "), ...parts, ".");
}

/** Only when it changes, so that a selection in it stays. */
function setText(id, text) {
  if (get(id).textContent !== text) get(id).textContent = text;
}

function showFigures(now, point) {
  const or = (value, read) => (value === null || value === undefined ? "–" : read(value));
  const figures = [
    ["Output", or(point?.output_per_s, count), "tokens/s"],
    ["First token, p50", or(point?.first_p50, seconds), ""],
    ["Between tokens, p50", or(point?.inter_p50, seconds), ""],
    ["Running", or(point?.running, count), point?.waiting ? `${count(point.waiting)} waiting` : `of ${count(now.max_batch)}`],
    ["KV pages in use", or(point?.pages_used, percent), now.num_pages ? `of ${count(now.num_pages)}` : ""],
  ];
  get("figures").replaceChildren(...figures.map(([name, value, unit]) =>
    element("div", "", element("dt", "", name), element("dd", "", value, unit ? element("small", "", ` ${unit}`) : null))));
}

poll();
