"""LangChain (pip install langchain-openai langchain-anthropic), over either API."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

URL = os.environ.get("ROUTER_URL", "http://localhost:8000")
KEY = os.environ.get("ROUTER_API_KEY", "none")
MODEL = os.environ.get("MODEL", "qwen3")

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL)
for chunk in model.stream("Hello!"):
    print(chunk.text, end="", flush=True)
print()

model = ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL, max_tokens=256)  # without /v1
print(model.invoke("Hello!").text)
