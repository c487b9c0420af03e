"""Settings of routing: admission, choice of engines, decode-first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from router.settings.fields import (
    MIB,
    Count,
    Lower,
    Policy,
    Seconds,
    SettingsGroup,
    Share,
    Weights,
)


class AdmissionSettings(SettingsGroup):
    title = "Admission"

    max_engine_requests: Count = 0
    """Largest number of requests that this process has at one engine, including the engine's queue.
    Further requests wait in the router. 0: no limit."""
    max_engine_prefill_tokens: Count = 0
    """Largest number of prompt tokens (estimated) that one engine computes at a time. A larger
    prompt waits until the engine computes none. 0: no limit."""
    queue_size: Count = 1024
    """Largest number of requests that wait for a slot at an engine; tenants take turns. A request
    beyond the limit gets status 429 if its own tenant fills the queue, else 503. 0: no queue."""
    queue_timeout: Seconds = 30.0
    """Longest wait for a slot at an engine (else 503)."""
    queue_priorities: bool = True
    """Order the queue by the request's priority: the header X-Vllm-Priority, else the body's
    priority, else 0. Lower values come first."""


class SelectionSettings(SettingsGroup):
    title = "Engine selection"

    transfer_mode: Annotated[Literal["auto", "pull", "push"], Lower] = "auto"
    """How KV blocks move. pull: after prefill the decode engine reads the blocks. push: both
    engines get the request at once, and the prefill engine writes the blocks. auto: as the engines
    are configured."""
    first_token: Annotated[Literal["auto", "decoder"], Lower] = "auto"
    """Which engine's first token the client gets. auto: the token that the prefill engine samples,
    if both engines support the hand-over; the decode engine then continues with the second token
    (docs/mid-answer.md). decoder: the decode engine samples it again."""
    max_resumes: Annotated[int, Field(ge=0, le=16)] = 2
    """How often another decode engine continues a stream after a failure in mid-stream, and how
    often after a preemption return, if the engines support it. 0: never."""
    max_resume_memory: ByteSize = ByteSize(256 * MIB)
    """Memory for the token ids of all streams that can be resumed (4 bytes a token). A stream
    beyond the limit is not resumed. 0: no limit."""
    prefill_policy: Policy = "prefix"
    """Policy that selects a prefill engine: round_robin; least_loaded, by tokens in flight;
    power_of_two, the less loaded of two random engines; session, the conversation's own engine; or
    prefix, the engine whose cache holds most of the prompt."""
    decode_policy: Policy = "power_of_two"
    """Policy that selects a decode engine for requests without a conversation turn."""
    min_remote_prefill_tokens: Count = 0
    """Let the decode engine compute the prompt itself if it lacks fewer tokens than this
    (estimated). The router knows cached tokens of conversations, and with --decode-policy prefix
    those of all prompts. 0: never."""
    without_prefiller: Annotated[Literal["decode", "refuse"], Lower] = "decode"
    """If no prefill engine is usable: let a decode engine compute the prompt, or answer 503."""
    without_prefiller_tokens: Count = 16_384
    """Longest prompt in tokens (estimated) that a decode engine then computes. Longer prompts get
    status 503."""
    group_weights: Weights = ()
    """Shares of requests for groups of engines, as in blue=9 green=1. The share of any other group
    is the sum of its engines' weights."""

    @property
    def weights(self) -> dict[str, float]:
        """The weights of groups, by name of group."""
        pairs = (text.partition("=") for text in self.group_weights)
        return {group: float(weight) for group, _, weight in pairs}

    def conflicts(self) -> Iterator[str]:
        if len(self.weights) < len(self.group_weights):
            yield "--group-weights names a group twice"


class DecodeFirstSettings(SettingsGroup):
    title = "Decode first"

    decode_first_threshold: Share = 0.0
    """Send a request to a decode engine first, with this cache_hit_threshold. The engine answers
    alone if its cache holds this share of the prompt. A cache_hit_threshold in the request takes
    precedence. 0: off."""
    decode_first_turns: Share = 0.9
    """Send a turn to its decode engine first if the engine holds about this share of the prompt and
    is known to support cache_hit_threshold. 0: never."""
    hedged_decoders: Annotated[int, Field(ge=0, le=8)] = 0
    """Hedge: send a decode-first stream to this many decode engines at once, if they are known to
    support cache_hit_threshold. The first engine that accepts answers. 0 or 1: no hedging."""
