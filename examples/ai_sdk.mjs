// Vercel's AI SDK (npm install ai @ai-sdk/openai-compatible).
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const { ROUTER_URL: URL = "http://localhost:8000", ROUTER_API_KEY: KEY = "none", MODEL = "qwen3" } = process.env;

const router = createOpenAICompatible({ name: "router", baseURL: `${URL}/v1`, apiKey: KEY });
const result = streamText({ model: router(MODEL), prompt: "Hello!" });
for await (const text of result.textStream) process.stdout.write(text);
console.log();
