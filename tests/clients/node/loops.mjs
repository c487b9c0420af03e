// Two tools called at once, their results, a JSON schema, a picture and reasoning, with each client:
// node loops.mjs URL
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const [url] = process.argv.slice(2);
const v1 = `${url}/v1`;
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const nothing = { type: "object", properties: {} };
const verdict = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
const schemas = { weather: city, clock: nothing };
const results = { weather: "sunny", clock: "noon" };
const expected = [["weather", { city: "Oslo" }], ["clock", {}]];
const answer = "The tools say: sunny, noon.";
const ask = { role: "user", content: "How is the weather, and how late is it?" };
const pixels = "data:image/png;base64,";
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

async function openaiChat() {
  const client = new OpenAI({ baseURL: v1, apiKey: "k", maxRetries: 0 });
  const tools = Object.entries(schemas).map(([name, parameters]) => ({ type: "function", function: { name, parameters } }));
  const stream = client.chat.completions.stream({ model: "m", messages: [ask], tools });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  const calls = message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments || "{}")]);
  assert.deepEqual(calls, expected);
  const said = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: results[call.function.name] }));
  const final = await client.chat.completions.create({ model: "m", messages: [ask, message, ...said], tools });
  assert.equal(final.choices[0].message.content, answer);
  assert.equal(final.choices[0].message.reasoning, "Let me see.");
  const response_format = { type: "json_schema", json_schema: { name: "verdict", schema: verdict, strict: true } };
  const parsed = await client.chat.completions.parse({ model: "m", messages: [ask], response_format });
  assert.deepEqual(parsed.choices[0].message.parsed, { ok: true });
  const look = [{ type: "text", text: "What is it?" }, { type: "image_url", image_url: { url: pixels + pixel } }];
  const seen = await client.chat.completions.create({ model: "m", messages: [{ role: "user", content: look }] });
  assert.equal(seen.choices[0].message.content.replace(" ", ""), "1pictures");
}

async function openaiResponses() {
  const client = new OpenAI({ baseURL: v1, apiKey: "k", maxRetries: 0 });
  const tools = Object.entries(schemas).map(([name, parameters]) => ({ type: "function", name, parameters, strict: false }));
  const stream = client.responses.stream({ model: "m", input: [ask], tools });
  const first = await stream.finalResponse();
  const calls = first.output.filter((item) => item.type === "function_call");
  assert.deepEqual(calls.map((call) => [call.name, JSON.parse(call.arguments)]), expected);
  const input = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: results[call.name] }));
  const final = await client.responses.create({ model: "m", input, tools, previous_response_id: first.id });
  assert.equal(final.output_text, answer);
  assert.equal(first.output.find((item) => item.type === "reasoning").content[0].text, "Let me see.");
  const text = { format: { type: "json_schema", name: "verdict", schema: verdict, strict: true } };
  const parsed = await client.responses.parse({ model: "m", input: [ask], text });
  assert.deepEqual(parsed.output_parsed, { ok: true });
  const look = [{ type: "input_text", text: "What is it?" }, { type: "input_image", image_url: pixels + pixel, detail: "auto" }];
  const seen = await client.responses.create({ model: "m", input: [{ role: "user", content: look }] });
  assert.equal(seen.output_text.replace(" ", ""), "1pictures");
}

async function anthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: "k", maxRetries: 0 });
  const tools = Object.entries(schemas).map(([name, input_schema]) => ({ name, input_schema }));
  const asked = { model: "m", max_tokens: 50, tools };
  const message = await client.messages.stream({ ...asked, messages: [ask] }).finalMessage();
  const calls = message.content.filter((block) => block.type === "tool_use");
  assert.deepEqual(calls.map((block) => [block.name, block.input]), expected);
  const said = calls.map((block) => ({ type: "tool_result", tool_use_id: block.id, content: results[block.name] }));
  const messages = [ask, { role: "assistant", content: message.content }, { role: "user", content: said }];
  const final = await client.messages.create({ ...asked, messages });
  assert.equal(final.content.at(-1).text, answer);
  assert.equal(message.content[0].thinking, "Let me see.");
  const format = { type: "json_schema", schema: verdict };
  const parsed = await client.messages.create({ model: "m", max_tokens: 50, messages: [ask], output_config: { format } });
  assert.deepEqual(JSON.parse(parsed.content.at(-1).text), { ok: true });
  const source = { type: "base64", media_type: "image/png", data: pixel };
  const look = [{ type: "text", text: "What is it?" }, { type: "image", source }];
  const seen = await client.messages.create({ model: "m", max_tokens: 50, messages: [{ role: "user", content: look }] });
  assert.equal(seen.content.at(-1).text.replace(" ", ""), "1pictures");
}

async function aiSdk(model, thought) {
  const tools = Object.fromEntries(
    Object.entries(schemas).map(([name, schema]) => [
      name,
      tool({ description: name, inputSchema: jsonSchema(schema), execute: async () => results[name] }),
    ]),
  );
  for (const generate of [generateText, streamText]) {
    const result = await generate({ model, prompt: ask.content, tools, stopWhen: stepCountIs(3), maxRetries: 0 });
    const steps = await result.steps;
    assert.equal(steps.length, 2);
    assert.deepEqual(steps[0].toolCalls.map((call) => [call.toolName, call.input]), expected);
    assert.equal(steps[0].reasoningText, thought);
    assert.equal(await result.text, answer);
  }
  const output = Output.object({ schema: jsonSchema(verdict) });
  const parsed = await generateText({ model, prompt: "Is it?", output, maxRetries: 0 });
  assert.deepEqual(parsed.output, { ok: true });
  const content = [
    { type: "text", text: "What is it?" },
    { type: "file", data: pixel, mediaType: "image/png" },
  ];
  const seen = await generateText({ model, messages: [{ role: "user", content }], maxRetries: 0 });
  assert.equal(seen.text.replace(" ", ""), "1pictures");
}

const compatible = { name: "router", baseURL: v1, apiKey: "k", supportsStructuredOutputs: true };
// The provider for OpenAI shows only summaries of reasoning.
const parts = {
  openaiChat,
  openaiResponses,
  anthropic,
  "AI SDK, openai-compatible": () => aiSdk(createOpenAICompatible(compatible)("m"), "Let me see."),
  "AI SDK, openai chat": () => aiSdk(createOpenAI({ baseURL: v1, apiKey: "k" }).chat("m")),
  "AI SDK, openai responses": () => aiSdk(createOpenAI({ baseURL: v1, apiKey: "k" }).responses("m")),
  "AI SDK, anthropic": () => aiSdk(createAnthropic({ baseURL: v1, apiKey: "k" })("m"), "Let me see."),
};
for (const [name, part] of Object.entries(parts)) {
  try {
    await part();
  } catch (error) {
    console.error(`${name}:`, error);
    process.exitCode = 1;
  }
}
if (!process.exitCode) console.log("all is well");
