// The state of the dashboard: a snapshot, with the changes since. Nothing here touches the document.
const KEYED = ["engines", "groups", "ways", "running"];
const MAX_REQUESTS = 200;

export class State {
  constructor() {
    this.snapshot = {};
    this.ended = []; // newest first
    this.missed = 0; // ended requests that the router had no room to send
    this.labels = new Map();
    this.counts = { prefill: 0, decode: 0, both: 0 };
  }

  take(name, content) {
    if (name === "snapshot") {
      const { ended, ...snapshot } = content;
      this.snapshot = snapshot;
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
}

// An engine's state, which is also the name of a CSS class.
export function stateOf(engine) {
  if (engine.intent === "draining") return "draining";
  if (engine.health === "unhealthy") return "unhealthy";
  if (engine.health === "unknown") return "unknown";
  if (engine.cold) return "cold";
  if (engine.cooling) return "cooling";
  if (engine.circuit !== "closed") return "doubtful";
  return engine.degraded ? "degraded" : "healthy";
}

// Describes a request in one sentence: under a chat's answer, and in a request's details.
export function describeRequest(request, label) {
  const { ms } = request, parts = [];
  const { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached } = request;
  const computed = prompt === null ? null : prompt - (cached ?? 0);
  if (ms.prefill_done !== null && request.prefiller) {
    const what = computed === null ? "prefilled" : `prefilled ${computed} token${computed === 1 ? "" : "s"}`;
    const took = ms.prefill_done - (ms.prefill_started ?? 0);
    parts.push(`${what} on ${label(request.prefiller)} in ${formatTime(took)}`);
  }
  const why = request.without_transfer;
  if (request.moved?.prompt) parts.push(describeTransfer(request.moved.prompt));
  else if (request.prefiller && request.decoder && !why) parts.push("KV offered");
  if (request.decoder) {
    const alone = why ? ` alone (${why})` : request.prefiller ? "" : " alone";
    parts.push(`decoded on ${label(request.decoder)}${alone}`);
  }
  if (ms.first_byte !== null) parts.push(`first token after ${formatTime(ms.first_byte)}`);
  if (completion > 1 && ms.ended !== null && ms.first_byte !== null && ms.ended > ms.first_byte) {
    const rate = ((completion - 1) * 1000) / (ms.ended - ms.first_byte);
    parts.push(`${completion} tokens at ${rate < 10 ? rate.toFixed(1) : Math.round(rate)}/s`);
  }
  if (cached) {
    const source = request.reused_from ? ` from ${label(request.reused_from)}` : " from caches";
    const turn = request.moved?.turn;
    parts.push(`${cached} of ${prompt} tokens reused${source}${turn ? ` (${describeTransfer(turn)})` : ""}`);
  }
  if (request.failures.length) parts.push(`${request.failures.length} failed attempt${request.failures.length === 1 ? "" : "s"}`);
  return parts.join(", ");
}

// Describes a transfer as engines report it, without blocks that were there already.
export function describeTransfer({ blocks, ms }) {
  return blocks ? `${blocks} block${blocks === 1 ? "" : "s"} moved in ${formatTime(ms)}` : "no blocks moved";
}

function formatTime(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
