#!/bin/sh
# Open WebUI (pip install open-webui, or its container with the same variables): open_webui.sh
set -eu
URL="${ROUTER_URL:-http://localhost:8000}" KEY="${ROUTER_API_KEY:-none}"

export OPENAI_API_BASE_URLS="$URL/v1" OPENAI_API_KEYS="$KEY" ENABLE_OLLAMA_API=false
export ENABLE_FORWARD_USER_INFO_HEADERS=true # names the chat, so that its turns reuse KV
exec open-webui serve "$@"
