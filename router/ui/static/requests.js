// The requests as bars on a common axis of time, newest first; each one expands to its details.
import { $, bytes, clockTime, count, draw, duration, make, plural, setClass, setText } from "./dom.js";
import { describeRequest, describeTransfer, latencyOf, outputOf, resumedAt } from "./state.js";

const MAX_ROWS = 40, MAX_ROWS_NARROW = 15;
const GOOD = new Set(["ok", "running"]);
const STAGES = { receive: "receiving", queue: "queued", prefill: "prefill", decode: "decode", stream: "streaming", done: "ending" };
const OUTCOMES = { ok: "ok", engine_error: "engine error", broken_stream: "broken stream", refused: "rejected" };
// Longer bars than this many times the median are cut, so that one of them does not hide the others.
const MAX_MEDIANS = 5;
const MAX_TICKS = 4, MIN_TICK_WIDTH = 62;

export class Requests {
  constructor(state) {
    this.state = state;
    this.rows = new Map(); // key: { item, button, details, request }
    this.open = new Set();
    this.isPaused = false;
    this.scale = { end: 0, step: 0 };
    this.list = $("requests-list");
    this.narrow = matchMedia("(max-width: 620px)");
    this.narrow.addEventListener("change", () => this.show());
    $("requests-pause").addEventListener("click", () => this.pause(!this.isPaused));
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    $("requests-pause").setAttribute("aria-pressed", String(isPaused));
    setText($("requests-pause"), isPaused ? "Paused: resume" : "Pause");
    if (!isPaused) this.show();
  }

  show() {
    if (this.isPaused) return;
    const running = Object.values(this.state.snapshot.running ?? {}).sort((a, b) => b.at - a.at);
    const ended = new Set(this.state.ended.map((one) => one.key));
    const all = [...running.filter((one) => !ended.has(one.key)), ...this.state.ended]
      .slice(0, this.narrow.matches ? MAX_ROWS_NARROW : MAX_ROWS);
    $("requests-empty").hidden = all.length > 0;
    $("requests-head").hidden = !all.length;
    const { missed } = this.state;
    setText($("requests-missed"), missed ? `${plural(missed, "more request")} ended than the dashboard can show` : "");
    this.setScale(all);
    const keys = new Set(all.map((one) => one.key));
    for (const [key, row] of this.rows) {
      if (keys.has(key) || row.item.contains(document.activeElement)) continue;
      row.item.remove();
      this.rows.delete(key);
      this.open.delete(key);
    }
    let before = this.list.firstElementChild;
    for (const request of all) {
      const { item } = this.row(request);
      if (item === before) before = before.nextElementSibling;
      else this.list.insertBefore(item, before);
    }
  }

  // The axis ends at a round time, and stays as it is while the bars fill a good part of it.
  setScale(requests) {
    const served = requests.filter((one) => one.ms.first_byte !== null);
    const spans = (served.length ? served : requests).map((one) => this.elapsed(one)).sort((a, b) => a - b);
    const longest = spans.at(-1) ?? 0, median = spans[spans.length >> 1] ?? 0;
    const wanted = Math.max(1, Math.min(longest, median * MAX_MEDIANS));
    const { end } = this.scale, width = $("requests-axis").clientWidth;
    if (wanted > end || wanted < end * 0.4) this.scale = roundScale(wanted * 1.02);
    else if (width === this.axisWidth) return;
    this.axisWidth = width;
    const ticks = [], isNarrow = (width * this.scale.step) / this.scale.end < MIN_TICK_WIDTH;
    for (let at = 0; at <= this.scale.end * 1.001; at += this.scale.step) {
      const share = (at / this.scale.end) * 100, isLast = share > 99;
      if (isNarrow && at && !isLast) continue;
      ticks.push(draw("text", { x: `${share}%`, y: 12, "text-anchor": at === 0 ? "start" : isLast ? "end" : "middle" }, at === 0 ? "0" : tick(at)));
    }
    $("requests-axis").replaceChildren(...ticks);
  }

  elapsed({ ms, at }) {
    return ms.ended ?? Math.max(0, (this.state.now - at) * 1000);
  }

  row(request) {
    let row = this.rows.get(request.key);
    if (!row) {
      row = this.newRow(request.key);
      this.rows.set(request.key, row);
    }
    const mark = `${request.stage} ${request.outcome} ${this.scale.end} ${JSON.stringify(request.moved)}`;
    if (row.mark !== mark || request.outcome === "running") {
      row.mark = mark;
      this.fill(row, request);
    }
    return row;
  }

  newRow(key) {
    const id = `request-${key}`;
    const button = make("button", { type: "button", class: "row", "aria-expanded": "false", "aria-controls": id });
    const details = make("div", { id, class: "details", hidden: true });
    const row = { item: make("li", {}, button, details), button, details, request: null };
    button.addEventListener("click", () => this.toggle(key, row));
    return row;
  }

  toggle(key, row) {
    const isOpen = !this.open.delete(key);
    if (isOpen) this.open.add(key);
    row.button.setAttribute("aria-expanded", String(isOpen));
    row.details.hidden = !isOpen;
    if (isOpen) this.detail(row);
  }

  fill(row, request) {
    row.request = request;
    const label = (name) => this.state.label(name);
    const way = [request.prefiller, request.decoder].filter(Boolean).map(label).join(" → ") || "no engine";
    const isRunning = request.outcome === "running";
    const status = GOOD.has(request.outcome) || request.outcome === "disconnected" || request.status < 300 ? "" : ` ${request.status}`;
    const word = isRunning ? STAGES[request.stage] ?? request.stage : (OUTCOMES[request.outcome] ?? request.outcome) + status;
    const resumed = request.resumes ? make("span", { class: "mark" }, request.resumes > 1 ? `↻ resumed ${request.resumes}×` : "↻ resumed") : null;
    const { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached, counted } = request;
    const out = completion === null ? "" : counted === "events" ? plural(completion, "event") : `${count(completion)} out`;
    const tokens = [prompt === null ? "" : `${count(prompt)} in`, out].filter(Boolean).join(" · ");
    setClass(row.item, `outcome-${request.outcome}`);
    row.button.replaceChildren(
      make("span", { class: "time" }, clockTime(request.at)),
      make("span", { class: "word" }, word, resumed ? " " : null, resumed),
      make("span", { class: "way" }, way),
      this.bars(request),
      make("span", { class: "total" }, duration(request.ms.ended) || "…"),
      make("span", { class: "tokens" }, tokens, cached ? make("span", { class: "cached" }, ` · ${count(cached)} reused`) : null),
    );
    if (!row.details.hidden) this.detail(row);
  }

  detail(row) {
    const { request } = row, label = (name) => this.state.label(name);
    const { ms } = request, engine = (name) => (name ? `${label(name)}, ${name}` : "");
    const queued = ms.queued === null ? null : (ms.admitted ?? ms.ended) - ms.queued;
    const { itl } = latencyOf(request), resumed = resumedAt(request);
    const facts = [
      ["Summary", describeRequest(request, label)],
      ["Request", request.id],
      ["Endpoint", `${request.endpoint}, status ${request.status || "none yet"}`],
      ["Model", request.model],
      ["Flow", request.flow.replace("_", " ")],
      ["Prefill engine", engine(request.prefiller)],
      ["Decode engine", engine(request.decoder)],
      ["Tokens", describeTokens(request)],
      ["Last turn", request.conversation && request.conversation.replaceAll("_", " ")
        + (request.reused_from ? `, KV pulled from ${engine(request.reused_from)}` : "")],
      ["Borrowed prefix", request.borrowed_tokens ? `${plural(request.borrowed_tokens, "token")} from ${engine(request.borrowed_from)}` : ""],
      ["KV moved", request.moved ? describeTransfers(request, label) : ""],
      ["Queue", duration(queued)],
      ["Prefill", ms.prefill_done !== null ? duration(ms.prefill_done - (ms.prefill_started ?? 0)) : ""],
      ["Decode TTFT", ms.first_byte !== null && ms.decode_started !== null && resumed === null
        ? duration(ms.first_byte - ms.decode_started) : ""],
      ["TTFT", duration(ms.first_byte)],
      ["ITL, mean", duration(itl)],
      [request.counted === "events" ? "Events/s" : "Tokens/s", itl ? (1000 / itl).toFixed(1) : ""],
      ["Streaming", ms.ended !== null && ms.first_byte !== null ? duration(ms.ended - ms.first_byte) : ""],
      ["End to end", duration(ms.ended)],
      ["Resumed", request.resumes ? `${plural(request.resumes, "time")} by another decode engine${resumed === null ? "" : `, last at ${duration(resumed)}`}` : ""],
      ["Failed attempts", request.failures.join("\n")],
      ["Ended at", !GOOD.has(request.outcome) && request.stage !== "done" ? STAGES[request.stage] ?? request.stage : ""],
      ["Error", request.error],
    ];
    row.details.replaceChildren(make("dl", {}, ...facts.filter(([, text]) => text)
      .flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
  }

  // The upper lane is the prefill engine's, the lower one the decode engine's.
  bars(request) {
    const { ms } = request, end = this.elapsed(request), scale = this.scale.end;
    const bar = (from, to, lane, name) => {
      if (from === null || to === null || to < from || from > scale) return null;
      const x = (from / scale) * 100, width = Math.max(0.4, ((Math.min(to, scale) - from) / scale) * 100);
      return draw("rect", { x: `${x.toFixed(2)}%`, width: `${width.toFixed(2)}%`, y: lane * 8 + 1, height: 6, class: name });
    };
    const line = (at, name) => draw("line", { x1: `${(at / scale) * 100}%`, x2: `${(at / scale) * 100}%`, y1: 0, y2: 16, class: name });
    const grid = [];
    for (let at = this.scale.step; at < scale * 0.999; at += this.scale.step) grid.push(line(at, "grid"));
    const first = ms.prefill_started ?? ms.decode_started ?? end;
    const resumed = resumedAt(request);
    // Where a prefill engine computed the prompt again for the engine that continued, its bar is that of the second time.
    const broke = resumed === null ? null : Math.min(resumed, ms.prefill_started > ms.first_byte ? ms.prefill_started : resumed);
    const parts = resumed === null ? [
      bar(0, first, request.prefiller ? 0 : 1, "queue"),
      bar(ms.decode_started, ms.first_byte ?? end, 1, "wait"),
      bar(ms.first_byte, end, 1, "tokens"),
    ] : [
      bar(ms.first_byte, broke, 1, "tokens"),
      bar(resumed, end, 1, "tokens"),
      resumed < scale ? line(resumed, "resumed") : null,
    ];
    parts.push(bar(ms.prefill_started, ms.prefill_done ?? end, 0, "prefill"), ...transfers(request, bar, end));
    const cut = end > scale * 1.001 ? draw("text", { x: "100%", y: 13, class: "cut", "text-anchor": "end" }, "▸") : null;
    return draw("svg", { class: "waterfall", height: 16, width: "100%", role: "img",
      "aria-label": `TTFT ${duration(ms.first_byte) || "not yet"}` }, ...grid, ...parts, cut);
  }
}

function roundScale(ms) {
  const magnitude = 10 ** Math.floor(Math.log10(ms / MAX_TICKS));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * magnitude).find((one) => ms / one <= MAX_TICKS);
  return { step, end: Math.ceil(ms / step) * step };
}

function tick(ms) {
  const round = (number) => String(Number(number.toFixed(2)));
  if (ms < 1000) return `${round(ms)} ms`;
  return ms < 60000 ? `${round(ms / 1000)} s` : `${round(ms / 60000)} min`;
}

function describeTransfers({ prefiller, decoder, reused_from: turn, borrowed_from: holder, moved: what }, label) {
  const ways = [[what.turn, turn || holder, prefiller], [what.prompt, prefiller, decoder]];
  return ways.filter(([move]) => move)
    .map(([move, from, to]) => `${label(from)} → ${label(to)}: ${describeTransfer(move)}, ${bytes(move.bytes)}`).join("\n");
}

const COUNTED = { "token ids": ", by their ids", events: " of the stream (its tokens are not reported: set stream_options.include_usage)" };

function describeTokens(request) {
  const { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached, counted } = request;
  const parts = [prompt === null ? "prompt not reported" : plural(prompt, "prompt token")];
  if (cached !== null) parts.push(`${count(cached)} of them reused`);
  if (completion !== null) parts.push(`output: ${outputOf(request)}${COUNTED[counted] ?? ""}`);
  else if (prompt === null) return "not reported: set stream_options.include_usage";
  return parts.join(", ");
}

// Bars for transfers. The engines' clocks are known to a few milliseconds.
function transfers({ ms, moved: what }, bar, end) {
  const of = (move, latest, lane) => {
    if (!move?.blocks) return null;
    const to = Math.min(move.ended, latest ?? end);
    return bar(Math.max(0, to - move.ms), to, lane, "transfer");
  };
  return [of(what?.turn, ms.prefill_done, 0), of(what?.prompt, ms.first_byte, 1)];
}
