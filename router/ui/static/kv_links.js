// The KV transfers between engines: curves between the cards, with rates where there is room, and a table.
import { $, bytes, draw, make, perSecond, plural, setClass, setText } from "./dom.js";
import { sideOf } from "./state.js";

const MAX_HINTS = 64;
const LABEL_HEIGHT = 14, MARGIN = 3;
// Where along a curve its label may be, the best place first.
const PLACES = [0.5, 0.36, 0.64, 0.24, 0.76, 0.14, 0.86];
// The links with the most traffic have labels; the table has the others.
const MAX_LABELS = 12;
const WHAT = { prompt: "prompt", turn: "last turn", loan: "cached prefix" };

export class KvLinks {
  constructor(state, box) {
    this.state = state;
    this.box = box;
    this.svg = draw("svg", { class: "links", "aria-hidden": "true" });
    this.hints = draw("g");
    this.curves = draw("g");
    this.labels = draw("g");
    this.svg.append(this.hints, this.curves, this.labels);
    box.after(this.svg);
    this.shown = new Map(); // key: its path
    this.chosen = ""; // the engine whose links alone are shown
    this.pen = document.createElement("canvas").getContext("2d");
    this.pen.font = "600 11px system-ui, sans-serif";
  }

  get traffic() {
    const ways = Object.entries(this.state.snapshot.ways ?? {});
    return ways.sort(([, a], [, b]) => (b.bytes_per_second ?? 0) - (a.bytes_per_second ?? 0) || b.rate - a.rate);
  }

  draw(cards) {
    const frame = this.box.getBoundingClientRect();
    const places = new Map([...cards].map(([name, card]) => {
      const { left, top, width, height } = card.getBoundingClientRect();
      return [name, { x: left - frame.left, y: top - frame.top, width, height, isLeft: left - frame.left < frame.width / 3 }];
    }));
    this.svg.setAttribute("width", frame.width);
    this.svg.setAttribute("height", frame.height);
    this.drawHints(places);
    const taken = [], labels = [], used = new Set();
    for (const [key, way] of this.traffic) {
      const from = places.get(way.from), to = places.get(way.to);
      if (!from || !to || from === to || (this.chosen && this.chosen !== way.from && this.chosen !== way.to)) continue;
      used.add(key);
      const curve = curveOf(from, to, way.kind === "turn" ? 8 : -8);
      this.drawCurve(key, way, curve);
      const label = labels.length < MAX_LABELS || way.slow ? this.labelOf(way, curve, taken) : null;
      if (label) labels.push(label);
    }
    for (const [key, path] of this.shown) {
      if (used.has(key)) continue;
      path.remove();
      this.shown.delete(key);
    }
    this.labels.replaceChildren(...labels);
  }

  drawCurve(key, way, curve) {
    let path = this.shown.get(key);
    if (!path) {
      path = draw("path");
      this.shown.set(key, path);
      this.curves.append(path);
    }
    const speed = way.bytes_per_second;
    const pace = speed ? Math.log10(1 + speed / 1e4) : Math.sqrt(way.rate);
    const thick = Math.min(6, 1.2 + pace * 0.8).toFixed(1);
    if (path.getAttribute("d") !== curve.path) path.setAttribute("d", curve.path);
    path.setAttribute("stroke-width", thick);
    setClass(path, `arc ${way.kind}${way.slow ? " slow" : ""}`);
    if (path.textContent !== (way.slow ?? "")) path.replaceChildren(draw("title", {}, way.slow));
  }

  // A label at the first place of its curve where it covers no other one; null if there is none.
  labelOf(way, curve, taken) {
    const flow = way.bytes_per_second ? `${bytes(way.bytes_per_second)}/s` : way.rate ? perSecond(way.rate, "req") : "";
    const text = [flow, way.slow && "slow"].filter(Boolean).join(", ");
    if (!text) return null;
    const width = this.pen.measureText(text).width + 2 * MARGIN;
    for (const place of PLACES) {
      const { x, y } = curve.at(place);
      const box = { left: x - width / 2, right: x + width / 2, top: y - LABEL_HEIGHT / 2, bottom: y + LABEL_HEIGHT / 2 };
      if (box.left < curve.left + 4 || box.right > curve.right - 4) continue;
      if (taken.some((one) => box.left < one.right && box.right > one.left && box.top < one.bottom && box.bottom > one.top)) continue;
      taken.push(box);
      return draw("text", { x: x.toFixed(1), y: (y + 4).toFixed(1), class: `flow ${way.slow ? "slow" : way.kind}`, "text-anchor": "middle" }, text);
    }
    return null;
  }

  // Thin lines between engines that can pair.
  drawHints(places) {
    const fit = this.state.engines.filter((one) => places.has(one.name) && one.health === "healthy" && !one.degraded);
    const pairs = fit.filter((p) => sideOf(p) === 0)
      .flatMap((p) => fit.filter((d) => sideOf(d) === 1 && d.group === p.group).map((d) => [p, d]));
    const paths = pairs.length > MAX_HINTS ? [] : pairs.map(([p, d]) => curveOf(places.get(p.name), places.get(d.name), -8).path);
    const mark = paths.join();
    if (mark === this.hinted) return;
    this.hinted = mark;
    this.hints.replaceChildren(...paths.map((path) => draw("path", { d: path, class: "hint" })));
  }

  fillTable() {
    const ways = this.traffic.map(([, way]) => way);
    const total = ways.reduce((sum, way) => sum + (way.bytes_per_second ?? 0), 0);
    $("transfers").hidden = !ways.length;
    setText($("transfers-summary"), `KV transfers: ${plural(ways.length, "pair")} of engines${total ? `, ${bytes(total)}/s` : ""}`);
    if (!$("transfers").open) return;
    const label = (name) => this.state.label(name);
    $("transfers-table").tBodies[0].replaceChildren(...ways.map((way) => make("tr", {},
      make("th", { scope: "row" }, label(way.from)), make("td", {}, label(way.to)), make("td", {}, make("i", { class: `key ${way.kind}`, "aria-hidden": "true" }), WHAT[way.kind], way.slow && `: ${way.slow}`),
      make("td", { class: "number" }, perSecond(way.rate, "req")),
      make("td", { class: "number" }, way.bytes_per_second === null ? "not reported" : `${bytes(way.bytes_per_second)}/s`))));
  }
}

function curveOf(from, to, shift) {
  const x1 = from.isLeft ? from.x + from.width : from.x, x2 = to.isLeft ? to.x + to.width : to.x;
  const y1 = from.y + from.height / 2 + shift, y2 = to.y + to.height / 2 + shift;
  const bend = Math.max(14, Math.abs(x2 - x1) * 0.45) * (from.isLeft ? 1 : -1);
  const end = to.isLeft ? x2 + Math.abs(bend) : x2 - Math.abs(bend);
  const at = (t) => {
    const u = 1 - t, mix = (a, b, c, d) => u * u * u * a + 3 * u * u * t * b + 3 * u * t * t * c + t * t * t * d;
    return { x: mix(x1, x1 + bend, end, x2), y: mix(y1, y1, y2, y2) };
  };
  return { path: `M${x1} ${y1}C${x1 + bend} ${y1} ${end} ${y2} ${x2} ${y2}`, at, left: Math.min(x1, x2), right: Math.max(x1, x2) };
}
