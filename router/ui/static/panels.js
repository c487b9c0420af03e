// The panels of numbers and of settings, and the links to other pages.
import { $, compact, count, duration, keep, make, perSecond, plural, setClass, setText } from "./dom.js";
import { MAX_REQUESTS, latencyOf } from "./state.js";

const RATE_WINDOW_MS = 5000;
const LATENCY_WINDOW_S = 60;
const QUIET_OUTCOMES = ["ok", "refused", "disconnected"];

export class Totals {
  constructor(state) {
    this.state = state;
    this.points = []; // [time, answered requests]
    this.tiles = new Map();
  }

  show() {
    const { totals } = this.state.snapshot;
    if (!totals) return;
    const by = totals.by, queue = totals.queue;
    const failed = Object.entries(by).filter(([name]) => !QUIET_OUTCOMES.includes(name))
      .reduce((sum, [, number]) => sum + number, 0);
    const recent = this.recent(), { ttft, itl } = latencies(recent);
    const isByEvents = recent.some(({ counted, completion_tokens: many }) => many && counted === "events");
    const tiles = [
      ["in flight", compact(totals.in_flight), "requests"],
      ["queue", queue ? compact(queue.depth) : "–", queue ? `of ${compact(queue.size)}` : "no engine limits", queue && queue.size && queue.depth >= queue.size ? "bad" : ""],
      ["throughput", perSecond(this.rate(by.ok ?? 0)), "completed requests"],
      ["output", perSecond(this.outputRate(recent)), isByEvents ? "tokens and events" : "tokens"],
      ["TTFT", quantile(ttft, 0.5), `p50 · p99 ${quantile(ttft, 0.99)} · ${plural(ttft.length, "request")}`],
      ["ITL", quantile(itl, 0.5), `p50 · p99 ${quantile(itl, 0.99)} · ${plural(itl.length, "stream")}`],
      ["completed", compact(by.ok ?? 0), `of ${compact(totals.requests)}`],
      ["failed", compact(failed), "5xx, broken streams", failed ? "bad" : ""],
      ["rejected", compact(by.refused ?? 0), "4xx"],
      ["disconnected", compact(by.disconnected ?? 0), "by the client"],
    ];
    keep($("totals"), this.tiles, tiles.map((tile) => [tile[0], tile]),
      (name) => make("div", {}, make("dt", {}, name), make("dd"), make("dd", { class: "quiet" })),
      (tile, [, value, unit, kind]) => {
        setClass(tile, kind || "");
        setText(tile.children[1], value);
        setText(tile.children[2], unit);
      });
    $("totals").title = `TTFT, ITL and output: of the requests that ended in the last ${LATENCY_WINDOW_S} s, at most ${MAX_REQUESTS}. Counts: since the router's start.`;
  }

  rate(requests) {
    const now = performance.now(), last = this.points.at(-1);
    if (!this.state.isLive) return this.lastRate ?? 0;
    if (last && last[1] > requests) this.points = []; // the router was restarted
    this.points.push([now, requests]);
    while (this.points.length > 2 && this.points[0][0] < now - RATE_WINDOW_MS) this.points.shift();
    const [[then, before]] = this.points;
    this.lastRate = now - then > 900 ? Math.max(0, ((requests - before) * 1000) / (now - then)) : 0;
    return this.lastRate;
  }

  recent() {
    const oldest = this.state.now - LATENCY_WINDOW_S;
    return this.state.ended.filter((one) => one.ms.ended !== null && endOf(one) >= oldest);
  }

  // Output per second. Of many requests only the latest are known, which ended in less time.
  outputRate(recent) {
    const { now } = this.state, since = recent.length < MAX_REQUESTS ? now - LATENCY_WINDOW_S : Math.min(...recent.map(endOf));
    return recent.reduce((sum, one) => sum + (one.completion_tokens ?? 0), 0) / Math.max(1, now - since);
  }
}

// The router's time when a request ended, in seconds.
const endOf = (request) => request.at + request.ms.ended / 1000;

function latencies(recent) {
  const all = recent.map(latencyOf);
  const of = (name) => all.map((one) => one[name]).filter((ms) => ms !== null).sort((a, b) => a - b);
  return { ttft: of("ttft"), itl: of("itl") };
}

function quantile(sorted, share) {
  return sorted.length ? duration(sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]) : "–";
}

export function showLinks({ docs, metrics_port: port }) {
  const metrics = $("link-metrics");
  if (port) metrics.href = `http://${location.hostname}:${port}/metrics`;
  $("link-docs").hidden = !docs;
  if (docs) $("link-docs").href = docs;
  setText($("checks-command"), `disagg-router doctor ${new URL("..", location.href).href.replace(/\/$/, "")}`);
}

const CHECK_SIGNS = { ok: "\u2713", skipped: "\u25cb", warning: "\u25b2", failed: "\u2716" };
const CHECK_WORDS = { ok: "OK", skipped: "skipped", warning: "warning", failed: "failed" };
const checks = new Map();

export function showChecks({ checks: results }) {
  if (!results) return;
  const bad = results.filter(({ state }) => state === "failed" || state === "warning").length;
  const skipped = results.filter(({ state }) => state === "skipped").length, rest = skipped ? `, ${skipped} skipped` : "";
  setText($("checks-summary"), bad ? `${bad} of ${plural(results.length, "check")} not OK${rest}` : `${results.length - skipped} OK${rest}`);
  keep($("checks-list"), checks, results.map((one) => [`${one.name} ${one.state === "ok" ? "" : one.text}`, one]),
    () => make("li", {}, make("span", { class: "sign", "aria-hidden": "true" }), make("p", {},
      make("strong"), make("span", { class: "unseen" }), " ", make("span"))),
    (item, { name, state, text, cure }) => {
      setClass(item, `check-${state}`);
      setText(item.children[0], CHECK_SIGNS[state]);
      const [title, word, , ] = item.children[1].children;
      setText(title, name);
      setText(word, `: ${CHECK_WORDS[state]},`);
      setText(item.children[1].lastElementChild, text + (cure ? `. To do: ${cure}` : ""));
    });
}

export function showTurns({ turns, conversations, ttl }) {
  if (!turns) return;
  const { store } = conversations ?? {};
  const waiting = turns.entries === null ? "" : `, ${plural(turns.entries, "turn")} stored`;
  setText($("turns-summary"), store === "off" ? "off (--conversation-store off)"
    : `stored in ${store === "memory" ? "memory" : store}${waiting}, each for ${ttl} s`);
  $("turns-tables").replaceChildren(
    bars("Turns by reuse of the last turn's KV", turns.outcomes),
    bars("Turns by KV retained for the next one", turns.kept));
}

function bars(title, counts) {
  const rows = Object.entries(counts).sort(([, a], [, b]) => b - a);
  const most = Math.max(1, ...rows.map(([, number]) => number));
  const body = rows.map(([name, number]) => make("tr", {},
    make("th", { scope: "row" }, name.replaceAll("_", " ")), make("td", { class: "number" }, count(number)),
    make("td", { class: "bar", "aria-hidden": "true" }, make("meter", { min: 0, max: most, value: number }))));
  if (!rows.length) body.push(make("tr", {}, make("td", { class: "empty" }, "none yet")));
  return make("table", {}, make("caption", {}, title), make("tbody", {}, ...body));
}

export function showSettings({ settings }) {
  if (!settings) return;
  const all = $("settings-all").checked, rows = [];
  let group = "";
  for (const one of settings) {
    if (!all && one.is_default) continue;
    if (one.group !== group) {
      group = one.group;
      rows.push(make("tr", { class: "group" }, make("th", { colspan: 2, scope: "rowgroup" }, group)));
    }
    rows.push(make("tr", { class: one.is_default ? "" : "own" },
      make("th", { scope: "row" }, one.flag), make("td", {}, one.value || "–")));
  }
  $("settings-table").tBodies[0].replaceChildren(...rows);
}
