"""Anthropic's Python client (pip install anthropic): messages, streamed."""

import os

from anthropic import Anthropic

URL = os.environ.get("ROUTER_URL", "http://localhost:8000")
KEY = os.environ.get("ROUTER_API_KEY", "none")
MODEL = os.environ.get("MODEL", "qwen3")

client = Anthropic(base_url=URL, api_key=KEY)  # without /v1
messages = [{"role": "user", "content": "Hello!"}]
with client.messages.stream(model=MODEL, max_tokens=256, messages=messages) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
