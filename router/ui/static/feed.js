// Reads the router's events with fetch: the token goes into a header, and never into an address.
const TOKEN_KEY = "disagg-router-token";
const SILENCE_TIMEOUT_MS = 7000; // the router sends something every two seconds
const MIN_RETRY_DELAY_MS = 500;
const MAX_RETRY_DELAY_MS = 4000;

// Follows the events for ever. Returns a function that ends the wait before the next try.
export function follow({ onEvent, onEnd, onLost, askToken }) {
  let delay = MIN_RETRY_DELAY_MS, wake = () => {};
  const run = async () => {
    for (;;) {
      let needsToken = false;
      try {
        needsToken = await once(onEvent, onEnd, onLost, () => (delay = MIN_RETRY_DELAY_MS));
      } catch (error) {
        onLost(error?.name === "AbortError" ? "it has sent nothing for several seconds" : "it does not answer");
      }
      if (needsToken) {
        sessionStorage.setItem(TOKEN_KEY, await askToken(sessionStorage.getItem(TOKEN_KEY) !== null));
        continue;
      }
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, delay);
      });
      delay = Math.min(delay * 2, MAX_RETRY_DELAY_MS);
    }
  };
  run();
  addEventListener("online", () => wake());
  return () => wake();
}

// Reads one stream to its end. Returns true if the token is missing or wrong.
async function once(onEvent, onEnd, onLost, onAnswer) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENCE_TIMEOUT_MS);
  try {
    const answer = await fetch("events", {
      headers: token === null ? {} : { authorization: `Bearer ${token}` },
      cache: "no-store",
      signal: abort.signal,
    });
    if (answer.status === 401) return true;
    if (!answer.ok) {
      onLost((await errorIn(answer)) || `the answer has status ${answer.status}`, true);
      return false;
    }
    onAnswer();
    for await (const [name, data] of eventsOf(answer.body)) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_TIMEOUT_MS);
      if (name) onEvent(name, JSON.parse(data));
    }
    onEnd();
    return false;
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
}

export async function errorIn(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "";
  }
}

// Yields pairs of name and data; a comment is a pair without a name.
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value.replaceAll("\r", "");
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      let name = "", data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      yield [name || (data ? "message" : ""), data];
    }
  }
}
