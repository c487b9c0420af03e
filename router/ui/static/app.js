// Connects the parts: an event updates the state, and the parts that it concerns are redrawn once a frame.
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { $, setText } from "./dom.js";
import { follow } from "./feed.js";
import { Fleet } from "./fleet.js";
import { Totals, showChecks, showLinks, showSettings, showTurns } from "./panels.js";
import { Problems } from "./problems.js";
import { Requests } from "./requests.js";
import { State } from "./state.js";

const state = new State();
const fleet = new Fleet(state), requests = new Requests(state), chat = new Chat(state);
const totals = new Totals(state), problems = new Problems(state), connection = new Connection(state);
const stale = new Set();
let isScheduled = false, models = "";

function show(...parts) {
  for (const part of parts) stale.add(part);
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    const due = [...stale];
    stale.clear();
    for (const part of due) part();
  });
}

const parts = {
  fleet: () => fleet.show(),
  requests: () => requests.show(),
  totals: () => totals.show(),
  problems: () => problems.show(),
  turns: () => showTurns(state.snapshot),
  checks: () => showChecks(state.snapshot),
  settings: () => showSettings(state.snapshot),
};
const NEEDS = {
  engines: ["fleet", "problems"], groups: ["fleet"], ways: ["fleet"], workers: ["problems"],
  running: ["requests"], totals: ["totals"], turns: ["turns"],
  ready: ["problems"], refusals: ["problems"], checks: ["checks", "problems"],
};

function onEvent(name, content) {
  state.take(name, content);
  connection.showLive();
  if (name === "snapshot") {
    setText($("version"), content.version);
    showLinks(content);
    show(...Object.values(parts));
  } else if (name === "change") {
    show(...Object.keys(content).flatMap((section) => NEEDS[section] ?? []).map((part) => parts[part]));
  } else if (name === "ended") {
    show(parts.requests, parts.totals);
  } else if (name === "moved") {
    show(parts.requests);
    chat.showTransfers(content);
  }
  if (name === "snapshot" || content.engines) findModels();
  if (content.requests) chat.note(content.requests);
}

// Asks for the models when the engines may serve others than before.
function findModels() {
  const now = JSON.stringify(state.engines.map((one) => [one.name, one.health, one.models]));
  if (now === models) return;
  models = now;
  chat.findModels();
}

// A router that shuts down ends the feed, and answers until its last request has ended.
function onEnd() {
  if (state.isStopping) connection.showStopping();
  else onLost("it has closed the connection");
}

function onLost(text, isRefusal = false) {
  connection.showLost(text, isRefusal);
  show(parts.fleet, parts.requests, parts.totals, parts.problems);
}

function askToken(wasWrong) {
  const dialog = $("ask");
  setText($("link"), "token required");
  if (wasWrong) setText($("ask-text"), "Wrong token. Enter the value of the router's --ui-token.");
  $("ask-token").value = "";
  dialog.showModal();
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  return new Promise((resolve) => {
    $("ask-form").addEventListener("submit", () => resolve($("ask-token").value.trim()), { once: true });
  });
}

$("settings-all").addEventListener("change", parts.settings);
setInterval(() => {
  connection.showTime();
  if (state.isLive) show(parts.totals, parts.problems, parts.fleet);
}, 1000);
setInterval(() => {
  if (state.isLive && Object.keys(state.snapshot.running ?? {}).length) show(parts.requests);
}, 250);
const retry = follow({ onEvent, onEnd, onLost, askToken });
$("lost-retry").addEventListener("click", retry);
