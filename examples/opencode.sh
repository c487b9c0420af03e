#!/bin/sh
# opencode (npm install -g opencode-ai): opencode.sh [arguments of opencode]
# The same settings can stand in opencode.json of a project.
set -eu
URL="${ROUTER_URL:-http://localhost:8000}" KEY="${ROUTER_API_KEY:-none}" MODEL="${MODEL:-qwen3}"
CONTEXT="${CONTEXT:-131072}" # max_model_len in $URL/v1/models

export OPENCODE_CONFIG_CONTENT='{"model": "router/'"$MODEL"'", "small_model": "router/'"$MODEL"'", "provider": {"router": {
  "npm": "@ai-sdk/openai-compatible", "models": {"'"$MODEL"'": {
    "limit": {"context": '"$CONTEXT"', "output": '"$((CONTEXT / 4))"'}}},
  "options": {"baseURL": "'"$URL"'/v1", "apiKey": "'"$KEY"'"}}}}'
exec opencode "$@"
