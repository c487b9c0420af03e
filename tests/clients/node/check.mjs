// OpenAI's client for Node: node check.mjs URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "k", maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const asked = { model, messages, max_tokens: 8, temperature: 0 };

const whole = await client.chat.completions.create(asked);
let said = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  said += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(said, whole.choices[0].message.content);

const response = await client.responses.create({ model, input: "Hi.", max_output_tokens: 16 });
const stream = await client.responses.create({
  model,
  input: "And?",
  previous_response_id: response.id,
  max_output_tokens: 16,
  stream: true,
});
const kinds = [];
for await (const event of stream) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);

await assert.rejects(client.chat.completions.create({ ...asked, model: "none" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...asked, max_tokens: 0 }), OpenAI.BadRequestError);
console.log("all is well");
