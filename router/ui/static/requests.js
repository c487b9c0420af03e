// The requests as waterfalls, newest first; each one expands to its details.
import { $, bytes, clockTime, draw, duration, make, plural, setText } from "./dom.js";
import { describeRequest, describeTransfer } from "./state.js";

const MAX_ROWS = 60;
const GOOD = new Set(["ok", "running"]);

export class Requests {
  constructor(state) {
    this.state = state;
    this.rows = new Map(); // key: { item, button, request }
    this.open = new Set();
    this.isPaused = false;
    this.list = $("requests-list");
    $("requests-pause").addEventListener("click", () => this.pause(!this.isPaused));
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    $("requests-pause").setAttribute("aria-pressed", String(isPaused));
    setText($("requests-pause"), isPaused ? "Resume" : "Pause");
    if (!isPaused) this.show();
  }

  show() {
    if (this.isPaused) return;
    const running = Object.values(this.state.snapshot.running ?? {}).sort((a, b) => b.at - a.at);
    const ended = new Set(this.state.ended.map((one) => one.key));
    const all = [...running.filter((one) => !ended.has(one.key)), ...this.state.ended].slice(0, MAX_ROWS);
    $("requests-empty").hidden = all.length > 0;
    const { missed } = this.state;
    setText($("requests-missed"), missed ? `${missed} more requests ended than the dashboard can show` : "");
    const scale = Math.max(...all.map((one) => elapsed(one)), 1);
    const keys = new Set(all.map((one) => one.key));
    for (const [key, row] of this.rows) {
      if (keys.has(key) || row.item.contains(document.activeElement)) continue;
      row.item.remove();
      this.rows.delete(key);
    }
    let before = this.list.firstElementChild;
    for (const request of all) {
      const { item } = this.row(request, scale);
      if (item === before) before = before.nextElementSibling;
      else this.list.insertBefore(item, before);
    }
  }

  row(request, scale) {
    let row = this.rows.get(request.key);
    if (!row) {
      row = this.newRow(request.key);
      this.rows.set(request.key, row);
    }
    const mark = `${request.stage} ${request.outcome} ${scale} ${JSON.stringify(request.moved)}`;
    if (row.mark !== mark || request.outcome === "running") {
      row.mark = mark;
      this.fill(row, request, scale);
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

  fill(row, request, scale) {
    row.request = request;
    const label = (name) => this.state.label(name);
    const way = [request.prefiller, request.decoder].filter(Boolean).map(label).join(" → ") || "no engine";
    const word = request.outcome === "running" ? request.stage : request.outcome.replace("_", " ");
    const { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached } = request;
    const tokens = prompt === null ? "" : `${prompt} in${completion === null ? "" : `, ${completion} out`}`;
    row.item.className = `outcome-${request.outcome}`;
    row.button.replaceChildren(
      make("span", { class: "time" }, clockTime(request.at)),
      make("span", { class: "word" }, word),
      make("span", { class: "way" }, way),
      waterfall(request, scale),
      make("span", { class: "total" }, duration(request.ms.ended) || "…"),
      make("span", { class: "tokens" }, tokens, cached ? make("span", { class: "cached" }, ` ${cached} reused`) : null),
    );
    if (!row.details.hidden) this.detail(row);
  }

  detail(row) {
    const { request } = row, label = (name) => this.state.label(name);
    const { ms } = request, engine = (name) => (name ? `${label(name)}, ${name}` : "");
    const queued = ms.prefill_started ?? ms.decode_started;
    const facts = [
      ["Summary", describeRequest(request, label)],
      ["Request", request.id],
      ["Endpoint", `${request.endpoint}, status ${request.status || "none yet"}`],
      ["Flow", request.flow],
      ["Prefiller", engine(request.prefiller)],
      ["Decoder", engine(request.decoder)],
      ["Tokens", describeTokens(request)],
      ["Last turn", request.conversation && request.conversation.replace("_", " ")
        + (request.reused_from ? `, pulled from ${engine(request.reused_from)}` : "")],
      ["KV moved", request.moved ? describeTransfers(request, label) : ""],
      ["Queue", duration(queued)],
      ["Prefill", ms.prefill_done !== null ? duration(ms.prefill_done - (ms.prefill_started ?? 0)) : ""],
      ["Decode TTFT", ms.first_byte !== null && ms.decode_started !== null
        ? `${duration(ms.first_byte - ms.decode_started)}` : ""],
      ["Streaming", ms.ended !== null && ms.first_byte !== null ? duration(ms.ended - ms.first_byte) : ""],
      ["Failed attempts", request.failures.join("\n")],
      ["Ended at", !GOOD.has(request.outcome) && request.stage !== "done" ? request.stage : ""],
      ["Error", request.error],
    ];
    row.details.replaceChildren(make("dl", {}, ...facts.filter(([, text]) => text)
      .flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
  }
}

function describeTransfers({ prefiller, decoder, reused_from: turn, moved: what }, label) {
  const ways = [[what.turn, turn, prefiller], [what.prompt, prefiller, decoder]];
  return ways.filter(([move]) => move)
    .map(([move, from, to]) => `${label(from)} → ${label(to)}: ${describeTransfer(move)}, ${bytes(move.bytes)}`).join("\n");
}

function describeTokens({ prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached }) {
  if (prompt === null) return "not reported: set stream_options.include_usage";
  const parts = [`${plural(prompt, "token")} in`];
  if (completion !== null) parts.push(`${completion} out`);
  if (cached !== null) parts.push(`${cached} of the prompt reused`);
  return parts.join(", ");
}

function elapsed({ ms, at }) {
  return ms.ended ?? Math.max(0, Date.now() - at * 1000);
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

// The upper lane is the prefiller's, the lower one the decoder's.
function waterfall(request, scale) {
  const { ms } = request, end = elapsed(request);
  const bar = (from, to, lane, name) => {
    if (from === null || to === null || to < from) return null;
    const x = (from / scale) * 100, width = Math.max(0.4, ((to - from) / scale) * 100);
    return draw("rect", { x: `${x.toFixed(2)}%`, width: `${width.toFixed(2)}%`, y: lane * 8 + 1, height: 6, class: name });
  };
  const first = ms.prefill_started ?? ms.decode_started ?? end;
  const parts = [
    bar(0, first, request.prefiller ? 0 : 1, "queue"),
    bar(ms.prefill_started, ms.prefill_done ?? end, 0, "prefill"),
    bar(ms.decode_started, ms.first_byte ?? end, 1, "wait"),
    bar(ms.first_byte, end, 1, "tokens"),
    ...transfers(request, bar, end),
  ];
  return draw("svg", { class: "waterfall", height: 16, width: "100%", role: "img",
    "aria-label": `first token after ${duration(ms.first_byte) || "nothing yet"}` }, ...parts);
}
