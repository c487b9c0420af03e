#!/bin/sh
# opencode (npm install -g opencode-ai): opencode.sh [arguments of opencode]
# The same settings can stand in opencode.json of a project.
set -eu
URL="${ROUTER_URL:-http://localhost:8000}" KEY="${ROUTER_API_KEY:-none}" MODEL="${MODEL:-qwen3}"

export OPENCODE_CONFIG_CONTENT='{"model": "router/'"$MODEL"'", "small_model": "router/'"$MODEL"'", "provider": {"router": {
  "npm": "@ai-sdk/openai-compatible", "models": {"'"$MODEL"'": {}},
  "options": {"baseURL": "'"$URL"'/v1", "apiKey": "'"$KEY"'"}}}}'
exec opencode "$@"
