// What is known: a snapshot, and what has changed since. Nothing here touches the page.
const KEYED = ["engines", "groups", "ways", "running"];
const MOST_REQUESTS = 200;

export class State {
  constructor() {
    this.picture = {};
    this.ended = []; // newest first
    this.untold = 0; // that ended, and were too many to be told
    this.labels = new Map();
    this.counts = { prefill: 0, decode: 0, both: 0 };
  }

  take(name, content) {
    if (name === "snapshot") {
      const { ended, ...picture } = content;
      this.picture = picture;
      const known = new Set(ended.map((one) => one.key));
      const kept = this.ended.filter((one) => !known.has(one.key));
      this.ended = [...ended.reverse(), ...kept].slice(0, MOST_REQUESTS);
    } else if (name === "change") {
      for (const [section, items] of Object.entries(content)) this.change(section, items);
    } else if (name === "ended") {
      this.ended = [...content.requests.reverse(), ...this.ended].slice(0, MOST_REQUESTS);
      this.untold += content.untold;
    } else if (name === "moved") {
      for (const request of this.ended) request.moved = content[request.key] ?? request.moved;
    }
    for (const [engine, { role }] of Object.entries(this.picture.engines ?? {})) this.label(engine, role);
  }

  change(section, items) {
    if (!KEYED.includes(section)) {
      this.picture[section] = items;
      return;
    }
    const into = { ...this.picture[section] };
    for (const [key, item] of Object.entries(items)) {
      if (item === null) delete into[key];
      else into[key] = item;
    }
    this.picture[section] = into;
  }

  // P1, D2: short names that an engine keeps as long as this page is open.
  label(engine, role) {
    if (!this.labels.has(engine) && role) {
      const letter = { prefill: "P", decode: "D", both: "PD" }[role];
      this.labels.set(engine, `${letter}${++this.counts[role]}`);
    }
    return this.labels.get(engine) ?? engine;
  }

  get engines() {
    return Object.values(this.picture.engines ?? {});
  }
}

// An engine's state, in a word that is a class, too; the worst first.
export function stateOf(engine) {
  if (engine.intent === "draining") return "draining";
  if (engine.health === "unhealthy") return "unhealthy";
  if (engine.health === "unknown") return "unknown";
  if (engine.cold) return "cold";
  if (engine.cooling) return "cooling";
  return engine.circuit === "closed" ? "healthy" : "doubtful";
}

// What just happened, in words: for a chat's answer, and the head of a request's details.
export function told(request, label) {
  const { ms } = request, parts = [];
  const { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached } = request;
  const computed = prompt === null ? null : prompt - (cached ?? 0);
  if (ms.prefill_done !== null && request.prefiller) {
    const what = computed === null ? "prefilled" : `prefilled ${computed} token${computed === 1 ? "" : "s"}`;
    const took = ms.prefill_done - (ms.prefill_started ?? 0);
    parts.push(`${what} on ${label(request.prefiller)} in ${span(took)}`);
  }
  if (request.moved?.prompt) parts.push(moved(request.moved.prompt));
  if (request.decoder) {
    const alone = request.prefiller ? "" : " alone";
    parts.push(`decoded on ${label(request.decoder)}${alone}`);
  }
  if (ms.first_byte !== null) parts.push(`first token after ${span(ms.first_byte)}`);
  if (completion > 1 && ms.ended !== null && ms.first_byte !== null && ms.ended > ms.first_byte) {
    const rate = ((completion - 1) * 1000) / (ms.ended - ms.first_byte);
    parts.push(`${completion} tokens at ${rate < 10 ? rate.toFixed(1) : Math.round(rate)}/s`);
  }
  if (cached) {
    const whence = request.reused_from ? ` from ${label(request.reused_from)}` : " from caches";
    const turn = request.moved?.turn;
    parts.push(`${cached} of ${prompt} tokens reused${whence}${turn ? ` (${moved(turn)})` : ""}`);
  }
  if (request.failures.length) parts.push(`${request.failures.length} failed on the way`);
  return parts.join(", ");
}

// What engines say that they moved; blocks that were there already are none.
export function moved({ blocks, ms }) {
  return blocks ? `${blocks} block${blocks === 1 ? "" : "s"} moved in ${span(ms)}` : "no block had to move";
}

function span(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
