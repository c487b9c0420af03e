// The panels of numbers: totals, conversations, settings.
import { $, make, plural, setText } from "./dom.js";

const RATE_WINDOW_MS = 5000;

export class Totals {
  constructor() {
    this.points = []; // [time, requests]
  }

  show({ totals }) {
    if (!totals) return;
    const now = performance.now();
    this.points.push([now, totals.requests]);
    while (this.points.length > 2 && this.points[0][0] < now - RATE_WINDOW_MS) this.points.shift();
    const [[then, before]] = this.points;
    const rate = now - then > 900 ? Math.max(0, ((totals.requests - before) * 1000) / (now - then)) : 0;
    const bad = Object.entries(totals.by).filter(([name]) => !["ok", "refused", "disconnected"].includes(name))
      .reduce((sum, [, count]) => sum + count, 0);
    const facts = [
      ["requests", String(totals.requests)],
      ["per second", rate < 10 ? rate.toFixed(1) : String(Math.round(rate))],
      ["in flight", String(totals.in_flight)],
      ["failed", String(bad), bad ? "bad" : ""],
      ["rejected", String(totals.by.refused ?? 0)],
      ["disconnected", String(totals.by.disconnected ?? 0)],
    ];
    facts.forEach(([name, value, kind], at) => {
      const known = $("totals").children[at] ?? $("totals").appendChild(make("div", {}, make("dt"), make("dd")));
      setText(known.children[0], name);
      setText(known.children[1], value);
      known.className = kind ?? "";
    });
  }
}

export function showTurns({ turns, conversations, ttl }) {
  if (!turns) return;
  const { store } = conversations ?? {};
  const waiting = turns.entries === null ? "" : `, ${plural(turns.entries, "turn")} waiting`;
  setText($("turns-summary"), store === "off" ? "off (--conversation-store off)"
    : `kept in ${store === "memory" ? "memory" : store}${waiting}, each for ${ttl} s`);
  $("turns-tables").replaceChildren(
    bars("Reuse of the last turn's KV", turns.outcomes),
    bars("KV retained for the next turn", turns.kept));
}

function bars(title, counts) {
  const rows = Object.entries(counts).sort(([, a], [, b]) => b - a);
  const most = Math.max(1, ...rows.map(([, count]) => count));
  const body = rows.map(([name, count]) => make("tr", {},
    make("th", { scope: "row" }, name.replaceAll("_", " ")), make("td", { class: "number" }, String(count)),
    make("td", { class: "bar", "aria-hidden": "true" }, make("meter", { min: 0, max: most, value: count }))));
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
