"""LlamaIndex (pip install llama-index-llms-openai-like)."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("ROUTER_URL", "http://localhost:8000")
KEY = os.environ.get("ROUTER_API_KEY", "none")
MODEL = os.environ.get("MODEL", "qwen3")

# Without these two, it sends completions without a chat template, and no tools.
options = {"is_chat_model": True, "is_function_calling_model": True}
llm = OpenAILike(api_base=f"{URL}/v1", api_key=KEY, model=MODEL, **options)
for chunk in llm.stream_chat([ChatMessage(role="user", content="Hello!")]):
    print(chunk.delta or "", end="", flush=True)
print()
