// A chat with this router's models, with a description of the request under each answer.
import { $, make, setText } from "./dom.js";
import { errorIn, eventsOf } from "./feed.js";
import { describeRequest } from "./state.js";

const KEY_NAME = "disagg-router-key";
const RECORD_TIMEOUT_MS = 6000;
const MAX_FACTS = 16;

export class Chat {
  constructor(state) {
    this.state = state;
    this.waiting = new Map(); // request id: the line to describe the request in
    this.facts = new Map(); // key: a recent request and its line
    this.messages = [];
    this.running = null;
    this.log = $("chat-log");
    $("chat-key").value = sessionStorage.getItem(KEY_NAME) ?? "";
    $("chat-key").addEventListener("change", () => {
      sessionStorage.setItem(KEY_NAME, $("chat-key").value);
      this.findModels();
    });
    $("chat-options").addEventListener("submit", (event) => event.preventDefault());
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("chat-stop").addEventListener("click", () => this.running?.abort());
    $("chat-new").addEventListener("click", () => this.begin());
    $("chat-model").addEventListener("focus", () => this.findModels());
    this.conversation = newId();
    this.findModels();
  }

  begin() {
    this.running?.abort();
    this.messages = [];
    this.conversation = newId();
    this.log.replaceChildren(make("p", { class: "empty" }, "A new chat."));
    $("chat-text").focus();
  }

  get headers() {
    const key = $("chat-key").value.trim();
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  async findModels() {
    const chosen = $("chat-model").value;
    try {
      const answer = await fetch("../v1/models", { headers: this.headers });
      if (!answer.ok) return;
      const names = (await answer.json()).data.map((model) => model.id);
      const known = [...$("chat-model").options].map((one) => one.value);
      if (names.join("\n") === known.join("\n")) return;
      $("chat-model").replaceChildren(...names.map((name) => make("option", { value: name, selected: name === chosen }, name)));
    } catch {
      // The feed reports that the router is unreachable.
    }
  }

  async send() {
    const text = $("chat-text").value.trim();
    if (!text || this.running) return;
    $("chat-text").value = "";
    this.log.querySelector(".empty")?.remove();
    this.log.append(make("div", { class: "said user" }, make("h3", { class: "unseen" }, "You"), text));
    const body = make("div", { class: "text" });
    const fact = make("p", { class: "fact" });
    const said = make("div", { class: "said assistant", "aria-busy": "true" }, make("h3", { class: "unseen" }, "Answer"), body, fact);
    this.log.append(said);
    this.log.scrollTop = this.log.scrollHeight;
    const messages = this.messages, conversation = this.conversation;
    messages.push({ role: "user", content: text });
    this.running = new AbortController();
    this.busy(true);
    try {
      const answer = await this.ask(messages, conversation, this.running.signal);
      this.expect(answer.headers.get("x-request-id"), fact);
      const content = await this.read(answer, body);
      messages.push({ role: "assistant", content });
    } catch (error) {
      messages.pop(); // a failed turn is not part of the conversation
      said.classList.add("failed");
      const why = error.name === "AbortError" ? "stopped" : error.message;
      body.append(make("p", { class: "error" }, why));
    } finally {
      this.running = null;
      this.busy(false);
      said.setAttribute("aria-busy", "false");
    }
  }

  ask(messages, conversation, signal) {
    return fetch("../v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...this.headers },
      body: JSON.stringify({
        ...($("chat-model").value ? { model: $("chat-model").value } : {}),
        messages,
        stream: true,
        stream_options: { include_usage: true },
        conversation_id: conversation,
        ...numbers({ max_tokens: "chat-max-tokens", temperature: "chat-temperature" }),
      }),
      signal,
    });
  }

  async read(answer, body) {
    if (!answer.ok) throw new Error((await errorIn(answer)) || `the router answered with status ${answer.status}`);
    let content = "";
    for await (const [, data] of eventsOf(answer.body)) {
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? "the stream failed");
      const { content: more, reasoning, reasoning_content: thought = reasoning } = event.choices?.[0]?.delta ?? {};
      if (!more && !thought) continue;
      const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      if (more) content += more;
      body.append(more ?? thought);
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    }
    return content;
  }

  expect(id, line) {
    if (!id) return;
    setText(line, "…");
    this.waiting.set(id, line);
    setTimeout(() => this.giveUp(id, line), RECORD_TIMEOUT_MS);
  }

  giveUp(id, line) {
    if (!this.waiting.has(id)) return;
    if (this.running) {
      setTimeout(() => this.giveUp(id, line), RECORD_TIMEOUT_MS);
      return;
    }
    this.waiting.delete(id);
    setText(line, `no record of request ${id} arrived`);
  }

  // Takes requests that have ended.
  note(requests) {
    for (const request of requests) {
      const line = this.waiting.get(request.id);
      if (!line) continue;
      this.waiting.delete(request.id);
      this.facts.set(request.key, [request, line]);
      if (this.facts.size > MAX_FACTS) this.facts.delete(this.facts.keys().next().value);
      this.describe(request, line);
    }
  }

  // Engines report transfers a little later.
  showTransfers(moved) {
    for (const [key, what] of Object.entries(moved)) {
      const [request, line] = this.facts.get(key) ?? [];
      if (request) this.describe(Object.assign(request, { moved: what }), line);
    }
  }

  describe(request, line) {
    setText(line, describeRequest(request, (name) => this.state.label(name)));
    this.log.scrollTop = this.log.scrollHeight;
  }

  // One button replaces the other, so the focus of the pressed one moves to the text.
  busy(is) {
    const hadFocus = [$("chat-send"), $("chat-stop")].includes(document.activeElement);
    $("chat-send").hidden = is;
    $("chat-stop").hidden = !is;
    if (hadFocus) $("chat-text").focus({ preventScroll: true });
  }
}

// Returns the fields that hold a number.
function numbers(fields) {
  const found = Object.entries(fields).map(([name, id]) => [name, $(id).valueAsNumber]);
  return Object.fromEntries(found.filter(([, value]) => Number.isFinite(value)));
}

// crypto.randomUUID exists only in secure contexts.
function newId() {
  return `page-${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
