// Connects the parts: an event updates the state, and the parts that it concerns are redrawn once a frame.
import { Chat } from "./chat.js";
import { $, setText } from "./dom.js";
import { follow } from "./feed.js";
import { Fleet } from "./fleet.js";
import { Totals, showSettings, showTurns } from "./panels.js";
import { Requests } from "./requests.js";
import { State } from "./state.js";

const state = new State();
const fleet = new Fleet(state), requests = new Requests(state), chat = new Chat(state), totals = new Totals();
const stale = new Set();
let isScheduled = false;

function show(...parts) {
  for (const part of parts) stale.add(part);
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    for (const part of stale) part();
    stale.clear();
  });
}

const parts = {
  fleet: () => fleet.show(),
  requests: () => requests.show(),
  totals: () => totals.show(state.snapshot),
  turns: () => showTurns(state.snapshot),
  settings: () => showSettings(state.snapshot),
};
const NEEDS = {
  engines: ["fleet"], groups: ["fleet"], ways: ["fleet"], workers: ["fleet"],
  running: ["requests"], totals: ["totals"], turns: ["turns"],
};

function onEvent(name, content) {
  state.take(name, content);
  link("live", "live");
  if (name === "snapshot") {
    setText($("version"), content.version);
    chat.findModels();
    show(...Object.values(parts));
  } else if (name === "change") {
    show(...Object.keys(content).flatMap((section) => NEEDS[section] ?? []).map((part) => parts[part]));
    if (content.engines) chat.findModels();
  } else if (name === "ended") {
    show(parts.requests);
  } else if (name === "moved") {
    show(parts.requests);
    chat.showTransfers(content);
  }
  if (content.requests) chat.note(content.requests);
}

function link(kind, text) {
  $("link").className = kind;
  setText($("link"), text);
}

function askToken(wasWrong) {
  const dialog = $("ask");
  if (wasWrong) setText($("ask-text"), "Wrong token. Enter the value of the router's --ui-token.");
  $("ask-token").value = "";
  dialog.showModal();
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  return new Promise((resolve) => {
    $("ask-form").addEventListener("submit", () => resolve($("ask-token").value.trim()), { once: true });
  });
}

$("settings-all").addEventListener("change", parts.settings);
setInterval(() => show(parts.totals), 1000);
setInterval(() => {
  if (Object.keys(state.snapshot.running ?? {}).length) show(parts.requests);
}, 250);
follow({ onEvent, onLink: link, askToken });
