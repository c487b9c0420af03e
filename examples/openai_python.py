"""OpenAI's Python client (pip install openai): chat completions, and a response."""

import os

from openai import OpenAI

URL = os.environ.get("ROUTER_URL", "http://localhost:8000")
KEY = os.environ.get("ROUTER_API_KEY", "none")
MODEL = os.environ.get("MODEL", "qwen3")

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
messages = [{"role": "user", "content": "Hello!"}]
for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
print()

first = client.responses.create(model=MODEL, input="Hello!")
second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
print(second.output_text)
