"""The settings that the router reads for each request."""

from __future__ import annotations

from dataclasses import dataclass, fields

from router.settings import Settings


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """A copy of some fields of Settings. Reading a pydantic model takes ten times as long."""

    changing_prompt_lines: tuple[str, ...]
    client_read_timeout: float
    conversation_stream: str
    conversation_unproven: str
    cors_origins: tuple[str, ...]
    decode_first_byte_timeout: float
    decode_first_threshold: float
    decode_first_turns: float
    decode_policy: str
    first_token: str
    hedged_decoders: int
    kv_canary: float
    max_answer_size: int
    max_body_size: int
    max_connections: int
    max_header_size: int
    max_resumes: int
    min_remote_prefill_tokens: int
    prefill_timeout: float
    reasoning_names: str
    request_timeout: float
    stream_heartbeat: float
    stream_idle_timeout: float
    target_itl: float
    transfer_mode: str
    trust_client_kv_params: bool
    without_prefiller: str
    without_prefiller_tokens: int

    @classmethod
    def of(cls, settings: Settings) -> RequestLimits:
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})
