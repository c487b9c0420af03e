// Streams that each client aborts after their first text: node abort.mjs URL MODEL. Prints how many.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Say something." }];
const LASTING = 7000; // seconds of an answer, so that its client leaves before its end
const long = { model, messages, max_tokens: LASTING, ignore_eos: true };

async function chat() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
  const stream = await client.chat.completions.create({ ...long, stream: true });
  for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
}

async function responses() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
  const asked = { model, input: "x", max_output_tokens: LASTING, ignore_eos: true, stream: true };
  for await (const event of await client.responses.create(asked)) if (event.type === "response.output_text.delta") break;
}

async function anthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: "k", maxRetries: 0 });
  const stream = client.messages.stream(long);
  stream.on("text", () => stream.abort());
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
}

async function aiSdk() {
  const router = createOpenAICompatible({ name: "router", baseURL: `${url}/v1`, apiKey: "k" });
  const leaving = new AbortController();
  const providerOptions = { router: { ignore_eos: true } };
  const asked = { model: router(model), messages, maxOutputTokens: LASTING, providerOptions, maxRetries: 0 };
  for await (const text of streamText({ ...asked, abortSignal: leaving.signal }).textStream) if (text) leaving.abort();
}

const parts = [chat, responses, anthropic, aiSdk];
for (const part of parts) await part();
console.log(parts.length);
