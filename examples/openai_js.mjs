// OpenAI's client for JavaScript (npm install openai): chat completions, streamed.
import OpenAI from "openai";

const { ROUTER_URL: URL = "http://localhost:8000", ROUTER_API_KEY: KEY = "none", MODEL = "qwen3" } = process.env;

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const messages = [{ role: "user", content: "Hello!" }];
for await (const chunk of await client.chat.completions.create({ model: MODEL, messages, stream: true })) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
console.log();
