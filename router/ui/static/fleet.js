// The graph of engines: prefillers left, decoders right, KV between them as arcs.
import { $, bytes, draw, make, percent, plural, setText } from "./dom.js";
import { stateOf } from "./state.js";

const TALL = 86, FLAT = 30, GAP = 10, TITLE = 22, EDGE = 2;
const MAX_TALL = 16;
const MAX_HINTS = 24;
const WORDS = {
  doubtful: "doubtful", unknown: "not probed", healthy: "healthy", unhealthy: "unhealthy", degraded: "no KV",
  cooling: "cooling", cold: "cold", draining: "draining", gone: "gone",
};
const GONE_SHOWN_MS = 6000;

export class Fleet {
  constructor(state) {
    this.state = state;
    this.seen = new Map(); // name: [state, engine, time of its removal]
    this.box = $("fleet-graph");
    new ResizeObserver(() => this.show()).observe(this.box);
  }

  show() {
    const engines = this.withGone();
    this.announceChanges();
    this.drawAll(engines);
    this.fillTable();
    const states = this.state.engines.map(stateOf);
    const well = states.filter((one) => one === "healthy").length;
    const { engines_unlisted: more = 0, workers } = this.state.snapshot;
    const late = workers && workers.answered < workers.known ? `, ${workers.answered} of ${workers.known} workers answer` : "";
    setText($("fleet-summary"), engines.length
      ? `${well} of ${plural(states.length + more, "engine")} healthy${more ? `, ${more} not shown` : ""}${late}` : "no engines yet");
  }

  // Adds engines that were removed a moment ago, so that a viewer notices.
  withGone() {
    const now = Date.now(), here = this.state.snapshot.engines ?? {};
    const gone = [];
    for (const [name, one] of this.seen) {
      if (here[name]) continue;
      one[2] ??= now;
      if (now - one[2] > GONE_SHOWN_MS) this.seen.delete(name);
      else gone.push({ ...one[1], isGone: true });
    }
    if (gone.length) setTimeout(() => this.show(), 1000);
    return [...this.state.engines, ...gone];
  }

  announceChanges() {
    const changes = [];
    for (const engine of this.state.engines) {
      const now = stateOf(engine), before = this.seen.get(engine.name);
      if (before && before[0] !== now) changes.push(`${this.state.label(engine.name)} is ${WORDS[now]}`);
      this.seen.set(engine.name, [now, engine]);
    }
    if (changes.length) setText($("fleet-changes"), changes.join(", "));
  }

  fillTable() {
    const rows = this.state.engines.map((engine) => make("tr", {},
      make("th", { scope: "row" }, `${this.state.label(engine.name)}, ${engine.name}`),
      ...[engine.role, engine.group, WORDS[stateOf(engine)], String(engine.in_flight),
        engine.gauge.kv_usage === null ? "unknown" : percent(engine.gauge.kv_usage),
        String(engine.gauge.leases ?? engine.holding)].map((text) => make("td", {}, text))));
    $("fleet-table").tBodies[0].replaceChildren(...rows);
  }

  drawAll(engines) {
    const width = Math.max(260, this.box.clientWidth);
    const isFlat = engines.length > MAX_TALL;
    const height = isFlat ? FLAT : TALL;
    const card = Math.min(230, Math.floor(width * (width < 480 ? 0.4 : 0.3)));
    const places = new Map(), cards = [], titles = [];
    let top = EDGE;
    const groups = Map.groupBy ? Map.groupBy(engines, (one) => one.group) : groupBy(engines);
    for (const [name, members] of groups) {
      if (groups.size > 1) {
        titles.push(draw("text", { x: EDGE, y: top + 13, class: "group" }, `Group ${name}`));
        top += TITLE;
      }
      const left = members.filter((one) => one.role !== "decode");
      const right = members.filter((one) => one.role === "decode");
      const rows = Math.max(left.length, right.length), step = height + GAP;
      for (const [side, x] of [[left, EDGE], [right, width - card - EDGE]]) {
        const shift = ((rows - side.length) * step) / 2;
        side.forEach((engine, row) => {
          const y = top + shift + row * step;
          places.set(engine.name, { x, y, width: card, height, left: side === left });
          cards.push(this.card(engine, x, y, card, isFlat));
        });
      }
      top += rows * step + GAP;
    }
    const svg = draw("svg", { width, height: Math.max(top - GAP, 20), viewBox: `0 0 ${width} ${Math.max(top - GAP, 20)}` },
      ...titles, ...this.hints(engines, places), ...this.arcs(places), ...cards);
    this.box.replaceChildren(svg);
  }

  card(engine, x, y, width, isFlat) {
    const state = engine.isGone ? "gone" : stateOf(engine), { gauge } = engine;
    const height = isFlat ? FLAT : TALL, right = width - 10;
    const parts = [
      draw("title", {}, `${engine.name}: ${WORDS[state]}${engine.reason || engine.degraded ? `, ${engine.reason || engine.degraded}` : ""}`),
      draw("rect", { width, height, rx: 6, class: "card" }),
      draw("rect", { width: 4, height: height - 12, x: 0, y: 6, rx: 2, class: "stripe" }),
      draw("text", { x: 12, y: 19, class: "label" }, this.state.label(engine.name)),
      draw("text", { x: right, y: 19, class: "word", "text-anchor": "end" }, WORDS[state]),
    ];
    if (!isFlat) parts.push(...body(engine, gauge, width, right));
    else if (width > 190) parts.push(draw("text", { x: 46, y: 19, class: "fact" },
      `${engine.in_flight}${gauge.kv_usage === null ? "" : ` · KV ${percent(gauge.kv_usage)}`}`));
    return draw("g", { transform: `translate(${x} ${y})`, class: `engine is-${state}` }, ...parts);
  }

  // Lines between engines that can pair.
  hints(engines, places) {
    const fit = engines.filter((one) => !one.isGone && places.has(one.name));
    const pairs = fit.filter((p) => p.role !== "decode")
      .flatMap((p) => fit.filter((d) => d.role === "decode" && d.group === p.group).map((d) => [p, d]));
    if (pairs.length > MAX_HINTS) return [];
    return pairs.map(([p, d]) => draw("path", { d: curve(places.get(p.name), places.get(d.name), -6).path, class: "hint" }));
  }

  arcs(places) {
    const made = [];
    for (const way of Object.values(this.state.snapshot.ways ?? {})) {
      const from = places.get(way.from), to = places.get(way.to);
      if (!from || !to || from === to) continue;
      const { path, x, y } = curve(from, to, way.kind === "turn" ? 14 : -6);
      const speed = way.bytes_per_second;
      const pace = speed ? Math.log10(1 + speed / 1e4) : Math.sqrt(way.rate);
      const thick = Math.min(7, 1.5 + pace + way.moving * 0.5);
      made.push(draw("path", { d: path, "stroke-width": thick.toFixed(1),
        class: `arc ${way.kind}${way.moving ? " moving" : ""}` }));
      const times = way.rate ? `${way.rate < 10 ? way.rate.toFixed(1) : Math.round(way.rate)}/s` : "";
      const rate = speed ? `${bytes(speed)}/s` : times;
      const text = [way.moving ? `${way.moving} in progress` : "", rate].filter(Boolean).join(", ");
      made.push(draw("text", { x, y: y + (way.kind === "turn" ? 14 : -8), class: `flow ${way.kind}`, "text-anchor": "middle" }, text));
    }
    return made;
  }
}

function body(engine, gauge, width, right) {
  const known = gauge.kv_usage !== null, full = right - 12;
  const held = gauge.leases ?? engine.holding;
  const fits = Math.floor((width - 22) / 6.3);
  return [
    draw("text", { x: 12, y: 35, class: "address" }, shortened(engine.name, fits)),
    draw("text", { x: 12, y: 53, class: "fact" }, `${engine.in_flight} in flight${held ? ` · ${held} held` : ""}`),
    draw("text", { x: 12, y: 69, class: "fact" }, `KV ${known ? percent(gauge.kv_usage) : "not reported"}`),
    gauge.bytes_per_second && width > 150
      ? draw("text", { x: right, y: 69, class: "fact", "text-anchor": "end" }, `${bytes(gauge.bytes_per_second)}/s`) : null,
    draw("rect", { x: 12, y: 75, width: full, height: 4, rx: 2, class: "trough" }),
    known ? draw("rect", { x: 12, y: 75, width: Math.max(2, full * gauge.kv_usage), height: 4, rx: 2, class: "level" }) : null,
  ];
}

function curve(from, to, shift) {
  const x1 = from.left ? from.x + from.width : from.x, x2 = to.left ? to.x + to.width : to.x;
  const y1 = from.y + from.height / 2 + shift, y2 = to.y + to.height / 2 + shift;
  const bend = Math.max(20, Math.abs(x2 - x1) * 0.45) * Math.sign(x2 - x1 || 1);
  const path = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  return { path, x: (x1 + x2) / 2, y: (y1 + y2) / 2 };
}

function shortened(name, most) {
  if (name.length <= most) return name;
  const tail = Math.floor(most / 2);
  return `${name.slice(0, most - tail - 1)}…${name.slice(-tail)}`;
}

function groupBy(engines) {
  const found = new Map();
  for (const one of engines) found.set(one.group, [...(found.get(one.group) ?? []), one]);
  return found;
}
