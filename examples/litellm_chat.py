"""LiteLLM (pip install litellm): the prefix of the model's name chooses the API."""

import os

import litellm

URL = os.environ.get("ROUTER_URL", "http://localhost:8000")
KEY = os.environ.get("ROUTER_API_KEY", "none")
MODEL = os.environ.get("MODEL", "qwen3")

messages = [{"role": "user", "content": "Hello!"}]
options = {"api_base": f"{URL}/v1", "api_key": KEY, "messages": messages}
for chunk in litellm.completion(f"openai/{MODEL}", stream=True, **options):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

options["api_base"] = URL  # without /v1
answer = litellm.completion(f"anthropic/{MODEL}", max_tokens=256, **options)
print(answer.choices[0].message.content)
