// The table of requests, those that live and the last that ended, each with a way to cancel it.

import { ask } from "/page/access.js";
import { count, digits, element, seconds } from "/page/format.js";

const body = document.getElementById("requests-rows");
const none = document.getElementById("requests-none");
const told = document.getElementById("requests-count");
const more = document.getElementById("requests-more");
const FEW = { live: 8, ended: 4 }; // shown until all are asked for
let showsAll = false;
let last = null;
const rows = new Map(); // by id: what is on the page already, so that focus stays where it is

more.addEventListener("click", () => {
  showsAll = !showsAll;
  showRequests(last);
});

export function showRequests(requests) {
  const { num_live: numLive, live, ended } = last = requests;
  const wanted = showsAll ? [...live, ...ended] : [...live.slice(0, FEW.live), ...ended.slice(0, FEW.ended)];
  const ids = new Set(wanted.map(({ id }) => id));
  for (const [id, row] of rows) if (!ids.has(id)) { row.remove(); rows.delete(id); }
  wanted.forEach((request, index) => {
    const row = rows.get(request.id) ?? newRow(request);
    fill(row, request, live.includes(request));
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  none.hidden = wanted.length > 0;
  more.hidden = live.length <= FEW.live && ended.length <= FEW.ended;
  more.textContent = showsAll ? "Show fewer" : `Show all ${count(live.length + ended.length)}`;
  more.setAttribute("aria-expanded", String(showsAll));
  const hidden = numLive - live.length;
  told.textContent = `${count(numLive)} live${hidden > 0 ? `, ${count(hidden)} not shown` : ""}`;
}

function newRow({ id, route, tenant }) {
  const number = () => element("td", "number");
  const row = element("tr", "", element("td", "id", id), element("td", "route", tenant ? `${route} · ${tenant}` : route),
    element("td", "", element("span", "state")), number(), number(), number(), number(), number(), element("td", "act"));
  row.cells[0].title = id;
  rows.set(id, row);
  return row;
}

function fill(row, request, isLive) {
  row.className = isLive ? "" : "over";
  const state = row.cells[2].firstChild;
  state.className = `state ${request.state}`;
  state.textContent = request.state === "finished" ? `finished, ${request.reason}` : request.state;
  state.title = request.reason;
  const speed = request.tokens_per_s;
  const values = [
    ["Prompt", request.num_prompt_tokens ? count(request.num_prompt_tokens) : ""],
    ["Output", count(request.num_tokens)],
    ["Speed", speed === null ? "" : `${digits(speed)}/s`],
    ["First token", request.first_token_s === null ? "" : seconds(request.first_token_s)],
    ["Age", seconds(request.age_s)],
  ];
  values.forEach(([name, value], index) => {
    row.cells[3 + index].dataset.name = name;
    row.cells[3 + index].textContent = value;
  });
  const act = row.cells[8];
  if (isLive && !act.firstChild) act.append(cancelButton(request.id));
  if (!isLive) act.replaceChildren();
}

function cancelButton(id) {
  const button = element("button", "", "Cancel");
  button.type = "button";
  button.setAttribute("aria-label", `Cancel request ${id}`);
  button.addEventListener("click", async () => {
    button.disabled = true;
    const reply = await ask(`/live/cancel/${encodeURIComponent(id)}`, { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
    if (!reply.ok && reply.status !== 404) button.disabled = false;
  });
  return button;
}
