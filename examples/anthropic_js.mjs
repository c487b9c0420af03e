// Anthropic's client for JavaScript (npm install @anthropic-ai/sdk): messages, streamed.
import Anthropic from "@anthropic-ai/sdk";

const { ROUTER_URL: URL = "http://localhost:8000", ROUTER_API_KEY: KEY = "none", MODEL = "qwen3" } = process.env;

const client = new Anthropic({ baseURL: URL, apiKey: KEY }); // without /v1
const messages = [{ role: "user", content: "Hello!" }];
const stream = client.messages.stream({ model: MODEL, max_tokens: 256, messages });
stream.on("text", (text) => process.stdout.write(text));
await stream.finalMessage();
console.log();
