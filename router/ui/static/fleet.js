// The engines as cards: prefill engines left, decode engines right, and between them the KV transfers.
import { $, ago, bytes, count, keep, make, moment, percent, plural, setClass, setText } from "./dom.js";
import { KvLinks } from "./kv_links.js";
import { STATE_SIGNS, STATE_WORDS, reasonOf, sideOf, stateOf, stepsOf, workOf } from "./state.js";

const MAX_CARDS = 16; // more engines have a line each
const REMOVED_SHOWN_MS = 6000;
const ROLES = [["prefill", "Prefill"], ["decode", "Decode"]];

export class Fleet {
  constructor(state) {
    this.state = state;
    this.seen = new Map(); // name: [state, engine, time of its removal]
    this.groups = new Map(); // name: its element
    this.cards = new Map(); // name: its element
    this.box = $("fleet-graph");
    this.links = new KvLinks(state, this.box);
    new ResizeObserver(() => this.links.draw(this.cards)).observe(this.box);
    $("transfers").addEventListener("toggle", () => this.links.fillTable());
  }

  show() {
    const engines = this.withRemoved();
    this.announceChanges();
    this.showSummary(engines);
    this.showGroups(engines);
    this.links.draw(this.cards);
    this.links.fillTable();
  }

  showSummary(engines) {
    const states = this.state.engines.map(stateOf);
    const well = states.filter((one) => one === "healthy").length;
    const { engines_unlisted: more = 0 } = this.state.snapshot;
    const none = this.state.hasSnapshot ? "none known yet: see Checks" : "connecting";
    setText($("fleet-summary"), engines.length
      ? `${count(well)} of ${count(states.length + more)} healthy${more ? `, ${count(more)} not shown` : ""}` : none);
  }

  // Adds engines that were removed a moment ago, so that a viewer notices.
  withRemoved() {
    const now = Date.now(), here = this.state.snapshot.engines ?? {};
    const removed = [];
    for (const [name, one] of this.seen) {
      if (here[name]) continue;
      one[2] ??= now;
      if (now - one[2] > REMOVED_SHOWN_MS) this.seen.delete(name);
      else removed.push({ ...one[1], isRemoved: true });
    }
    return [...this.state.engines, ...removed];
  }

  announceChanges() {
    const changes = [];
    for (const engine of this.state.engines) {
      const now = stateOf(engine), before = this.seen.get(engine.name);
      if (before && before[0] !== now) changes.push(`${this.state.label(engine.name)} is ${STATE_WORDS[now]}`);
      this.seen.set(engine.name, [now, engine]);
    }
    if (changes.length) setText($("fleet-changes"), changes.join(", "));
  }

  showGroups(engines) {
    const groups = new Map();
    for (const one of engines) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
    const isFlat = engines.length > MAX_CARDS;
    setClass(this.box, isFlat ? "is-flat" : "");
    const cards = new Map();
    keep(this.box, this.groups, [...groups], (name) => this.newGroup(name), (element, members) => {
      const name = members[0].group, { weight, needed = {} } = this.state.snapshot.groups?.[name] ?? {};
      element.heading.hidden = groups.size < 2;
      setText(element.heading, `Group ${name}${weight === undefined ? "" : `, weight ${weight}`}`);
      if (isFlat) members.sort((a, b) => (stateOf(a) === "healthy") - (stateOf(b) === "healthy"));
      const isFree = members.some((one) => one.role === "both" && sideOf(one) === 0 && one.preferred_role !== "prefill");
      [0, 1].forEach((at) => {
        const side = members.filter((one) => sideOf(one) === at), [role, word] = ROLES[at];
        const { list, known, empty, title } = element.sides[at];
        setText(title, isFree && !side.length ? "" : titleOf(isFree && !at ? ROLES : [[role, word]], needed));
        keep(list, known, side.map((engine) => [engine.name, engine]), (key) => this.newCard(key), (card, engine) => this.fillCard(card, engine));
        empty.hidden = side.length > 0 || members.some((one) => one.role === "both");
        for (const [key, card] of known) {
          card.tabIndex = isFlat ? -1 : 0;
          cards.set(key, card);
        }
      });
    });
    this.cards = cards;
  }

  newGroup() {
    const heading = make("h3"), sides = ROLES.map(([role, word]) => {
      const list = make("ul", { "aria-label": `${word} engines` });
      const empty = make("p", { class: "empty" }, `no ${role} engine`);
      return { list, known: new Map(), empty, title: make("h4", { "aria-hidden": "true" }, word), box: make("div", { class: "side" }, list, empty) };
    });
    const element = make("div", { class: "group" }, heading, make("div", { class: "sides" }, ...sides.map((side) => side.title), ...sides.map((side) => side.box)));
    return Object.assign(element, { heading, sides });
  }

  // A card that is pointed at or has the focus shows its own transfers alone.
  newCard(name) {
    const card = cardParts();
    const choose = (chosen) => () => {
      this.links.chosen = chosen;
      this.links.draw(this.cards);
    };
    for (const event of ["pointerenter", "focus"]) card.addEventListener(event, choose(name));
    for (const event of ["pointerleave", "blur"]) card.addEventListener(event, choose(""));
    return card;
  }

  fillCard(card, engine) {
    const state = engine.isRemoved ? "gone" : stateOf(engine), { gauge } = engine, { now } = this.state;
    setClass(card, `engine is-${state}`);
    const { parts } = card, reason = engine.isRemoved ? "" : reasonOf(engine);
    setText(parts.label, this.state.label(engine.name));
    setText(parts.sign, STATE_SIGNS[state]);
    setText(parts.word, STATE_WORDS[state]);
    setText(parts.address, engine.name);
    setText(parts.work, workOf(engine));
    const steps = stepsOf(engine);
    setText(parts.steps, engine.role === "both" ? steps : "");
    card.title = [engine.name, engine.models?.join(", "), reason, engine.role_reason, steps].filter(Boolean).join("\n");
    const since = state === "unhealthy" && engine.since ? `since ${moment(engine.since, now)} (${ago(now - engine.since)})` : "";
    setText(parts.since, since);
    setText(parts.reason, reason);
    const waiting = gauge.waiting ? ` · ${count(gauge.waiting)} waiting` : "";
    setText(parts.load, `${count(engine.in_flight)} in flight${waiting}`);
    setText(parts.leases, engine.holding ? plural(engine.holding, "KV lease") : "");
    setText(parts.moved, gauge.bytes_per_second ? `${bytes(gauge.bytes_per_second)}/s` : "");
    const isKnown = gauge.kv_usage !== null;
    setText(parts.usage, isKnown ? `KV cache ${percent(gauge.kv_usage)}` : "KV cache: not reported");
    parts.meter.hidden = !isKnown;
    if (isKnown) parts.meter.value = gauge.kv_usage;
    parts.facts.hidden = state === "unhealthy" || state === "gone";
  }
}

// A number of engines. Little load is not shown as none.
const need = (engines) => (engines >= 0.001 && engines < 0.05 ? "<0.1" : engines.toFixed(1));

// A side's title, with the engines that its requests need: "Prefill: 1.3 engines needed".
function titleOf(roles, needed) {
  const needs = roles.map(([role]) => needed[role]).filter((one) => one !== undefined);
  const known = needs.length ? `: ${needs.map(need).join(" + ")} engines needed` : "";
  return roles.map(([, word], at) => (at ? word.toLowerCase() : word)).join(" and ") + known;
}

function cardParts() {
  const names = ["label", "sign", "word", "address", "work", "steps", "load", "leases", "usage", "moved", "since", "reason"];
  const parts = Object.fromEntries(names.map((name) => [name, make("span", { class: name })]));
  parts.sign.setAttribute("aria-hidden", "true");
  parts.meter = make("meter", { min: 0, max: 1, high: 0.95, optimum: 0, "aria-hidden": "true" });
  parts.facts = make("div", { class: "facts" }, make("p", {}, parts.work), make("p", {}, parts.steps), make("p", {}, parts.load, " ", parts.leases), make("p", {}, parts.usage, " ", parts.moved), parts.meter);
  const element = make("li", {},
    make("p", { class: "name" }, parts.label, " ", make("span", { class: "state" }, parts.sign, " ", parts.word)),
    make("p", {}, parts.address), parts.facts, make("p", { class: "why" }, parts.since, " ", parts.reason));
  return Object.assign(element, { parts });
}
