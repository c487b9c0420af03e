"""An OpenTelemetry collector's front door: takes spans over HTTP, and decodes them."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | int | float | bool


@dataclass(frozen=True)
class Seen:
    """A span as it came over the wire."""

    raw: Span
    service: str

    @property
    def name(self) -> str:
        return str(self.raw.name)

    @property
    def trace_id(self) -> str:
        return bytes(self.raw.trace_id).hex()

    @property
    def span_id(self) -> str:
        return bytes(self.raw.span_id).hex()

    @property
    def parent_id(self) -> str:
        return bytes(self.raw.parent_span_id).hex()

    @property
    def attributes(self) -> dict[str, Value]:
        return values(self.raw.attributes)

    @property
    def failed(self) -> bool:
        return int(self.raw.status.code) == 2

    @property
    def times(self) -> tuple[int, int]:
        return int(self.raw.start_time_unix_nano), int(self.raw.end_time_unix_nano)

    @property
    def events(self) -> dict[str, int]:
        return {str(event.name): int(event.time_unix_nano) for event in self.raw.events}


class Receiver(ThreadingHTTPServer):
    """`held`: while set, answers wait; `status` is that of its answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.spans: list[Seen] = []
        self.asked = 0
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


class Taking(BaseHTTPRequestHandler):
    server: Receiver
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.asked += 1
        self.server.may_answer.wait(20)
        if self.server.status == 200:
            assert self.path == "/v1/traces"
            self.server.spans += spans_in(body)
        answer = ExportTraceServiceResponse().SerializeToString()
        with contextlib.suppress(ConnectionError):
            self.send_response(self.server.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def spans_in(body: bytes) -> Iterator[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        service = str(values(resource.resource.attributes)["service.name"])
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(span, service)


def values(attributes: list[KeyValue]) -> dict[str, Value]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        try:
            yield receiver
        finally:
            receiver.may_answer.set()
            receiver.shutdown()
