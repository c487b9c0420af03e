#!/bin/sh
# Any language: plain HTTP. OpenAI's chat completions, streamed.
set -eu
URL="${ROUTER_URL:-http://localhost:8000}" KEY="${ROUTER_API_KEY:-none}" MODEL="${MODEL:-qwen3}"

curl -sN --fail-with-body "$URL/v1/chat/completions" \
  -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \
  -d '{"model": "'"$MODEL"'", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'
