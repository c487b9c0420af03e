#!/bin/sh
# Claude Code (npm install -g @anthropic-ai/claude-code): claude_code.sh [arguments of claude]
set -eu
URL="${ROUTER_URL:-http://localhost:8000}" KEY="${ROUTER_API_KEY:-none}" MODEL="${MODEL:-qwen3}"
CONTEXT="${CONTEXT:-131072}" # max_model_len in $URL/v1/models

export ANTHROPIC_BASE_URL="$URL" ANTHROPIC_AUTH_TOKEN="$KEY" # without /v1
export ANTHROPIC_MODEL="$MODEL" ANTHROPIC_DEFAULT_HAIKU_MODEL="$MODEL"
export CLAUDE_CODE_MAX_CONTEXT_TOKENS="$CONTEXT" CLAUDE_CODE_MAX_OUTPUT_TOKENS="$((CONTEXT / 4))"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
exec claude "$@"
