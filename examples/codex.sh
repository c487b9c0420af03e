#!/bin/sh
# Codex (npm install -g @openai/codex): codex.sh [arguments of codex]
# The same settings can stand in ~/.codex/config.toml.
set -eu
URL="${ROUTER_URL:-http://localhost:8000}" MODEL="${MODEL:-qwen3}"
CONTEXT="${CONTEXT:-131072}" # max_model_len in $URL/v1/models
export ROUTER_API_KEY="${ROUTER_API_KEY:-none}"

exec codex -c model="\"$MODEL\"" -c model_provider='"router"' -c model_context_window="$CONTEXT" \
  -c model_providers.router="{name=\"router\", base_url=\"$URL/v1\", env_key=\"ROUTER_API_KEY\", wire_api=\"responses\"}" \
  "$@"
