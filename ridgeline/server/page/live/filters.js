// Which requests the table shows: by state, by key, by a word in the id or the route.

const LIVE = ["arrived", "waiting", "running"];
export const STATES = {
  "": "All", live: "Live", waiting: "Waiting", running: "Running", finished: "Finished",
  cancelled: "Cancelled", failed: "Failed or refused",
};

export function matches(request, { state = "", tenant = "", text = "" }) {
  const word = text.trim().toLowerCase();
  return isInState(request.state, state)
    && (!tenant || request.tenant === tenant)
    && (!word || [request.id, request.route, request.tenant].some((part) => part.toLowerCase().includes(word)));
}

function isInState(state, wanted) {
  if (!wanted) return true;
  if (wanted === "live") return LIVE.includes(state);
  if (wanted === "waiting") return state === "waiting" || state === "arrived";
  if (wanted === "failed") return state === "failed" || state === "refused";
  return state === wanted;
}

/** The names of keys, each once, in order. */
export function tenantsOf(requests) {
  return [...new Set(requests.map(({ tenant }) => tenant).filter(Boolean))].sort();
}
