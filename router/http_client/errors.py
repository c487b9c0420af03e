"""Everything that can go wrong between the router and an engine.

UpstreamError
├── ConnectError                 the engine cannot be reached; nothing was sent
│   ├── ConnectRefusedError      refused or unreachable
│   ├── TlsError                 the TLS handshake failed, or the certificate is not the engine's
│   └── ConnectTimeoutError      no connection in time
├── LocalError                   a limit of the router, not the engine's fault; nothing was sent
│   ├── UnresolvedError          the engine's host name cannot be resolved
│   └── AnswersFullError         the engine answers, but held answers take all their memory
├── DisconnectedError            the connection was lost before the first byte of an answer
│   └── StaleConnectionError     a reused connection, lost so soon that the engine had closed it
├── EngineLostError              the engine was declared dead during the request
├── MigratedError                the router ended a stream, which another engine continues
├── AnswerTimeoutError           the engine did not answer in time
│   └── SilenceError             the engine did not even begin to answer
├── BrokenAnswerError            not HTTP, truncated, or contradicting itself
│   ├── CompressedAnswerError    compressed, although the router asked for an uncompressed one
│   ├── AnswerTooLargeError      more than the router holds of one answer
│   ├── EventTooLargeError       one event of a stream is too large
│   └── UnreadableEventError     an event of a stream cannot be translated to the client's API
└── ReaderStalledError           the client stopped reading, so the answer cannot be relayed

`kind` is a metric label. `phrase` is the message for clients, without addresses and details; the
text of the exception has those, for the log.
"""

from __future__ import annotations


class UpstreamError(Exception):
    kind = "upstream"
    phrase = "failed"
    role = ""
    """The role of the engine that failed, once the request knows it."""


class ConnectError(UpstreamError):
    kind = "connect"
    phrase = "cannot be reached"


class ConnectRefusedError(ConnectError):
    kind = "connect_refused"


class TlsError(ConnectError):
    kind = "tls"
    phrase = "cannot be reached over TLS"


class ConnectTimeoutError(ConnectError):
    kind = "connect_timeout"
    phrase = "cannot be reached in time"


class LocalError(UpstreamError):
    kind = "local"
    phrase = "was not contacted: the router is at one of its own limits"


class UnresolvedError(LocalError):
    kind = "dns"
    phrase = "was not contacted: its name cannot be resolved"


class AnswersFullError(LocalError):
    phrase = "sent a large answer, and the router holds too many large answers at once"
    retry_after = 1
    """Seconds, for the client."""


class DisconnectedError(UpstreamError):
    kind = "disconnected"
    phrase = "closed the connection without an answer"


class StaleConnectionError(DisconnectedError):
    kind = "stale"


class EngineLostError(UpstreamError):
    kind = "engine_lost"
    phrase = "was lost"


class MigratedError(UpstreamError):
    kind = "migrated"
    phrase = "is being drained"


class AnswerTimeoutError(UpstreamError):
    kind = "timeout"
    phrase = "did not answer in time"


class SilenceError(AnswerTimeoutError):
    pass


class BrokenAnswerError(UpstreamError):
    kind = "broken_answer"
    phrase = "sent a broken answer"


class CompressedAnswerError(BrokenAnswerError):
    cure = "turn off compression at the engine, or at the proxy in front of it"
    phrase = "sent a compressed answer"

    def __init__(self, coding: str) -> None:
        super().__init__(
            f"the engine's answer is compressed with {coding} although the request accepts only "
            "uncompressed answers"
        )


class AnswerTooLargeError(BrokenAnswerError):
    kind = "answer_too_large"
    phrase = "sent too large an answer"


class EventTooLargeError(BrokenAnswerError):
    phrase = "sent too large an event"


class UnreadableEventError(BrokenAnswerError):
    phrase = "sent an event that cannot be read"


class ReaderStalledError(UpstreamError):
    kind = "reader_stalled"
    phrase = "was stopped because its answer was not read"
