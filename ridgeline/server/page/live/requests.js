// The table of requests, those that live and the last that ended, each with a way to cancel it. The
// server sends an ordinary key its own requests, an admin key those of all.

import { request as send } from "../access.js";
import { announce } from "../clipboard.js";
import { count, digits, element, seconds } from "../format.js";
import { matches, STATES, tenantsOf } from "./filters.js";

const get = (id) => document.getElementById(id);
const [body, none, summary, more] = ["requests-rows", "requests-none", "requests-count", "requests-more"].map(get);
const [stateFilter, tenantFilter, textFilter] = ["requests-state", "requests-tenant", "requests-text"].map(get);
const FEW = { live: 8, ended: 4 }; // shown until the reader wants all
const CELL = { id: 0, tenant: 1, route: 2, state: 3, numbers: 4, act: 9 };
let showsAll = false;
let last = null;
let lastViewer = null;
const rows = new Map(); // by id: what is on the page already, so that focus stays where it is

for (const [state, name] of Object.entries(STATES)) stateFilter.append(option(state, name));
for (const filter of [stateFilter, tenantFilter, textFilter]) {
  filter.addEventListener("input", () => { if (last) showRequests(last); });
}
more.addEventListener("click", () => {
  showsAll = !showsAll;
  showRequests(last);
});

/** `viewer` is whose key this tab has; without one, or to an admin, all are shown. */
export function showRequests(requests, viewer = lastViewer) {
  [last, lastViewer] = [requests, viewer];
  showTenants(tenantsOf([...requests.live, ...requests.ended]));
  const filter = { state: stateFilter.value, tenant: tenantFilter.value, text: textFilter.value };
  const isFiltered = Object.values(filter).some(Boolean);
  const live = requests.live.filter((request) => matches(request, filter));
  const ended = requests.ended.filter((request) => matches(request, filter));
  const shown = showsAll ? [...live, ...ended] : [...live.slice(0, FEW.live), ...ended.slice(0, FEW.ended)];
  showRows(shown, new Set(live));
  none.hidden = shown.length > 0;
  none.textContent = isFiltered ? "No request matches these filters." : "No requests yet.";
  more.hidden = live.length <= FEW.live && ended.length <= FEW.ended;
  more.textContent = showsAll ? "Show fewer" : `Show all ${count(live.length + ended.length)}`;
  more.setAttribute("aria-expanded", String(showsAll));
  const unsent = requests.num_live - requests.live.length;
  const parts = [`${count(requests.num_live)} live`];
  if (unsent > 0) parts.push(`${count(unsent)} not shown`);
  if (isFiltered) parts.push(`${count(live.length + ended.length)} match`);
  if (viewer && !viewer.is_admin) parts.push(`of your key (${viewer.tenant}) only`);
  summary.textContent = parts.join(", ");
}

/** The filter and the column are there where requests have keys. */
function showTenants(tenants) {
  const chosen = tenantFilter.value;
  const names = chosen && !tenants.includes(chosen) ? [...tenants, chosen] : tenants;
  get("requests").classList.toggle("no-tenants", names.length === 0);
  if ([...tenantFilter.options].slice(1).map(({ value }) => value).join() === names.join()) return;
  tenantFilter.replaceChildren(option("", "All"), ...names.map((name) => option(name, name)));
  tenantFilter.value = chosen;
}

function option(value, text) {
  return Object.assign(element("option", "", text), { value });
}

function showRows(shown, live) {
  const ids = new Set(shown.map(({ id }) => id));
  for (const [id, row] of rows) if (!ids.has(id)) { row.remove(); rows.delete(id); }
  shown.forEach((request, index) => {
    const row = rows.get(request.id) ?? newRow(request);
    fill(row, request, live.has(request));
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
}

function newRow({ id, route, tenant }) {
  const number = () => element("td", "number");
  const row = element("tr", "", element("td", "id", id), element("td", "tenant", tenant), element("td", "route", route),
    element("td", "", element("span", "state")), number(), number(), number(), number(), number(), element("td", "act"));
  row.cells[CELL.id].title = id;
  rows.set(id, row);
  return row;
}

function fill(row, request, isLive) {
  row.className = isLive ? "" : "over";
  const state = row.cells[CELL.state].firstChild;
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
    const cell = row.cells[CELL.numbers + index];
    cell.dataset.name = name;
    cell.textContent = value;
  });
  const act = row.cells[CELL.act];
  if (isLive && !act.firstChild) act.append(cancelButton(request.id));
  if (!isLive) act.replaceChildren();
}

function cancelButton(id) {
  const button = element("button", "", "Cancel");
  button.type = "button";
  button.setAttribute("aria-label", `Cancel request ${id}`);
  button.addEventListener("click", async () => {
    button.disabled = true;
    const problem = await cancel(id);
    button.disabled = problem === "";
    button.title = problem;
    button.textContent = problem ? "Not cancelled" : "Cancel";
    announce(problem || `Request ${id} is cancelled.`);
  });
  return button;
}

/** Why it was not cancelled; nothing where it was, or has ended meanwhile. */
async function cancel(id) {
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: "{}" };
    const reply = await send(`live/cancel/${encodeURIComponent(id)}`, options);
    if (reply.ok || reply.status === 404) return "";
    return (await reply.json().catch(() => null))?.error?.message ?? `The server answered ${reply.status}.`;
  } catch (error) {
    return error.message;
  }
}
