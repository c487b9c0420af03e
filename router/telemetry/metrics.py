"""The router's own metrics, with the prefix disagg_router_, in a registry of their own.

Labels are bounded: engines, groups and sources are those that exist, everything else comes from
small fixed sets. `docs/metrics.md` is generated from the texts here.
"""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from router.telemetry.request_metrics import MetricRegistry, RequestMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    def __init__(self) -> None:
        made = MetricRegistry()
        self.registry, self.described = made.collectors, made.described
        self.requests = RequestMetrics(made)
        self.workers = made.gauge(
            "workers",
            "Worker processes whose metrics are in this answer.",
            "Fewer than --workers: worker processes died or do not answer. The log has the reason.",
        )
        self.workers.set(1)
        self.in_flight = made.gauge(
            "requests_in_flight",
            "Requests in progress.",
            "This is the load. If it grows at an unchanged request rate, engines became slower.",
        )
        self.queue_depth = made.gauge(
            "queue_depth",
            "Requests that wait for a slot at an engine.",
            "Above 0 for long: engines are full. Add engines, or admit fewer requests.",
        )
        self.refusals = made.local_counter(
            "refusals{reason}",
            "Requests and connections that the router rejected because of its own limits.",
            "docs/admission.md explains each reason and the setting behind it.",
        )
        self.connections = made.gauge(
            "client_connections",
            "Open client connections.",
            "Near --max-connections the router rejects new ones: raise it, or add routers.",
        )
        self.held_bodies = made.gauge(
            "held_body_bytes",
            "Bytes of request bodies in memory.",
            "Near --max-held-bodies the router rejects uploads: raise it if there is memory.",
        )
        self.held_answers = made.gauge(
            "held_answer_bytes",
            "Bytes of large answers in memory: held whole, or not yet read by clients.",
            "Near --max-held-answers the router rejects large answers: raise it if there is "
            "memory, or find the clients that do not read.",
        )
        self.engine_in_flight = made.callback_gauge(
            "engine_requests_in_flight{role,engine}",
            "Request legs in progress at an engine.",
            "One engine has far more than its peers: a policy prefers it, or it hangs.",
        )
        self.engine_holding = made.callback_gauge(
            "engine_holding{role,engine}",
            "Requests whose KV an engine holds until a decode engine has read it.",
            "It grows if decode engines do not fetch prefilled KV: look at decode errors.",
        )
        self.engine_healthy = made.callback_gauge(
            "engine_healthy{role,engine}",
            "1: healthy, 0: unhealthy, -1: not probed yet.",
            "0: the log has the probe's result. Meanwhile the router uses other engines.",
        )
        self.engine_draining = made.callback_gauge(
            "engine_draining{role,engine}",
            "1 while an engine is drained and gets no new requests, else 0.",
            "1 for long: a drain was not ended, or the engine's pod does not stop.",
        )
        self.engine_shares_id = made.callback_gauge(
            "engine_shares_id{role,engine}",
            "1 for each engine whose engine_id another engine has as well; absent for others.",
            "No KV moves between the two engines, which the log names. Give each engine its own "
            "engine_id.",
        )
        self.engine_circuit = made.callback_gauge(
            "engine_circuit{role,engine}",
            "Circuit breaker of an engine. 0: closed, 1: half open (one request may try), 2: open "
            "(the router avoids the engine after failures).",
            "2: requests failed in a row, and upstream_errors has the kind of failure. The router "
            "tries the engine again after a while.",
        )
        self.warm_ups = made.counter(
            "warm_ups{outcome}",
            "Warm-up requests through new pairs of engines, by outcome.",
            "failed: two engines cannot reach each other's KV. Look at their logs and at the "
            "network between them.",
        )
        self.load_failures = made.local_counter(
            "kv_load_failures{scope}",
            "KV loads that decode engines reported as failed. pair: the two engines cannot "
            "exchange KV; request: only this request's KV was gone.",
            "pair: see pair_avoided. request, and many: leases end before decode engines read; "
            "look at their queues.",
        )
        self.pair_avoided = made.callback_gauge(
            "pair_avoided{prefiller,decoder}",
            "1 for a prefill and a decode engine that could not exchange KV and are paired with "
            "other engines for a while; absent otherwise.",
            "The log has the reason. Look at the network between the two engines. The router tries "
            "the pair again after a while.",
        )
        self.group_engines = made.callback_gauge(
            "group_engines{group,role}",
            "Usable engines of a group.",
            "0 for a role: the group cannot serve disaggregated requests.",
        )
        self.group_weight = made.callback_gauge(
            "group_weight{group}",
            "Share of requests that a group gets, relative to other groups.",
            "Only operators and lists of engines change it.",
        )
        self.source_engines = made.callback_gauge(
            "source_engines{source}",
            "Engines in the last list that a discovery source returned.",
            "It falls without a rollout: the source lost pods, names or lines.",
        )
        self.source_trouble = made.callback_gauge(
            "source_trouble{source}",
            "1 while a discovery source returns no list or an incomplete one, else 0.",
            "1: the router keeps the source's engines as they were. The log has the reason.",
        )
        self.source_told = made.callback_gauge(
            "source_told_timestamp_seconds{source}",
            "Unix time when a discovery source last returned its list.",
            "Too long ago: the list of engines may be outdated; look at source_trouble.",
        )
        self.fleet_changes = made.callback_counter(
            "fleet_changes{change}",
            "Engines that were added, removed or changed.",
            "Many without a rollout: engines come and go, or a source is unreliable.",
        )
        self.upstream_errors = made.counter(
            "upstream_errors{role,kind}",
            "Failed request legs, by kind of failure.",
            "docs/reliability.md explains each kind. If one engine fails, look at its log; if all "
            "fail, look at the network.",
        )
        self.retries = made.counter(
            "retries{role,kind}",
            "Failed request legs that the router retried, by kind of failure.",
            "Engines fail, though clients do not notice yet. docs/reliability.md explains each "
            "kind.",
        )
        self.client_disconnects = made.counter(
            "client_disconnects{stage}",
            "Clients that disconnected before the end of their answer, by stage of the request.",
            "Many at prefill or queue: clients do not wait that long, see "
            "time_to_first_byte_seconds.",
        )
        self.prefill_without_params = made.counter(
            "prefill_without_params",
            "Prefill answers without kv_transfer_params: the decode engine computed the prompt "
            "again.",
            "Prefill engines run without a KV connector, or with another one: no KV moves.",
        )
        self.decode_only = made.counter(
            "decode_only{reason}",
            "Requests that a decode engine served alone.",
            "no_prefiller: no prefill engine is usable. no_pair: see pair_avoided. "
            "docs/reliability.md explains the other reasons, which depend on the request.",
        )
        self.conversation_turns = made.local_counter(
            "conversation_turns{outcome,reason}",
            "Turns of conversations, by whether the last turn's KV was reused, and why not.",
            "docs/conversations.md explains each outcome and reason. Hits fall if decode engines "
            "drop retained KV too early, or if clients edit earlier messages.",
        )
        self.conversation_tokens = made.local_counter(
            "conversation_tokens_offered",
            "Tokens of last turns that prefill engines could pull from decode engines.",
            "These tokens need not be computed again. It falls with the hits of "
            "conversation_turns.",
        )
        self.conversation_tokens.add((), 0)  # the sample exists from the start
        self.conversation_kept = made.local_counter(
            "conversation_kept{outcome}",
            "Finished turns, by whether they left KV for the next turn.",
            "not_offered: decode engines run without bidirectional_kv_xfer. not_kept: the store "
            "failed.",
        )
        self.conversation_entries = made.gauge(
            "conversation_entries",
            "Turns in the memory store.",
            "At its limit the router drops the oldest turns: raise --conversation-max-entries if "
            "there is memory.",
        )
        self.conversation_store_errors = made.counter(
            "conversation_store_errors{operation,result}",
            "Operations on the conversation store that failed, that were skipped after a failure, "
            "or that found an entry with a wrong signature.",
            "The shared store is slow, gone or used with another key. Meanwhile the router serves "
            "turns without reuse.",
        )
        self.resumes = made.local_counter(
            "resumes{kind,outcome}",
            "Streams whose decode engine failed in mid-stream, by kind of failure and outcome. "
            "preempted: answers of all kinds that a decode engine returned for lack of KV blocks.",
            "resumed: the client noticed nothing, but a decode engine failed, or had too few "
            "blocks (preempted: add KV cache, or run fewer requests at once). Other outcomes ended "
            "with an error event; docs/mid-answer.md lists the reasons.",
        )
        self.handed_over = made.local_counter(
            "handed_over{outcome}",
            "First tokens that a prefill engine sampled and could hand over, by outcome.",
            "rendering_differs, no_token and refused: the decode engine samples the token again. "
            "rendering_differs: the engines of a pair render differently, see the log. no_token: a "
            "capable prefill engine sent no token or an invalid one. refused: a decode engine "
            "rejected the token, and the request starts again.",
        )
        self.decode_first = made.local_counter(
            "decode_first{outcome}",
            "Requests that were sent to a decode engine first, by outcome.",
            "Many rejected: caches of decode engines hold less than the threshold; lower or "
            "remove it.",
        )
        self.scattered = made.local_counter(
            "scattered{outcome}",
            "Legs of hedged requests, by outcome. All legs except won are additional load.",
            "Many rejected and few won: caches hold less than the threshold. stopped: several "
            "engines accepted, and the router stopped all but the first.",
        )
        self.releases = made.counter(
            "releases{outcome}",
            "Prefill KV that the router released before a decode engine read it, by outcome.",
            "failed: engines keep the blocks until the leases end, so prefill engines may run out "
            "of blocks.",
        )
        self.unauthorized = made.local_counter(
            "unauthorized{reason}",
            "Requests without an API key, or with a key that is not in the file.",
            "incorrect, and many: a client uses an old key, or guesses. The access log has the "
            "requests.",
        )
        self.tls_failures = made.local_counter(
            "tls_failures{reason}",
            "Failed TLS handshakes of clients.",
            "refused, and many: clients do not trust the certificate's CA, present no certificate "
            "of their own, or do not use TLS. timeout: they connect and send nothing. "
            "disconnected: often the health checks of a load balancer.",
        )
        self.rate_limited = made.counter(
            "rate_limited{key,limit}",
            "Requests that were rejected because of a limit of their API key.",
            "The key's owner sends more than the file allows: talk to them, or raise the limit.",
        )
        self.key_limit_errors = made.counter(
            "key_limit_errors{operation,result}",
            "Operations on the Redis that counts usage for keys' limits that failed, or were "
            "skipped after a failure.",
            "Meanwhile each router counts alone, so a key can use its limits at each router: look "
            "at Redis.",
        )
        self.file_trouble = made.callback_gauge(
            "file_trouble{file}",
            "1 while a watched file has unusable content and the last usable content stays in "
            "force.",
            "1: the log has the reason. A certificate that stays in use expires some day.",
        )
        self.certificate_end = made.callback_gauge(
            "certificate_end_timestamp_seconds{file}",
            "Unix time when a certificate in use expires: the one for clients (tls), or the one "
            "for engines (engine_tls).",
            "If it is close, replace the certificate's files; the router reads them when they "
            "change. If the files are already new, file_trouble shows that they are unusable.",
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
