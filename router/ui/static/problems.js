// What is wrong now, the worst first: requests that fail, engines that do not serve, failed checks.
import { $, ago, count, keep, make, moment, plural, setClass, setText } from "./dom.js";
import { STATE_SIGNS, STATE_WORDS, reasonOf, stateOf } from "./state.js";

const MAX_SHOWN = 8;
// The engines and the reasons of one problem that are named.
const MAX_NAMED = 6;
const CRITICAL = "critical", WARNING = "warning";
const ROLES = ["prefill", "decode"];
const KV_CHECKS = ["KV transfer", "engine ids"];
// States that need no attention.
const CALM = new Set(["healthy", "unknown", "cold", "gone"]);

export class Problems {
  constructor(state) {
    this.state = state;
    this.items = new Map();
    this.announced = new Set();
  }

  show() {
    const all = this.state.hasSnapshot ? [...this.ofRouter(), ...this.ofRequests(), ...this.ofEngines(), ...this.ofChecks()] : [];
    all.sort((a, b) => (a.level === CRITICAL ? 0 : 1) - (b.level === CRITICAL ? 0 : 1));
    const shown = all.slice(0, MAX_SHOWN);
    if (all.length > shown.length) {
      shown.push({ key: "more", level: WARNING, title: `${plural(all.length - shown.length, "more problem")}`, text: "see Engines and Checks" });
    }
    keep($("problems-list"), this.items, shown.map((one) => [one.key, one]), create, update);
    $("problems").hidden = !shown.length;
    if (this.state.isLive) document.title = all.length ? `(${all.length}) disagg-router` : "disagg-router";
    this.announce(all);
  }

  // Announces new problems; those of engines are announced as changes of their states.
  announce(all) {
    const fresh = all.filter(({ key }) => !this.announced.has(key) && !key.startsWith("engine "));
    if (fresh.length && this.state.isLive) setText($("announce"), fresh.map((one) => `${one.title}: ${one.text}`).join(". "));
    this.announced = new Set(all.map((one) => one.key));
  }

  *ofRouter() {
    const { ready, workers } = this.state.snapshot;
    if (!ready) return;
    if (workers.answered < workers.known) {
      yield { key: "workers", level: WARNING, title: `${workers.answered} of ${plural(workers.known, "worker process", "worker processes")} answer`, text: "the figures are of these alone" };
    }
    // The problems of the engines have lines of their own.
    const told = (reasons) => Object.entries(reasons).map(([what, why]) => (ROLES.includes(what) ? this.lackOf(what) : `${what}: ${why}`)).join("; ");
    if (ready.blocking.router) {
      const running = this.state.snapshot.totals?.in_flight ?? 0;
      yield { key: "ready", level: CRITICAL, title: "The router is shutting down", text: `${plural(running, "request")} in flight may still end, new ones are refused` };
    } else if (Object.keys(ready.blocking).length) {
      yield { key: "ready", level: CRITICAL, title: "Requests are refused with 503", text: told(ready.blocking) };
    } else if (ready.degrading.prefill) {
      yield { key: "ready", level: WARNING, title: "No prefill engine can serve", text: ready.degrading.prefill.split("; ").at(-1) };
    }
  }

  lackOf(role) {
    const known = this.state.engines.filter((one) => one.role === role || one.role === "both").length;
    if (known === 1) return `the only ${role} engine cannot serve`;
    return known ? `none of ${known} ${role} engines can serve` : `no ${role} engine is known`;
  }

  // One item for each status: in an outage, each engine has an error text of its own.
  *ofRequests() {
    const { refusals = [], refusal_window: window, totals } = this.state.snapshot;
    const merged = new Map();
    for (const { status, text, count: many } of refusals) {
      const one = merged.get(status) ?? { status, texts: [], many: 0 };
      one.many += many;
      one.texts.push(text || "an engine's own answer");
      merged.set(status, one);
    }
    for (const { status, texts, many } of merged.values()) {
      const text = texts.join("; ");
      const what = status === 200 ? "broke in mid-stream" : status === 429 || status === 503 ? `refused with ${status}` : `failed with ${status}`;
      const queue = text.includes("queue") && totals.queue?.size && totals.queue.depth >= totals.queue.size
        ? ` (queue full: ${count(totals.queue.depth)} of ${count(totals.queue.size)})` : "";
      yield {
        key: `refused ${status}`, level: status === 429 ? WARNING : CRITICAL,
        title: `${plural(many, "request")} ${what} in the last ${window} s`,
        text: text + queue,
      };
    }
  }

  // One item for each state, which lists its engines, and each reason once.
  *ofEngines() {
    const { now } = this.state, merged = new Map();
    for (const engine of this.state.engines) {
      const state = stateOf(engine);
      if (CALM.has(state) || (state === "degraded" && this.explainsDegraded)) continue;
      merged.set(state, [...(merged.get(state) ?? []), engine]);
    }
    for (const [state, engines] of merged) {
      const first = Math.min(...engines.map((one) => one.since ?? Infinity));
      const since = state === "unhealthy" && Number.isFinite(first) ? ` since ${moment(first, now)} (${ago(now - first)})` : "";
      const labels = engines.slice(0, MAX_NAMED).map(({ name }) => this.state.label(name)).join(", ");
      const more = engines.length > MAX_NAMED ? ` and ${count(engines.length - MAX_NAMED)} more` : "";
      const reasons = new Map();
      for (const engine of engines) reasons.set(reasonOf(engine), [...(reasons.get(reasonOf(engine)) ?? []), engine.name]);
      const text = [...reasons].slice(0, MAX_NAMED).map(([reason, names]) => `${names.slice(0, MAX_NAMED).join(", ")}: ${reason}`).join("; ");
      yield {
        key: `engine ${state}`, level: state === "unhealthy" ? CRITICAL : WARNING, sign: STATE_SIGNS[state],
        title: `${labels}${more} ${STATE_WORDS[state]}${since}`, text,
      };
    }
  }

  // A check says which engines exchange no KV, why, and what to do.
  get explainsDegraded() {
    return (this.state.snapshot.checks ?? []).some(({ name, state }) => KV_CHECKS.includes(name) && state === "failed");
  }

  // What the engines' own states do not show already.
  *ofChecks() {
    for (const { name, state, text, cure } of this.state.snapshot.checks ?? []) {
      if (state === "ok" || state === "skipped" || name.endsWith(" engines") || name.startsWith("group ")) continue;
      const isCritical = state === "failed" && !KV_CHECKS.includes(name); // without KV transfers, requests are still answered
      yield {
        key: `check ${name} ${text}`, level: isCritical ? CRITICAL : WARNING,
        title: name[0].toUpperCase() + name.slice(1), text: text + (cure ? `. To do: ${cure}` : ""),
      };
    }
  }
}

function create() {
  return make("li", {}, make("span", { class: "sign", "aria-hidden": "true" }), make("p", {}, make("strong"), " ", make("span")));
}

function update(item, { level, title, text, sign }) {
  setClass(item, level);
  const [mark, line] = item.children;
  setText(mark, sign ?? (level === CRITICAL ? "\u2716" : "\u25b2"));
  setText(line.children[0], title);
  setText(line.children[1], text);
}
