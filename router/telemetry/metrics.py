"""The router's own metrics, with the prefix disagg_router_, in a registry of their own.

Labels are bounded: engines, groups and sources are those that exist, everything else comes from
small fixed sets. `docs/metrics.md` is generated from the texts here, and adds advice for operators.
"""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from router.telemetry.metric_types import MetricRegistry
from router.telemetry.request_metrics import RequestMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    def __init__(self) -> None:
        made = MetricRegistry()
        self.registry, self.described = made.collectors, made.described
        self.requests = RequestMetrics(made)
        self.workers = made.gauge("workers", "Worker processes whose metrics are in this answer.")
        self.workers.set(1)
        self.in_flight = made.gauge("requests_in_flight", "Requests in progress.")
        self.queue_depth = made.gauge("queue_depth", "Requests that wait for a slot at an engine.")
        self.refusals = made.local_counter(
            "refusals{reason}",
            "Requests and connections that the router's limits rejected.",
        )
        self.connections = made.gauge("client_connections", "Open client connections.")
        self.held_bodies = made.gauge("held_body_bytes", "Bytes of request bodies in memory.")
        self.held_answers = made.gauge(
            "held_answer_bytes",
            "Bytes of large answers in memory: held whole, or not yet read by clients.",
        )
        self.engine_in_flight = made.callback_gauge(
            "engine_requests_in_flight{role,engine}", "Request legs in progress at an engine."
        )
        self.engine_holding = made.callback_gauge(
            "engine_holding{role,engine}",
            "KV leases: requests whose KV an engine holds until a decode engine has read it.",
        )
        self.engine_healthy = made.callback_gauge(
            "engine_healthy{role,engine}", "1: healthy, 0: unhealthy, -1: not probed yet."
        )
        self.engine_draining = made.callback_gauge(
            "engine_draining{role,engine}",
            "1 while an engine is drained, else 0.",
        )
        self.engine_shares_id = made.callback_gauge(
            "engine_shares_id{role,engine}",
            "1 for each engine with the engine_id of another; else absent.",
        )
        self.engine_degraded = made.callback_gauge(
            "engine_degraded{role,engine,reason}",
            "1 for each healthy engine that exchanges KV with no engine of the other role, or "
            "shares its engine_id; else absent.",
        )
        self.engine_circuit = made.callback_gauge(
            "engine_circuit{role,engine}",
            "Circuit breaker of an engine. 0: closed, 1: half open (one request may try), 2: "
            "open (avoided after failures).",
        )
        self.engine_prefill_rate = made.callback_gauge(
            "engine_prefill_tokens_per_second{role,engine}",
            "Prompt tokens per second that an engine computes; absent until it has computed "
            "eight samples of 8,192 tokens or more.",
        )
        self.engine_preferred_role = made.callback_gauge(
            "engine_preferred_role{group,engine,preferred,reason}",
            "1 for each available engine of both roles, by the legs that it gets now: prefill, "
            "decode, or both (each request goes where it costs least). Absent if there is no "
            "choice.",
        )
        self.role_changes = made.callback_counter(
            "role_changes{group}",
            "How often an engine of both roles changed its preferred legs.",
        )
        self.engines_needed = made.callback_gauge(
            "engines_needed{group,role}",
            "Engines that the requests of this router need, by their measured speed. Engines of "
            "both roles count in both.",
        )
        self.warm_ups = made.counter(
            "warm_ups{outcome}", "Warm-up requests through new pairs of engines."
        )
        self.load_failures = made.local_counter(
            "kv_load_failures{scope}",
            "KV loads that decode engines reported as failed. pair: the two engines cannot "
            "exchange KV; request: this request's KV was gone.",
        )
        self.kv_canary = made.local_counter(
            "kv_canary{outcome}",
            "First tokens of decode engines, compared with those of their prefill engines. "
            "disagreed: the KV was wrong, and the request was computed again. not_comparable: "
            "an engine did not report enough. engines_differ: the decode engine disagreed "
            "without transferred KV, too.",
        )
        self.kv_canary.add(("disagreed",), 0)  # or its first increase would not be one
        self.pair_avoided = made.callback_gauge(
            "pair_avoided{prefiller,decoder}",
            "1 for two engines that could not exchange KV, or exchanged wrong KV, and are not "
            "paired for a while; else absent.",
        )
        self.pair_rate = made.callback_gauge(
            "pair_bytes_per_second{source,target}",
            "KV bytes per second between two engines while blocks move; the slowest 256 pairs. "
            "The source is empty for a stock engine.",
        )
        self.pair_seconds = made.callback_gauge(
            "pair_transfer_seconds{source,target}",
            "Mean time of the last KV transfers between two engines, with the wait behind other "
            "transfers; the slowest 256 pairs.",
        )
        self.pair_slowness = made.callback_gauge(
            "pair_slowness{source,target}",
            "Median rate of neighbouring pairs, divided by the rate of this pair. Only pairs "
            "below a third of that median, with transfers more than three times as long, have a "
            "sample.",
        )
        self.group_engines = made.callback_gauge(
            "group_engines{group,role}", "Usable engines of a group."
        )
        self.group_weight = made.callback_gauge(
            "group_weight{group}",
            "Share of requests that a group gets, relative to other groups; set by operators "
            "and lists of engines.",
        )
        self.source_engines = made.callback_gauge(
            "source_engines{source}", "Engines in the last list of a discovery source."
        )
        self.source_trouble = made.callback_gauge(
            "source_trouble{source}",
            "1 while a discovery source returns no list or an incomplete one, else 0.",
        )
        self.source_told = made.callback_gauge(
            "source_told_timestamp_seconds{source}",
            "Unix time of a discovery source's last list.",
        )
        self.fleet_changes = made.callback_counter(
            "fleet_changes{change}", "Engines that were added, removed or changed."
        )
        self.upstream_errors = made.counter(
            "upstream_errors{role,kind}", "Failed request legs, by kind."
        )
        self.retries = made.counter(
            "retries{role,kind}", "Failed request legs that the router retried."
        )
        self.client_disconnects = made.counter(
            "client_disconnects{stage}",
            "Clients that disconnected before the end of their answer, by stage.",
        )
        self.prefill_without_params = made.counter(
            "prefill_without_params",
            "Prefill answers without kv_transfer_params: the decode engine computed the prompt "
            "again.",
        )
        self.decode_only = made.counter(
            "decode_only{reason}", "Requests that a decode engine served alone."
        )
        self.conversation_entries = made.gauge("conversation_entries", "Turns in the memory store.")
        self.conversation_store_errors = made.counter(
            "conversation_store_errors{operation,result}",
            "Operations on the conversation store that failed, were skipped after a failure, or "
            "found a wrong signature.",
        )
        self.resumes = made.local_counter(
            "resumes{kind,outcome}",
            "Streams whose decode engine failed in mid-stream, and answers that one returned for "
            "lack of KV blocks (preempted), by outcome.",
        )
        self.handed_over = made.local_counter(
            "handed_over{outcome}",
            "First tokens that a prefill engine sampled and could hand over.",
        )
        self.loans = made.local_counter(
            "prefix_loans{outcome}",
            "Request legs whose engine could borrow from other engines' prefix caches. cached: "
            "the engine's own cache held the prefix by then.",
        )
        self.loan_tokens = made.local_counter(
            "prefix_loan_tokens",
            "Prompt tokens that engines borrowed instead of computing them.",
        )
        self.loan_tokens.add((), 0)
        self.decode_first = made.local_counter(
            "decode_first{outcome}", "Requests that were sent to a decode engine first."
        )
        self.scattered = made.local_counter(
            "scattered{outcome}",
            "Legs of hedged requests. All legs except won are additional load.",
        )
        self.releases = made.counter(
            "releases{outcome}",
            "Prefill KV that the router released before a decode engine read it.",
        )
        self.unauthorized = made.local_counter(
            "unauthorized{reason}",
            "Requests without an API key, or with an unknown one.",
        )
        self.tls_failures = made.local_counter(
            "tls_failures{reason}", "Failed TLS handshakes of clients."
        )
        self.rate_limited = made.counter(
            "rate_limited{key,limit}",
            "Requests that a limit of their API key rejected.",
        )
        self.key_limit_errors = made.counter(
            "key_limit_errors{operation,result}",
            "Operations on the Redis of the keys' limits that failed or were skipped after a "
            "failure.",
        )
        self.peer_routers = made.gauge(
            "peer_routers", "Other routers and workers whose load this one takes into account."
        )
        self.peer_exchange_errors = made.counter(
            "peer_exchange_errors{operation,result}",
            "Exchanges of load with other routers or workers that failed, were skipped after a "
            "failure, or found an invalid report.",
        )
        self.file_trouble = made.callback_gauge(
            "file_trouble{file}",
            "1 while a watched file is unusable and its last usable content stays in force.",
        )
        self.certificate_end = made.callback_gauge(
            "certificate_end_timestamp_seconds{file}",
            "Unix time when a certificate in use expires: tls for clients, engine_tls for engines.",
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
