"""Settings of routing: admission, choice of engines, decode-first, conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, SecretStr

from router.settings import fields
from router.settings.fields import MIB, Lower, SettingsGroup
from router.settings.secret import parse_signing_keys, read_secret

DEFAULT_CONVERSATION_IDS = (
    "conversation_id",
    "x-conversation-id",
    "x-session-id",
    "session_id",
    "x-claude-code-session-id",
    "thread-id",  # Codex: one of several threads of a session
    "session-id",
    "x-openwebui-chat-id",
    "prompt_cache_key",
    "x-session-affinity",
    "x-correlation-id",
    "verified-prefix",
)

# Values of conversation_unproven with which a stock engine may answer from KV of other tokens.
UNSAFE_REUSE = ("whole", "prompt")


class AdmissionSettings(SettingsGroup):
    """Admission

    max_engine_requests: Largest number of requests of this process at one engine, queued ones
        included. Further requests wait in the router. 0: no limit.
    max_engine_prefill_tokens: Prompt tokens (estimated) that one engine computes at a time. A
        larger prompt waits until the engine computes none. 0: no limit.
    queue_size: Largest number of requests that wait for a slot at an engine; tenants take turns.
        Further ones get status 429 if their own tenant fills the queue, else 503. 0: no queue.
    queue_timeout: Longest wait for a slot at an engine (else 503).
    queue_priorities: Order the queue by priority, lower first: the header X-Vllm-Priority, else the
        body's priority, else 0.
    """

    max_engine_requests: fields.Count = 0
    max_engine_prefill_tokens: fields.TokenCount = 0
    queue_size: fields.Count = 1024
    queue_timeout: fields.Seconds = 30.0
    queue_priorities: bool = True


class SelectionSettings(SettingsGroup):
    """Engine selection

    transfer_mode: How KV blocks move. pull: the decode engine reads them after prefill. push: both
        engines get the request at once, and the prefill engine writes them. auto: as the engines
        are configured.
    first_token: Whose first token the client gets. auto: the prefill engine's, if both engines
        support the hand-over; the decode engine continues with the second. decoder: the decode
        engine samples it again.
    kv_canary: Share of the requests to two engines whose first token's log-probabilities the router
        compares, to find wrongly transferred KV. With temperature 0 it compares all first tokens.
        0: never.
    max_resumes: How often another decode engine continues a stream after a failure, and how often
        after a preemption return. 0: never.
    migrate_on_drain: Move the streams of a draining decode engine to other engines, which read the
        KV from it. Needs our connector. Otherwise streams run to their end, unless an operator
        drains with --migrate.
    max_resume_memory: Memory for the token ids of resumable streams (4 bytes a token). Streams
        beyond it are not resumed. 0: no limit.
    prefill_policy: Policy that selects a prefill engine. least_loaded: fewest tokens in flight.
        power_of_two: the less loaded of two random engines. session: the conversation's own engine.
        prefix: least to compute, which is what the cache lacks of the prompt and a third of the
        queue.
    decode_policy: Policy that selects a decode engine for requests without a conversation turn.
        prefix: the engine whose cache holds most of the prompt, unless it is too busy; else by
        load.
    max_prefix_memory: Memory for what the policy prefix knows about caches. If they hold more, it
        remembers only some chunks of a prompt.
    host_cache_tokens: Tokens of KV that each engine keeps outside its accelerator, for the policy
        prefix.
    share_routing: Exchange load and contents of caches with other routers, through the Redis of
        --conversation-store. Needs --conversation-store-key. Without Redis, only the workers of one
        router do.
    share_prefix_cache: Let an engine read the beginning of a prompt from another engine's prefix
        cache, if that is faster than computing it. Needs borrows and lends on the engines' identity
        pages.
    min_remote_prefill_tokens: Let the decode engine compute the prompt if it lacks fewer tokens
        than this (estimated). With --decode-policy prefix the router knows what is cached of all
        prompts, else of conversations. 0: never.
    target_itl: Let the decode engine compute the prompt if its steps keep this ITL and it is sooner
        than a prefill engine. It limits no step. Needs decode engines with our connector. 0: off.
    without_prefiller: If no prefill engine is usable: let a decode engine compute the prompt, or
        answer 503.
    without_prefiller_tokens: Longest prompt in tokens (estimated) that a decode engine computes if
        no prefill engine is usable (else 503).
    group_weights: Shares of requests for groups of engines, as in blue=9 green=1. Any other group's
        share is the sum of its engines' weights.
    """

    transfer_mode: Annotated[Literal["auto", "pull", "push"], Lower] = "auto"
    first_token: Annotated[Literal["auto", "decoder"], Lower] = "auto"
    kv_canary: fields.Share = 0.02
    max_resumes: Annotated[int, Field(ge=0, le=16)] = 2
    migrate_on_drain: bool = False
    max_resume_memory: ByteSize = ByteSize(256 * MIB)
    prefill_policy: fields.Policy = "prefix"
    decode_policy: fields.Policy = "prefix"
    max_prefix_memory: ByteSize = ByteSize(64 * MIB)
    host_cache_tokens: fields.TokenCount = 0
    share_routing: bool = True
    share_prefix_cache: bool = True
    min_remote_prefill_tokens: fields.TokenCount = 0
    target_itl: Annotated[fields.Delay, Field(le=30)] = 0.05
    without_prefiller: Annotated[Literal["decode", "refuse"], Lower] = "decode"
    without_prefiller_tokens: fields.TokenCount = 16_384
    group_weights: fields.Weights = ()

    @property
    def weights(self) -> dict[str, float]:
        """The weights of groups, by name of group."""
        pairs = (text.partition("=") for text in self.group_weights)
        return {group: float(weight) for group, _, weight in pairs}

    def conflicts(self) -> Iterator[str]:
        if len(self.weights) < len(self.group_weights):
            yield "--group-weights names a group twice"


class DecodeFirstSettings(SettingsGroup):
    """Decode first

    decode_first_threshold: Send a request to a decode engine first, with this cache_hit_threshold
        unless it has one. The engine answers alone if its cache holds this share of the prompt. 0:
        off.
    decode_first_turns: Send a turn to its decode engine first if the engine holds about this share
        of the prompt and supports cache_hit_threshold. 0: never.
    hedged_decoders: Send a decode-first stream to this many decode engines, if they support
        cache_hit_threshold. The first that accepts answers. 0 or 1: no hedging.
    """

    decode_first_threshold: fields.Share = 0.0
    decode_first_turns: fields.Share = 0.9
    hedged_decoders: Annotated[int, Field(ge=0, le=8)] = 0


class ConversationSettings(SettingsGroup):
    """Conversations

    conversation_store: Where the router records which decode engine holds a turn: memory (this
        process), off, or a Redis URL that routers share (redis://, rediss://, redis+cluster://,
        redis+sentinel://).
    conversation_store_password: Redis password.
    conversation_store_password_file: File with the Redis password, read at start, and when Redis
        refuses it.
    conversation_store_key: Secret that signs turns in Redis, the same at all routers that share the
        store. Without it, routers do not reuse each other's turns.
    conversation_store_key_file: File with these secrets, one a line, read at start. The first line
        signs, each line verifies.
    conversation_store_timeout: Longest wait for Redis; then the turn is served without reuse.
    conversation_ttl: How long a turn can be reused. Choose less than decoder_kv_blocks_ttl of the
        decode engines (480).
    responses_ttl: How long a response of /v1/responses can be continued (previous_response_id).
        Needs a conversation store.
    conversation_max_entries: Largest number of turns in the memory store; the oldest are dropped.
    conversation_max_bytes: Largest size of the memory store.
    conversation_ids: Where the router looks for a conversation's id, in this order. With a hyphen
        or after header: a header; else a field of the body. verified-prefix and prefix recognise
        chats without an id by their messages: the former where engines verify what they reuse, the
        latter with all engines.
    changing_prompt_lines: Lines that the router removes from the beginning of system texts on
        /v1/messages, because they change with each request; * stands for any characters. The
        default is a line of Claude Code.
    conversation_stream: auto: relay streams as they come, and reuse the turn if the stream has
        kv_transfer_params. exact: request the answer unstreamed, and make the stream from it. A
        request can set conversation_stream itself.
    conversation_unproven: KV that is reused if engines send no prefix hashes (stock vLLM). tokens:
        blocks whose tokens the next prompt begins with, as engines report them. off: none. Unsafe,
        because chat templates change earlier text: whole (the last turn with its answer, if the
        messages extend it) and prompt (at most its prompt).
    reasoning_names: Names of the reasoning in answers of /v1/chat/completions. engine: as the
        engine (vLLM: reasoning). both: reasoning and reasoning_content.
    tenant_header: Header that identifies the tenant. Tenants never reuse each other's turns.
    affinity_load_factor: Ignore affinity (turn, session, prefix) if the preferred engine has more
        than this multiple of the mean in-flight legs.
    affinity_load_floor: Never ignore affinity for an engine with fewer in-flight legs than this
        (prefill engines: than 2).
    """

    conversation_store: fields.Store = "memory"
    conversation_store_password: SecretStr | None = None
    conversation_store_password_file: Path | None = None
    conversation_store_key: SecretStr | None = None
    conversation_store_key_file: Path | None = None
    conversation_store_timeout: fields.Seconds = 0.25
    conversation_ttl: fields.Seconds = 450.0
    responses_ttl: fields.Seconds = 3600
    conversation_max_entries: fields.PositiveCount = 100_000
    conversation_max_bytes: ByteSize = ByteSize(256 * MIB)
    conversation_ids: fields.IdNames = DEFAULT_CONVERSATION_IDS
    changing_prompt_lines: fields.LinePatterns = ("x-anthropic-billing-header*",)
    conversation_stream: Annotated[Literal["auto", "exact"], Lower] = "auto"
    conversation_unproven: Annotated[Literal["tokens", "whole", "prompt", "off"], Lower] = "tokens"
    reasoning_names: Annotated[Literal["engine", "both"], Lower] = "engine"
    tenant_header: fields.Name = "authorization"
    affinity_load_factor: fields.Factor = 1.5
    affinity_load_floor: fields.Count = 8

    def store_keys(self) -> list[bytes]:
        """Return the keys for turns in Redis: the first one signs, all verify.

        The list is empty if no key is set. Raises SettingsError.
        """
        text = read_secret(self, "conversation_store_key")
        return [] if text is None else parse_signing_keys(text)

    def with_store_keys(self, keys: list[bytes]) -> Self:
        """Return a copy with `keys` as values, so that no worker process reads or makes its own."""
        text = SecretStr(b"\n".join(keys).decode())
        changes = {"conversation_store_key": text, "conversation_store_key_file": None}
        return self.model_copy(update=changes)
