// The router's events, read with fetch, so that a token can go along and never into an address.
const TOKEN = "disagg-router-token";
const SILENCE = 25000;
const SLOWEST = 8000;

export function follow({ onEvent, onLink, askToken }) {
  let wait = 500;
  const again = async () => {
    for (;;) {
      let refused = false;
      try {
        refused = await once(onEvent, onLink, () => (wait = 500));
      } catch {
        onLink("lost", "connection lost, trying again");
      }
      if (refused) {
        sessionStorage.setItem(TOKEN, await askToken(sessionStorage.getItem(TOKEN) !== null));
        continue;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, SLOWEST);
    }
  };
  again();
}

// Until the stream ends; true where the token is wanted, or wrong.
async function once(onEvent, onLink, onAnswer) {
  const token = sessionStorage.getItem(TOKEN);
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENCE);
  try {
    const answer = await fetch("events", {
      headers: token === null ? {} : { authorization: `Bearer ${token}` },
      cache: "no-store",
      signal: abort.signal,
    });
    if (answer.status === 401) return true;
    if (!answer.ok) {
      onLink("lost", (await errorIn(answer)) || `the router answers ${answer.status}`);
      return false;
    }
    onAnswer();
    for await (const [name, data] of eventsOf(answer.body)) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE);
      if (name) onEvent(name, JSON.parse(data));
    }
    onLink("lost", "the router has ended the connection, trying again");
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

// Pairs of name and data; a comment is a pair without a name.
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
