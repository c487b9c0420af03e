// Reads the router's events with fetch: the token goes into a header, and never into an address.
const TOKEN_KEY = "disagg-router-token";
const SILENCE_TIMEOUT_MS = 25000;
const MAX_RETRY_DELAY_MS = 8000;

export function follow({ onEvent, onLink, askToken }) {
  let delay = 500;
  const run = async () => {
    for (;;) {
      let needsToken = false;
      try {
        needsToken = await once(onEvent, onLink, () => (delay = 500));
      } catch {
        onLink("lost", "connection lost, reconnecting");
      }
      if (needsToken) {
        sessionStorage.setItem(TOKEN_KEY, await askToken(sessionStorage.getItem(TOKEN_KEY) !== null));
        continue;
      }
      await new Promise((resolve) => setTimeout(resolve, delay));
      delay = Math.min(delay * 2, MAX_RETRY_DELAY_MS);
    }
  };
  run();
}

// Reads one stream to its end. Returns true if the token is missing or wrong.
async function once(onEvent, onLink, onAnswer) {
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
      onLink("lost", (await errorIn(answer)) || `the router answered with status ${answer.status}`);
      return false;
    }
    onAnswer();
    for await (const [name, data] of eventsOf(answer.body)) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_TIMEOUT_MS);
      if (name) onEvent(name, JSON.parse(data));
    }
    onLink("lost", "the router closed the connection, reconnecting");
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
