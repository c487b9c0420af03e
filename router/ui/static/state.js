// The state of the dashboard: a snapshot, with the changes since. Nothing here touches the document.
import { duration, plural } from "./dom.js";

const KEYED = ["engines", "groups", "ways", "running"];
export const MAX_REQUESTS = 200;

export class State {
  constructor() {
    this.snapshot = {};
    this.hasSnapshot = false;
    this.isLive = false;
    this.ended = []; // newest first
    this.missed = 0; // ended requests that the router had no room to send
    this.labels = new Map();
    this.counts = { prefill: 0, decode: 0, both: 0 };
    this.offset = 0; // seconds that this computer's clock is ahead of the router's
    this.frozenAt = 0;
  }

  take(name, content) {
    if (name === "snapshot") {
      const { ended, ...snapshot } = content;
      this.snapshot = snapshot;
      this.hasSnapshot = true;
      this.offset = Date.now() / 1000 - (content.now ?? Date.now() / 1000);
      const known = new Set(ended.map((one) => one.key));
      const kept = this.ended.filter((one) => !known.has(one.key));
      this.ended = [...ended.reverse(), ...kept].slice(0, MAX_REQUESTS);
    } else if (name === "change") {
      for (const [section, items] of Object.entries(content)) this.change(section, items);
    } else if (name === "ended") {
      this.ended = [...content.requests.reverse(), ...this.ended].slice(0, MAX_REQUESTS);
      this.missed += content.untold;
    } else if (name === "moved") {
      for (const request of this.ended) request.moved = content[request.key] ?? request.moved;
    }
    for (const [engine, { role }] of Object.entries(this.snapshot.engines ?? {})) this.label(engine, role);
  }

  change(section, items) {
    if (!KEYED.includes(section)) {
      this.snapshot[section] = items;
      return;
    }
    const into = { ...this.snapshot[section] };
    for (const [key, item] of Object.entries(items)) {
      // While another engine takes a stream over, its record has no first byte.
      if (item?.resumes) item.ms.first_byte ??= into[key]?.ms.first_byte ?? null;
      if (item === null) delete into[key];
      else into[key] = item;
    }
    this.snapshot[section] = into;
  }

  // Short names, P1 or D2, which engines keep while this page is open.
  label(engine, role) {
    if (!this.labels.has(engine) && role) {
      const letter = { prefill: "P", decode: "D", both: "PD" }[role];
      this.labels.set(engine, `${letter}${++this.counts[role]}`);
    }
    return this.labels.get(engine) ?? engine;
  }

  get engines() {
    return Object.values(this.snapshot.engines ?? {});
  }

  // The router's Unix time in seconds; without a connection it stands still.
  get now() {
    return this.isLive ? Date.now() / 1000 - this.offset : this.frozenAt;
  }

  freeze() {
    this.frozenAt = this.now || Date.now() / 1000 - this.offset;
    this.isLive = false;
  }

  get isStopping() {
    return Boolean(this.snapshot.ready?.blocking.router);
  }
}

// An engine's state, which is also the name of a CSS class.
export function stateOf(engine) {
  if (engine.intent === "draining") return "draining";
  if (engine.health === "unhealthy") return "unhealthy";
  if (engine.health === "unknown") return "unknown";
  if (engine.cold) return "cold";
  if (engine.cooling) return "cooling";
  if (engine.circuit !== "closed") return "avoided";
  return engine.degraded ? "degraded" : "healthy";
}

export const STATE_WORDS = {
  healthy: "healthy", unhealthy: "unhealthy", degraded: "degraded", avoided: "avoided", cooling: "overloaded",
  cold: "warming up", draining: "draining", unknown: "not probed", gone: "removed",
};
// Colour is not the only sign of a state.
export const STATE_SIGNS = {
  healthy: "\u25cf", unhealthy: "\u2716", degraded: "\u25b2", avoided: "\u25b2", cooling: "\u25b2",
  cold: "\u25d0", draining: "\u25bd", unknown: "\u25cb", gone: "\u25cb",
};

// Why an engine is not simply healthy; empty if it is.
export function reasonOf(engine) {
  const state = stateOf(engine);
  if (state === "degraded") return `no KV moves: ${engine.degraded}`;
  if (state === "avoided") return `requests failed there: ${engine.circuit_reason || "see the log"}`;
  if (state === "cooling") return "it answers that it is overloaded";
  if (state === "cold") return "the router sends it warm-up requests";
  if (state === "draining") return engine.drained ? "it may be stopped" : "it gets no new requests";
  // The address is shown beside it, and an error number does not help the operator.
  return state === "healthy" ? "" : engine.reason.replaceAll(`${engine.name}: `, "").replace(/\[Errno \d+\] /, "");
}

// An engine of both roles is on the side of the legs that it gets now: 0 prefill or both, 1 decode.
export const sideOf = (engine) => ((engine.preferred_role ?? engine.role) === "decode" ? 1 : 0);

// What an engine of both roles does now; empty for another one.
export function workOf(engine) {
  if (engine.role !== "both") return "";
  return { prefill: "computes prompts now", decode: "decodes now" }[engine.preferred_role] ?? "computes prompts and decodes";
}

// The limits of an engine's steps, as far as it reports them.
export function stepsOf({ step_limit_ms: limit, mixing }) {
  const parts = [];
  if (limit) parts.push(`steps up to ${duration(limit)}`);
  if (typeof mixing === "number") parts.push(`mixing costs ${mixing.toFixed(2)} weight reads`);
  return parts.join(", ");
}

// The latency of a request: time to first token, and mean time between two tokens of a stream.
export function latencyOf({ ms, completion_tokens: tokens }) {
  const { first_byte: first, ended } = ms;
  const hasPace = tokens > 1 && first !== null && ended !== null && ended - first >= tokens / 10;
  return { ttft: first, itl: hasPace ? (ended - first) / (tokens - 1) : null };
}

// What is counted of an answer: its tokens, or the events of a stream that reports neither usage nor token ids.
export const outputOf = ({ completion_tokens: many, counted }) => plural(many, counted === "events" ? "event" : "token");

// Where another decode engine began to continue a stream, as far as the router knows.
export function resumedAt({ ms, resumes }) {
  const { first_byte: first, decode_started: started } = ms;
  return resumes && first !== null && started !== null && started > first ? started : null;
}

// Describes a request in one sentence: under a chat's answer, and in a request's details.
export function describeRequest(request, label) {
  const { ms } = request, parts = [];
  const { prompt_tokens: prompt, cached_tokens: cached } = request;
  const computed = prompt === null ? null : prompt - (cached ?? 0);
  if (ms.prefill_done !== null && request.prefiller) {
    const what = computed === null ? "prefilled" : `prefilled ${plural(computed, "token")}`;
    const took = ms.prefill_done - (ms.prefill_started ?? 0);
    parts.push(`${what} on ${label(request.prefiller)} in ${duration(took)}`);
  }
  const why = request.without_transfer;
  if (request.moved?.prompt) parts.push(describeTransfer(request.moved.prompt));
  else if (request.prefiller && request.decoder && !why) parts.push("KV offered");
  if (request.decoder) {
    const alone = why ? ` alone (${why})` : request.prefiller ? "" : " alone";
    parts.push(`decoded on ${label(request.decoder)}${alone}`);
  }
  if (ms.first_byte !== null) parts.push(`TTFT ${duration(ms.first_byte)}`);
  const { itl } = latencyOf(request);
  if (request.completion_tokens) parts.push(outputOf(request) + (itl === null ? "" : `, ITL ${duration(itl)}`));
  if (cached) {
    const holder = request.reused_from || request.borrowed_from;
    const source = holder ? ` from ${label(holder)}` : " from caches";
    const turn = request.moved?.turn;
    parts.push(`${cached} of ${prompt} tokens reused${source}${turn ? ` (${describeTransfer(turn)})` : ""}`);
  }
  if (request.resumes) parts.push(`resumed on another engine${request.resumes > 1 ? ` ${request.resumes} times` : ""}`);
  if (request.failures.length) parts.push(plural(request.failures.length, "failed attempt"));
  return parts.join(", ");
}

// Describes a transfer as engines report it, without blocks that were there already.
export function describeTransfer({ blocks, ms }) {
  return blocks ? `${plural(blocks, "block")} moved in ${duration(ms)}` : "no blocks moved";
}
