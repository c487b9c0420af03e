"""The requests of this process while somebody looks at them: all of it bounded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from msgspec.structs import astuple
from pydantic import BaseModel

from router.proxy.recovery import CONSEQUENCES
from router.proxy.retry import Next
from router.telemetry.record import Record
from router.telemetry.request_metrics import tokens_of

MAX_RUNNING = 512
MAX_ENDED = 256
MAX_ERROR_LENGTH = 500
# Ended requests that are kept to be looked up, and those that a new reader begins with.
MAX_RECENT = 1000
MAX_RECENT_SHOWN = 50
MOMENTS = (
    "queued",
    "admitted",
    "prefill_started",
    "prefill_done",
    "decode_started",
    "first_byte",
    "ended",
)
# Facts that a summary takes over as a record has them.
SAME_FACTS = (
    "endpoint", "flow", "stage", "status", "prefiller", "decoder", "model", "retries",
    "conversation", "reused_from", "borrowed_from", "borrowed_tokens", "without_transfer",
    "answer_change", "conversation_reason", "diverges_in",
)  # fmt: skip
# Requests and bytes of a pair of engines are averaged over this time.
RATE_WINDOW_S = 4.0
# Requests that failed or were rejected for lack of room are reported for this time.
REFUSAL_WINDOW_S = 10.0
MAX_REFUSALS = 1024
MAX_REFUSAL_KINDS = 5
RESUMED = CONSEQUENCES[Next.RESUME]

# Source engine, target engine and what moves: "prompt" from prefiller to decoder, "turn" from the
# decode engine of the last turn to a prefiller, "loan" from one prefix cache to another.
EngineLink = tuple[str, str, str]


class RecentRequests:
    """The latest ended requests of this process, whether somebody looks at them or not."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECENT)

    def add_records(self, ended: Sequence[Record]) -> None:
        """Keep the records. Must be their last reader, since the raw kv_transfer_params, which may
        be large, are dropped."""
        for record in ended:
            record.transfer_params = b""
        self._records.extend(ended)

    def latest(self) -> Sequence[Record]:
        """Return the last MAX_RECENT_SHOWN, oldest first."""
        return list(self._records)[-MAX_RECENT_SHOWN:]

    def find(self, request_id: str) -> Record | None:
        """Return the latest request with this id."""
        return next((one for one in reversed(self._records) if one.request_id == request_id), None)


class Refusals(BaseModel):
    """Requests that ended in the last REFUSAL_WINDOW_S with 429, with 5xx, or as a broken stream.

    `status` is 200 for broken streams. `text` is the router's error, empty for an engine's.
    """

    status: int
    text: str
    count: int


def most_frequent(counts: Counter[tuple[int, str]]) -> list[Refusals]:
    """Return the most frequent refusals, which are counted by status and text."""
    found = counts.most_common(MAX_REFUSAL_KINDS)
    return [Refusals(status=kind[0], text=kind[1], count=count) for kind, count in found]


class RequestFeed:
    """The ended requests for one reader, which begins with the `latest` ones. Beyond MAX_ENDED,
    older ones are only counted."""

    def __init__(self, latest: Iterable[Record] = ()) -> None:
        self._ended: deque[Record] = deque(latest, maxlen=MAX_ENDED)
        self._refused = deque(filter(is_refusal, self._ended), maxlen=MAX_REFUSALS)
        self._links: Counter[EngineLink] = Counter()
        self._latest: deque[tuple[float, Counter[EngineLink]]] = deque()
        self._missed = 0

    def note(self, record: Record) -> None:
        self._missed += len(self._ended) == MAX_ENDED
        self._ended.append(record)
        if is_refusal(record):
            self._refused.append(record)
        self._links.update(links_of(record))

    def take(self, at: float) -> tuple[Sequence[Record], int]:
        """Return what ended since the last call, oldest first, and how many more there were."""
        ended, self._ended = self._ended, deque(maxlen=MAX_ENDED)
        missed, self._missed = self._missed, 0
        self._latest.append((at, self._links))
        self._links = Counter()
        while self._latest[0][0] <= at - RATE_WINDOW_S:
            self._latest.popleft()
        return list(ended), missed

    def refusals(self, at: float) -> Sequence[Refusals]:
        """Return the refusals in the seconds before `at` by kind, the most frequent first."""
        while self._refused and (self._refused[0].ended or 0.0) < at - REFUSAL_WINDOW_S:
            self._refused.popleft()
        counts = Counter((one.status, error_text(one)) for one in self._refused)
        return most_frequent(counts)

    def rates(self) -> dict[EngineLink, float]:
        """Return requests per second over each link, in the seconds before the last `take`."""
        sums: Counter[EngineLink] = Counter()
        for _, links in self._latest:
            sums.update(links)
        return {link: count / RATE_WINDOW_S for link, count in sums.items()}


class LiveRequests:
    """All running requests, and a feed of ended ones for each reader.

    The router calls `opened` and `closed` for each request, so both do little.
    """

    def __init__(self) -> None:
        self._running: dict[int, Record] = {}
        self.feeds: list[RequestFeed] = []

    def opened(self, record: Record) -> None:
        if len(self._running) < MAX_RUNNING:
            self._running[id(record)] = record

    def closed(self, record: Record) -> None:
        self._running.pop(id(record), None)
        for feed in self.feeds:
            feed.note(record)

    @property
    def running(self) -> Sequence[Record]:
        """Running requests, oldest first."""
        return list(self._running.values())


def is_refusal(record: Record) -> bool:
    """Return True if the request failed, or was rejected although it was valid."""
    if record.outcome == "disconnected":
        return False
    return record.status == 429 or record.status >= 500 or record.outcome == "broken_stream"


def error_text(record: Record) -> str:
    """Return the router's error without the name of its class."""
    text = " ".join(record.error.split())
    return (text.partition(": ")[2] or text)[:MAX_ERROR_LENGTH]


def links_of(record: Record) -> Iterable[EngineLink]:
    """Return the links over which an ended request moved KV, as far as the router knows."""
    has_moved = record.first_byte is not None and not record.without_transfer
    if record.prefiller and record.decoder and has_moved:
        yield record.prefiller, record.decoder, "prompt"
    if record.reused_from and record.prefiller:
        yield record.reused_from, record.prefiller, "turn"
    if record.borrowed_from:
        yield record.borrowed_from, record.prefiller or record.decoder, "loan"


class RequestSummary(BaseModel):
    """A request as the dashboard shows it.

    `key` is unique among all worker processes, and `at` is the Unix time of arrival in seconds.
    `ms` has each moment in milliseconds since then, None for what the request did not reach.
    `cached_tokens` are prompt tokens that no engine computed for this request, and `resumes` counts
    how often another decode engine continued its stream. `counted` is how `completion_tokens` are
    known: by the engine's "usage", by "token ids", or as "events" of a stream that reports neither.
    """

    key: str
    id: str
    at: float
    endpoint: str
    flow: str
    stage: str
    outcome: str
    status: int
    prefiller: str
    decoder: str
    model: str
    retries: int
    resumes: int
    conversation: str
    reused_from: str
    borrowed_from: str = ""
    borrowed_tokens: int = 0
    without_transfer: str
    answer_change: str = ""
    conversation_reason: str = ""
    diverges_in: str = ""
    ms: dict[str, float | None]
    prompt_tokens: int | None
    completion_tokens: int | None
    counted: str = "usage"
    cached_tokens: int | None
    failures: list[str]
    error: str


def summarize_request(record: Record, worker: str, unix: float) -> RequestSummary:
    """Summarize a running or ended request of a worker. `unix` is the Unix time of clock zero."""
    has_ended = record.ended is not None
    prompt, completion, cached = astuple(tokens_of(record))
    counted = "usage"
    if completion is None:
        counted = "token ids" if record.streamed_tokens else "events"
        completion = record.streamed_tokens or max(0, record.streamed_events) or None
    moments = {name: getattr(record, name) for name in MOMENTS}
    return RequestSummary(
        key=f"{worker}-{id(record):x}-{record.started:.6f}",
        id=record.request_id,
        at=round(unix + record.started, 3),
        **{name: getattr(record, name) for name in SAME_FACTS},
        outcome=record.outcome if has_ended else "running",
        resumes=sum(line.endswith(RESUMED) for line in record.failures),
        ms={
            name: None if moment is None else round((moment - record.started) * 1000, 1)
            for name, moment in moments.items()
        },
        prompt_tokens=prompt,
        completion_tokens=completion,
        counted=counted,
        cached_tokens=cached,
        failures=list(record.failures),
        error=" ".join(record.error.split())[:MAX_ERROR_LENGTH],
    )
