"""Everything that can go wrong between the router and an engine.

UpstreamError
├── ConnectError                 the engine cannot be reached; nothing was sent
│   ├── ConnectRefusedError      refused or unreachable
│   ├── TlsError                 no handshake, or not with who it should be
│   └── ConnectTimeoutError      no connection in time
├── LocalError                   a limit of ours, and the engine is not to blame; nothing was sent
│   ├── UnresolvedError          no address for its name
│   └── AnswersFullError         it answers, but large answers take all the memory that they may
├── DisconnectedError            the connection died before the first byte of an answer
│   └── StaleConnectionError     a reused one, lost so soon that the engine had closed it before
├── EngineLostError              the engine was declared dead while it was asked
├── AnswerTimeoutError           the engine was asked and did not answer in time
│   └── SilenceError             not even with the beginning of an answer
├── BrokenAnswerError            not HTTP, ended early, or contradicts itself
│   ├── AnswerTooLargeError      more than the router is willing to hold
│   └── EventTooLargeError       the same of one event of a stream
└── ReaderStalledError           the client stopped reading, so the engine's answer cannot be taken

`kind` is a metric label; `phrase` says it to a client, which is told neither addresses nor details.
The exception's own text has those, for the log.
"""

from __future__ import annotations


class UpstreamError(Exception):
    kind = "upstream"
    phrase = "failed"
    role = ""  # of the engine that failed, once a flow has named it


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
    phrase = "was not asked: the router is at a limit of its own"


class UnresolvedError(LocalError):
    kind = "dns"
    phrase = "was not asked: its name cannot be resolved"


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


class AnswerTimeoutError(UpstreamError):
    kind = "timeout"
    phrase = "did not answer in time"


class SilenceError(AnswerTimeoutError):
    pass


class BrokenAnswerError(UpstreamError):
    kind = "broken_answer"
    phrase = "sent a broken answer"


class AnswerTooLargeError(BrokenAnswerError):
    kind = "answer_too_large"
    phrase = "sent too large an answer"


class EventTooLargeError(BrokenAnswerError):
    phrase = "sent too large an event"


class ReaderStalledError(UpstreamError):
    kind = "reader_stalled"
    phrase = "was stopped because its answer was not read"
