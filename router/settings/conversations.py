"""Settings of conversations: the store of turns, how turns are recognised and reused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, SecretStr

from router.settings.fields import (
    MIB,
    Count,
    Factor,
    Lower,
    Name,
    Names,
    PositiveCount,
    Seconds,
    SettingsGroup,
    Store,
)
from router.settings.secret import Secret, parse_signing_keys

STORE_PASSWORD = Secret("conversation_store_password")
STORE_KEY = Secret("conversation_store_key", parse_signing_keys)
DEFAULT_CONVERSATION_IDS = (
    "conversation_id",
    "x-conversation-id",
    "x-session-id",
    "session_id",
    "x-session-affinity",
    "x-correlation-id",
)


class ConversationSettings(SettingsGroup):
    title = "Conversations"

    conversation_store: Store = "memory"
    """Where the router records which decode engine holds a turn: memory (this process), off, or a
    Redis URL that several routers share (redis://, rediss://, redis+cluster://, redis+sentinel://).
    """
    conversation_store_password: SecretStr | None = None
    """Redis password. A variable is safer than a flag."""
    conversation_store_password_file: Path | None = None
    """File with the Redis password, read at start."""
    conversation_store_key: Annotated[SecretStr, STORE_KEY.validator] | None = None
    """Secret that signs turns in Redis; use the same one at all routers that share the store.
    Without it, routers do not reuse each other's turns. A variable is safer than a flag."""
    conversation_store_key_file: Path | None = None
    """File with the secrets that sign turns, one a line, read at start. The first line signs, each
    line verifies."""
    conversation_store_timeout: Seconds = 0.25
    """Longest wait for Redis. After it, the router serves the turn without reuse."""
    conversation_ttl: Seconds = 450.0
    """How long a turn can be reused. Choose less than decoder_kv_blocks_ttl of the decode engines
    (480)."""
    responses_ttl: Seconds = 3600
    """How long a response of /v1/responses can be continued (previous_response_id). Needs a
    conversation store."""
    conversation_max_entries: PositiveCount = 100_000
    """Largest number of turns in the memory store; the oldest are dropped."""
    conversation_max_bytes: ByteSize = ByteSize(256 * MIB)
    """Largest size of the memory store."""
    conversation_ids: Names = DEFAULT_CONVERSATION_IDS
    """Where the router looks for a conversation's id, in this order. x-...: a header; prefix:
    recognise a chat by its messages; anything else: a field of the body."""
    conversation_stream: Annotated[Literal["auto", "exact"], Lower] = "auto"
    """auto: relay streams as they come, and reuse the turn if the decode engine puts
    kv_transfer_params into the stream. exact: request the answer without streaming, and make the
    stream from the whole answer. A request can set conversation_stream itself."""
    conversation_unproven: Annotated[Literal["whole", "prompt", "off"], Lower] = "whole"
    """The KV that is reused if engines cannot prove which tokens they hold (stock vLLM). whole: the
    last turn with its answer, if the messages extend it. prompt: at most its prompt. off: no KV."""
    tenant_header: Name = "authorization"
    """Header that identifies the tenant. Tenants never reuse each other's turns."""
    affinity_load_factor: Factor = 1.5
    """Ignore affinity (turn, session, prefix) if the preferred engine has more than this multiple
    of the mean in-flight legs."""
    affinity_load_floor: Count = 8
    """Never ignore affinity for an engine with fewer in-flight legs than this (prefill engines:
    than 2)."""

    def store_password(self) -> str | None:
        """Return the Redis password, if there is one. Raises SettingsError."""
        return STORE_PASSWORD.read(self)

    def store_keys(self) -> list[bytes]:
        """Return the keys for turns in Redis: the first one signs, all verify.

        The list is empty if no key is set. Raises SettingsError.
        """
        text = STORE_KEY.read(self)
        return [] if text is None else parse_signing_keys(text)

    def with_store_keys(self, keys: list[bytes]) -> Self:
        """Return a copy with `keys` as values, so that no worker process reads or makes its own."""
        text = SecretStr(b"\n".join(keys).decode())
        changes = {STORE_KEY.name: text, STORE_KEY.file_name: None}
        return self.model_copy(update=changes)
