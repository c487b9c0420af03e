"""The router's own metrics, prefix disagg_router_, in a registry of their own.

Labels are bounded: engines and sources are those there are, everything else comes from small fixed
sets.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from router.telemetry.record import Record
from router.telemetry.tally import Buckets, Readings, Tally

# Observations that a histogram gathers before it sorts them.
MOST_UNSORTED = 1024
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histograms: list[Buckets] = []
        self.requests = self._tally(
            "requests",
            "Requests that ended, by what the client was told.",
            "endpoint",
            "flow",
            "status",
            "outcome",
        )
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "From asking a prefiller to its whole answer."
        )
        self.ttft_seconds = self._histogram(
            "time_to_first_byte_seconds",
            "From the request's arrival to the first byte of the decoder's body.",
        )
        self.decode_first_byte_seconds = self._histogram(
            "decode_first_byte_seconds",
            "From asking a decoder to the first byte of its body.",
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From the request's arrival to the end of its answer."
        )
        self.workers = self._gauge("workers", "Processes whose figures these are.")
        self.workers.set(1)
        self.in_flight = self._gauge("requests_in_flight", "Requests being worked on.")
        self.queue_depth = self._gauge("queue_depth", "Requests that wait for room at engines.")
        self.queue_seconds = self._histogram(
            "queue_seconds", "How long requests waited for room that did, whatever came of it."
        )
        self.refusals = self._tally(
            "refusals", "Requests and connections refused by the router's own limits.", "reason"
        )
        self.connections = self._gauge("client_connections", "Open connections of clients.")
        self.held_bodies = self._gauge("held_body_bytes", "Bytes of request bodies that are held.")
        self.engine_in_flight = self._readings(
            "engine_requests_in_flight", "Legs that run on an engine.", "role", "engine"
        )
        self.engine_holding = self._readings(
            "engine_holding",
            "Requests whose KV waits on an engine until a decoder has read it.",
            "role",
            "engine",
        )
        self.engine_healthy = self._readings(
            "engine_healthy", "1 healthy, 0 unhealthy, -1 not probed yet.", "role", "engine"
        )
        self.engine_draining = self._readings(
            "engine_draining", "1 when it gets nothing new and is to go, else 0.", "role", "engine"
        )
        self.warm_ups = self._counter(
            "warm_ups", "Pairs of engines made known to each other, by how it went.", "outcome"
        )
        self.group_engines = self._readings(
            "group_engines",
            "Engines of a group that may be asked, as far as known.",
            "group",
            "role",
        )
        self.group_weight = self._readings(
            "group_weight", "A group's share of requests, relative to others'.", "group"
        )
        self.source_engines = self._readings(
            "source_engines", "Engines that a source lists, or did when it last could.", "source"
        )
        self.source_trouble = self._readings(
            "source_trouble", "1 while a source cannot tell, or not all; else 0.", "source"
        )
        self.source_told = self._readings(
            "source_told_timestamp_seconds", "When a source last told what it lists.", "source"
        )
        self.upstream_errors = self._counter(
            "upstream_errors", "Legs that failed, by kind of failure.", "role", "kind"
        )
        self.client_disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer ended.", "stage"
        )
        self.prefill_without_params = self._counter(
            "prefill_without_params",
            "Prefill answers without kv_transfer_params: the decoder prefilled again.",
        )
        self.decode_only = self._counter(
            "decode_only", "Requests that went to a decoder alone.", "reason"
        )
        self.conversation_turns = self._tally(
            "conversation_turns",
            "Turns of conversations, by what became of the last turn's KV and why.",
            "outcome",
            "reason",
        )
        self.conversation_tokens = self._counter(
            "conversation_tokens_offered",
            "Tokens of last turns that prefillers were told to pull from decoders.",
        )
        self.conversation_kept = self._tally(
            "conversation_kept", "Turns that ended, by what they left for the next.", "outcome"
        )
        self.conversation_entries = self._gauge(
            "conversation_entries", "Turns that wait in the memory store."
        )
        self.conversation_store_errors = self._counter(
            "conversation_store_errors",
            "Operations on the conversation store that failed, were skipped after a failure, or "
            "found what is not ours.",
            "operation",
            "result",
        )
        self.decode_first = self._tally(
            "decode_first", "Requests for a decoder first, by what came of it.", "outcome"
        )
        self.releases = self._counter(
            "releases", "Prefills given up before a decoder read them, by how it went.", "outcome"
        )

    def finish(self, record: Record) -> None:
        self.requests.add((record.endpoint, record.flow, record.status, record.outcome))
        if len(self.request_seconds.unsorted) >= MOST_UNSORTED:
            for histogram in self._histograms:
                histogram.fold()
        if record.ended is not None:
            self.request_seconds.observe(record.ended - record.started)
        if record.first_byte is not None:
            self.ttft_seconds.observe(record.first_byte - record.started)
            if record.decode_started is not None:
                self.decode_first_byte_seconds.observe(record.first_byte - record.decode_started)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def count_in_flight(self, running: Callable[[], float]) -> None:
        self.in_flight.set_function(running)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"disagg_router_{name}", text, labels, registry=self.registry)

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        """For what every request counts."""
        return Tally(f"disagg_router_{name}", text, labels, self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"disagg_router_{name}", text, labels, registry=self.registry)

    def _readings(self, name: str, text: str, *labels: str) -> Readings:
        return Readings(f"disagg_router_{name}", text, labels, self.registry)

    def _histogram(self, name: str, text: str) -> Buckets:
        made = Buckets(f"disagg_router_{name}", text, SECONDS, self.registry)
        self._histograms.append(made)
        return made
