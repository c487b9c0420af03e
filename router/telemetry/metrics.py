"""The router's own metrics, prefix disagg_router_, in a registry of their own.

Labels are bounded: engines and sources are those there are, everything else comes from small fixed
sets.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from router.telemetry.by_model import MOST_UNSORTED, SECONDS, ByModel
from router.telemetry.metric_registry import Registry
from router.telemetry.record import Record

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    def __init__(self) -> None:
        made = Registry()
        self.registry, self.described = made.collectors, made.described
        self.requests = made.tally(
            "requests",
            "Requests that ended, by what the client was told.",
            "endpoint",
            "flow",
            "status",
            "outcome",
            act="Outcomes failed and broken_stream are the router's or the engines': read "
            "the access lines with them. refused is a client's doing, or a limit's.",
        )
        self.prefill_seconds = made.histogram(
            "prefill_seconds",
            "From asking a prefiller to its whole answer.",
            SECONDS,
            act="Prompts became longer or prefillers are behind: look at "
            "engine_requests_in_flight of prefillers, and add some.",
        )
        self.ttft_seconds = made.histogram(
            "time_to_first_byte_seconds",
            "From the request's arrival to the first byte of the decoder's body.",
            SECONDS,
            act="What clients feel first. Find which part grew: queue_seconds, "
            "prefill_seconds or decode_first_byte_seconds.",
        )
        self.decode_first_byte_seconds = made.histogram(
            "decode_first_byte_seconds",
            "From asking a decoder to the first byte of its body.",
            SECONDS,
            act="The transfer of KV, or a wait in the decoder: look at its own metrics "
            "(docs/engine.md) and at engine_requests_in_flight of decoders.",
        )
        self.request_seconds = made.histogram(
            "request_seconds",
            "From the request's arrival to the end of its answer.",
            SECONDS,
            act="Mostly the length of answers; by model it is model_request_seconds.",
        )
        self.workers = made.gauge(
            "workers",
            "Processes whose figures these are.",
            act="Fewer than --workers means that some died or do not answer: the log says "
            "which and why.",
        )
        self.workers.set(1)
        self.in_flight = made.gauge(
            "requests_in_flight",
            "Requests being worked on.",
            act="The load. If it grows while requests do not come faster, engines have "
            "become slower.",
        )
        self.queue_depth = made.gauge(
            "queue_depth",
            "Requests that wait for room at engines.",
            act="Above 0 for long: engines are full. Add some, or let fewer requests in.",
        )
        self.queue_seconds = made.histogram(
            "queue_seconds",
            "How long requests waited for room that did, whatever came of it.",
            SECONDS,
            act="As queue_depth; near --queue-timeout requests are refused soon.",
        )
        self.refusals = made.tally(
            "refusals",
            "Requests and connections refused by the router's own limits.",
            "reason",
            act="docs/admission.md has each reason, and the setting that is behind it.",
        )
        self.connections = made.gauge(
            "client_connections",
            "Open connections of clients.",
            act="Near --max-connections new ones are refused: raise it, or add routers.",
        )
        self.held_bodies = made.gauge(
            "held_body_bytes",
            "Bytes of request bodies that are held.",
            act="Near --max-held-bodies uploads are refused: raise it if there is memory.",
        )
        self.held_answers = made.gauge(
            "held_answer_bytes",
            "Bytes of large answers that are held whole, or that clients have not read.",
            act="Near --max-held-answers large answers are refused: raise it if there is memory, "
            "or find out which clients do not read.",
        )
        self.engine_in_flight = made.readings(
            "engine_requests_in_flight",
            "Legs that run on an engine.",
            "role",
            "engine",
            act="One engine with far more than its peers: a policy that prefers it, or it hangs.",
        )
        self.engine_holding = made.readings(
            "engine_holding",
            "Requests whose KV waits on an engine until a decoder has read it.",
            "role",
            "engine",
            act="Grows where decoders do not come for what was prefilled: look at decode errors.",
        )
        self.engine_healthy = made.readings(
            "engine_healthy",
            "1 healthy, 0 unhealthy, -1 not probed yet.",
            "role",
            "engine",
            act="0: the log says what its probe met. The router asks others meanwhile.",
        )
        self.engine_draining = made.readings(
            "engine_draining",
            "1 when it gets nothing new and is to go, else 0.",
            "role",
            "engine",
            act="1 for long: somebody's drain was not ended, or its pod does not go.",
        )
        self.engine_shares_id = made.readings(
            "engine_shares_id",
            "1 for each engine whose engine_id another engine has, too; no sample for others.",
            "role",
            "engine",
            act="No KV moves between the two, which the log names. Give each engine an "
            "engine_id of its own.",
        )
        self.engine_circuit = made.readings(
            "engine_circuit",
            "0 closed, 1 half open (one request may try), 2 open: left alone for its failures.",
            "role",
            "engine",
            act="2: its requests failed in a row, and it is left alone; upstream_errors "
            "says how. It is tried again by itself.",
        )
        self.warm_ups = made.counter(
            "warm_ups",
            "Pairs of engines made known to each other, by how it went.",
            "outcome",
            act="failed: two engines cannot reach each other's KV; look at their logs and "
            "the network between them.",
        )
        self.load_failures = made.tally(
            "kv_load_failures",
            "Loads of KV that decoders said had failed. pair: the two engines cannot exchange KV; "
            "request: its KV alone was gone.",
            "scope",
            act="pair: see pair_avoided. request, and many: leases end before decoders read, look "
            "at their queues.",
        )
        self.pair_avoided = made.readings(
            "pair_avoided",
            "1 for a prefiller and a decoder that could not exchange KV and are paired with "
            "others; absent otherwise.",
            "prefiller",
            "decoder",
            act="The log has the reason. Look at the network between the two engines; the pair is "
            "tried again by itself.",
        )
        self.group_engines = made.readings(
            "group_engines",
            "Engines of a group that may be asked, as far as known.",
            "group",
            "role",
            act="0 of a role in a group: that group cannot work in two halves.",
        )
        self.group_weight = made.readings(
            "group_weight",
            "A group's share of requests, relative to others'.",
            "group",
            act="Only operators and engines' listings move it.",
        )
        self.source_engines = made.readings(
            "source_engines",
            "Engines that a source lists, or did when it last could.",
            "source",
            act="Falls without a rollout: the source lost pods, names or lines.",
        )
        self.source_trouble = made.readings(
            "source_trouble",
            "1 while a source cannot tell, or not all; else 0.",
            "source",
            act="1: the source cannot be asked; its engines stay as they were. The log "
            "has the reason.",
        )
        self.source_told = made.readings(
            "source_told_timestamp_seconds",
            "When a source last told what it lists.",
            "source",
            act="Too long ago: the fleet may be old; look at source_trouble.",
        )
        self.fleet_changes = made.readings(
            "fleet_changes",
            "Engines that came, went or became others.",
            "change",
            grows=True,
            act="Many without a rollout: engines come and go, or a source is unsure of them.",
        )
        self.upstream_errors = made.counter(
            "upstream_errors",
            "Legs that failed, by kind of failure.",
            "role",
            "kind",
            act="docs/reliability.md has each kind. One engine's: look at its log; all "
            "engines': the network.",
        )
        self.retries = made.counter(
            "retries",
            "Legs that were followed by another try, by why they failed.",
            "role",
            "kind",
            act="Engines fail, though clients do not see it yet: the kind says how "
            "(docs/reliability.md).",
        )
        self.client_disconnects = made.counter(
            "client_disconnects",
            "Clients that left before their answer ended.",
            "stage",
            act="Many at prefill or queue: clients do not wait so long, see "
            "time_to_first_byte_seconds.",
        )
        self.prefill_without_params = made.counter(
            "prefill_without_params",
            "Prefill answers without kv_transfer_params: the decoder prefilled again.",
            act="Prefillers run without a KV connector, or with another one: nothing is "
            "transferred.",
        )
        self.decode_only = made.counter(
            "decode_only",
            "Requests that went to a decoder alone.",
            "reason",
            act="no_prefiller: prefillers are missing. no_pair: see pair_avoided. The other "
            "reasons lie in requests (docs/reliability.md).",
        )
        self.conversation_turns = made.tally(
            "conversation_turns",
            "Turns of conversations, by what became of the last turn's KV and why.",
            "outcome",
            "reason",
            act="docs/conversations.md has each outcome and reason. Hits fall: decoders "
            "forget too soon, or clients change what was said.",
        )
        self.conversation_tokens = made.tally(
            "conversation_tokens_offered",
            "Tokens of last turns that prefillers were told to pull from decoders.",
            act="Tokens that need not be computed again; falls with the hits of "
            "conversation_turns.",
        )
        self.conversation_tokens.add((), 0)  # is there before there are some
        self.conversation_kept = made.tally(
            "conversation_kept",
            "Turns that ended, by what they left for the next.",
            "outcome",
            act="not_offered: decoders were started without bidirectional_kv_xfer. "
            "not_kept: the store failed.",
        )
        self.conversation_entries = made.gauge(
            "conversation_entries",
            "Turns that wait in the memory store.",
            act="At its most the oldest are forgotten: raise --conversation-max-entries "
            "if there is memory.",
        )
        self.conversation_store_errors = made.counter(
            "conversation_store_errors",
            "Operations on the conversation store that failed, were skipped after a failure, or "
            "found what is not ours.",
            "operation",
            "result",
            act="The shared store is slow, gone or has another key: turns are computed "
            "anew meanwhile.",
        )
        self.resumes = made.tally(
            "resumes",
            "Streams whose decoder failed after the client had some of them, by its failure and "
            "what came of it. preempted: answers of all kinds that a decoder has handed back.",
            "kind",
            "outcome",
            act="gone_on: the client noticed nothing, yet a decoder failed, or had no room "
            "(preempted: more KV cache, or fewer requests at once, spare prefillers the work). "
            "Others ended with an error event: docs/mid-answer.md says when nobody can go on.",
        )
        self.handed_over = made.tally(
            "handed_over",
            "First tokens that a prefiller sampled and could hand over, by what came of it.",
            "outcome",
            act="differ: the engines of a pair do not render alike, the log says in what. "
            "not_told: a prefiller that offers it did not, or told what makes no sense. refused: a "
            "decoder would not go on from it, and all is computed afresh. In each case the decoder "
            "samples it again.",
        )
        self.decode_first = made.tally(
            "decode_first",
            "Requests for a decoder first, by what came of it.",
            "outcome",
            act="Many rejected: decoders' caches hold less than the threshold wants; "
            "lower it or drop it.",
        )
        self.scattered = made.tally(
            "scattered",
            "Legs of requests that asked several decoders at once, by what came of them. All but "
            "won are asked for in addition.",
            "outcome",
            act="Many rejected, and few won: the caches hold less than the threshold wants. left: "
            "several held enough, and all but the first were stopped.",
        )
        self.releases = made.counter(
            "releases",
            "Prefills given up before a decoder read them, by how it went.",
            "outcome",
            act="failed: engines keep blocks until their leases end, so prefillers may fill up.",
        )
        self.unauthorized = made.tally(
            "unauthorized",
            "Requests that showed no API key, or one that is not in the file.",
            "reason",
            act="incorrect, and many: somebody has an old key, or tries some. The access lines "
            "have their requests.",
        )
        self.tls_failures = made.tally(
            "tls_failures",
            "Handshakes of clients over TLS that came to nothing.",
            "reason",
            act="refused, and many: clients do not know the certificate's authority, show none of "
            "their own, or speak no TLS. late: they connect and are silent. left: often the "
            "checks of a load balancer.",
        )
        self.rate_limited = made.counter(
            "rate_limited",
            "Requests that were refused by a limit of their API key.",
            "key",
            "limit",
            act="Its owner asks for more than the file grants: talk, or raise the limit.",
        )
        self.key_limit_errors = made.counter(
            "key_limit_errors",
            "Operations on the Redis that counts keys' limits that failed, or were skipped after "
            "a failure.",
            "operation",
            "result",
            act="Each router counts alone meanwhile, so a key may use its limits at each: look "
            "at Redis.",
        )
        self.file_trouble = made.readings(
            "file_trouble",
            "1 while a watched file says what cannot be used, and the last good state stays.",
            "file",
            act="1: the log says what is wrong with it. The certificate that is still in use will "
            "end some day.",
        )
        self.certificate_end = made.readings(
            "certificate_end_timestamp_seconds",
            "Unix time when a certificate that is in use ends: the one for clients (tls), the one "
            "that engines are shown (engine_tls).",
            "file",
            act="Ends soon: put a new one into its files, which are read as they change. If they "
            "have one, file_trouble says that it cannot be used.",
        )
        self.by_model = ByModel(made)
        self._histograms = (
            self.request_seconds,
            self.ttft_seconds,
            self.decode_first_byte_seconds,
            self.prefill_seconds,
            self.queue_seconds,
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
