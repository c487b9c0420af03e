"""The capabilities of an engine: what its identity page and its answers show."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from router.fleet.kv_facts import (
    CONFIGURATION,
    KvFacts,
    cache_tokens_of_ranks,
    parse_kv_facts,
    rank_number,
    short_text,
)
from router.fleet.kv_protocol import KvPeer
from router.fleet.step_model import (
    StepModel,
    largest_of_ranks,
    step_limit_of_ranks,
    step_model_of_ranks,
)

# After this many answers without evidence of a capability it counts as missing.
MAX_ANSWERS_WITHOUT_EVIDENCE = 3
# The first release of vLLM that takes the ids of a chat's prompt.
RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})")
TAKES_TOKEN_IDS = (0, 31)
DP_RANK_MARK = "_dp"
DP_RANK = re.compile(DP_RANK_MARK + r"(\d{1,6})$")


class RankEndpoint(Struct, frozen=True):
    """The address at which a rank takes registrations for push and requests for loans. The names
    are those of fields of kv_transfer_params."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    pp_size: int = 1


def strip_dp_rank(engine_id: str) -> str:
    """Return the id without the data-parallel rank that vLLM appends to it."""
    return DP_RANK.sub("", engine_id) if DP_RANK_MARK in engine_id else engine_id


def dp_rank_of(engine_id: str) -> int | None:
    """Return the data-parallel rank; None for an engine without several ranks."""
    found = DP_RANK.search(engine_id)
    return None if found is None else int(found[1])


@dataclass(slots=True)
class EngineCapabilities:
    """The capabilities of one engine process. The fleet replaces them when the engine is lost,
    because another process may return at its address.

    None means unknown. The engine's identity page takes precedence over evidence from answers.
    """

    engine_id: str | None = None
    """The id in its kv_transfer_params, without the data-parallel rank."""
    verifies_prefix: bool = False
    """It proves which prefix of a prompt its KV covers."""
    streams_kv_params: bool | None = None
    """Its streams end with kv_transfer_params if the request asks for them."""
    retains_turns: bool | None = None
    """Its whole answers have kv_transfer_params if the request asks for them."""
    supports_threshold: bool | None = None
    """It knows `cache_hit_threshold` and rejects a request that would compute more."""
    supports_release: bool = False
    """It has POST /disagg/release, which frees KV that it holds for another engine."""
    is_identity_known: bool = False
    """It has answered the request for its identity page, maybe with 404."""
    lists_capabilities: bool = False
    """Its identity page lists capabilities."""
    has_turns: bool = False
    """It retains an answer's KV if asked to, pulls retained KV, and verifies what it pulls: by its
    own page."""
    lacks_turns: bool = False
    """It neither retains an answer's KV nor pulls another engine's: by its own page."""
    is_lack_logged: bool = False
    """`lacks_turns` was logged."""
    compatibility: str = ""
    """Engines with equal values can read each other's KV: a hash of the model, the KV layout and
    the connector's version, plus the version of our extension and the digest of the model's
    configuration if the engine has them. Empty if unknown, or if the engine's ranks differ."""
    supports_push: bool = False
    supports_hand_over: bool = False
    """It can hand over a first token that it sampled."""
    supports_resume: bool = False
    """It can continue an answer that another engine began."""
    takes_token_ids: bool = False
    """It reports token ids in its streams if asked to (`return_token_ids`), and computes ids
    instead of a chat's messages, as stock vLLM does."""
    reports_token_ids: bool = False
    """Its streams carry the ids of their tokens."""
    returns_preempted: bool = False
    """It returns an answer that it would have to preempt, for another engine to continue."""
    lacks_canary: bool = False
    """Its first tokens cannot be compared with those of decode engines: it refuses to report
    log-probabilities, or computes others than a decode engine does alone."""
    shares_kv_loads: bool = False
    """It loads remote KV once for several answers to one prompt."""
    reports_load_failures: bool = False
    """It reports the source and the reason of a failed KV load."""
    render_hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes of what engines must share to continue each other's answers, by its name."""
    lends: bool = False
    """Other engines can borrow prefixes of its cache."""
    borrows: bool = False
    """It can borrow a prefix from the holders that a leg names."""
    loan_scheme: str = ""
    """How it names the blocks of its cache, if it reports that."""
    loan_problem: str = ""
    """Why it lends no prefixes, if it reports that."""
    rank_endpoints: Mapping[int, RankEndpoint] = field(default_factory=dict)
    """By data-parallel rank."""
    kv_peer: KvPeer = field(default_factory=KvPeer)
    """The KV protocol of the engine, and its data."""
    kv: KvFacts = field(default_factory=KvFacts)
    """The facts that are compared with those of other engines."""
    cache_tokens: int = 0
    """Tokens that its KV cache in the accelerator holds; 0 if unknown."""
    step_model: StepModel | None = None
    """The time of its steps, None if unknown."""
    max_step_tokens: int = 0
    """The most prompt tokens that one step computes beside answers; 0 if unknown."""
    max_num_seqs: int = 0
    """The most requests that each rank runs at once; 0 if unknown."""
    step_limit: float = math.inf
    """The longest step in seconds that the engine allows beside answers."""
    trial_prefills: int = 0
    """Prompts that the router has sent as trials, with which the engine measures its steps. Each
    page without a step model allows one more."""
    _streams_without_params: int = 0
    _wholes_without_params: int = 0
    _answers_without_share: int = 0

    def note_engine_id(self, params: dict[str, object]) -> None:
        """Take the engine's id from the kv_transfer_params of its answer."""
        engine_id = params.get("remote_engine_id")
        self.engine_id = strip_dp_rank(engine_id) if isinstance(engine_id, str) else None

    def note_stream_params(self, has_params: bool) -> None:
        """A stream that was to end with kv_transfer_params has ended, with them or without."""
        if has_params:
            self.streams_kv_params, self._streams_without_params = True, 0
        elif self.streams_kv_params is None:
            self._streams_without_params += 1
            if self._streams_without_params >= MAX_ANSWERS_WITHOUT_EVIDENCE:
                self.streams_kv_params = False

    def note_whole_params(self, has_params: bool) -> None:
        """A whole answer that was to have kv_transfer_params has them, or has none."""
        if has_params:
            self.retains_turns, self._wholes_without_params = True, 0
        elif self.retains_turns is None:
            self._wholes_without_params += 1
            if self._wholes_without_params >= MAX_ANSWERS_WITHOUT_EVIDENCE:
                self.retains_turns = False

    def note_threshold_rejected(self) -> None:
        """The engine rejected a request because of its cache_hit_threshold."""
        self.supports_threshold = True

    def note_threshold_accepted(self, threshold: float, cached_share: float | None) -> bool:
        """The engine accepted a request with this threshold. `cached_share` is the cached part of
        the prompt, None if the answer did not report it.

        An engine that computed more than the threshold allows does not support it. Return True if
        the engine is only assumed not to, because several answers did not report their share; this
        is wrong if everything was cached.
        """
        if self.supports_threshold is not None:
            return False
        if cached_share is not None:
            if cached_share < threshold:
                self.supports_threshold = False
            return False
        self._answers_without_share += 1
        if self._answers_without_share < MAX_ANSWERS_WITHOUT_EVIDENCE:
            return False
        self.supports_threshold = False
        return True

    def note_identity(self, identity: dict[str, object]) -> None:
        """Apply an identity page, whose content may be anything."""
        self.kv = parse_kv_facts(identity)
        names = identity.get("capabilities")
        if isinstance(names, list | dict):
            self.lists_capabilities = True
            self.supports_threshold = "cache_hit_threshold" in names
            self.supports_release = "release" in names
            # Only our engines name prefix_proof; pages of others may not know the name "turns".
            self.has_turns = "prefix_proof" in names and "turns" in names
            self.lacks_turns = "prefix_proof" in names and "turns" not in names
            self.verifies_prefix = self.verifies_prefix or "prefix_proof" in names
            self.supports_hand_over = "hand_over" in names
            self.supports_resume = "begun" in names
            self.reports_token_ids = "tell_token_ids" in names
            self.shares_kv_loads = "shared_loads" in names
            self.returns_preempted = "hand_back" in names
            self.reports_load_failures = "load_failures" in names
            self.render_hashes = _texts_in(identity.get("renders"))
        versions = identity.get("versions")
        self.note_release({"version": versions.get("vllm")} if isinstance(versions, dict) else {})
        modes, ranks = identity.get("transfer_modes"), identity.get("ranks")
        if isinstance(modes, list):
            self.supports_push = "push" in modes
        if isinstance(ranks, list):
            self.cache_tokens = cache_tokens_of_ranks(ranks)
            self.step_model = step_model_of_ranks(ranks)
            self.trial_prefills = max(0, self.trial_prefills - 1)
            self.max_step_tokens = largest_of_ranks(ranks, "max_step_tokens")
            self.max_num_seqs = largest_of_ranks(ranks, "max_num_seqs")
            self.step_limit = step_limit_of_ranks(ranks)
            self.lends, self.borrows = (
                bool(ranks)
                and all(isinstance(rank, dict) and rank.get(name) is True for rank in ranks)
                for name in ("lends", "borrows")
            )
            maps = [rank for rank in ranks if isinstance(rank, dict)]
            schemes = {short_text(rank.get("loan_scheme")) for rank in maps}
            self.loan_scheme = schemes.pop() if len(schemes) == 1 else ""
            problems = [rank.get("loan_problem") for rank in ranks if isinstance(rank, dict)]
            self.loan_problem = next((why for why in problems if isinstance(why, str)), "")
            self.compatibility = _compatibility_of(ranks, identity.get("versions"))
            known = {rank_number(rank): rank_endpoint_in(rank) for rank in ranks}
            self.rank_endpoints = {rank: at for rank, at in known.items() if at is not None}

    def note_release(self, page: Mapping[str, object]) -> None:
        """Apply vLLM's page of its version."""
        version = page.get("version")
        found = RELEASE.match(version) if isinstance(version, str) else None
        self.takes_token_ids = found is not None and (
            (int(found[1]), int(found[2])) >= TAKES_TOKEN_IDS
        )

    def names_blocks_as(self, other: EngineCapabilities) -> bool:
        """Return True unless the two engines report different schemes: a loan needs equal names."""
        return "" in (self.loan_scheme, other.loan_scheme) or self.loan_scheme == other.loan_scheme

    def header_value(self, number: int) -> int:
        """Return what the header X-data-parallel-rank calls the rank with this number: vLLM counts
        the ranks behind one server from 0."""
        return number - min(self.rank_endpoints, default=0)

    def note_transfer_failed(self) -> None:
        """A transfer failed: another prefill engine may be at the address by now."""
        self.is_identity_known, self.rank_endpoints = False, {}

    def note_kv_params(self, params: Mapping[str, object]) -> None:
        """Take the kv_transfer_params of a prefill engine's answer, which are newer than its
        identity page."""
        mode, at = params.get("transfer_mode"), rank_endpoint_in(params)
        if isinstance(mode, str):
            self.supports_push = mode == "push"
        if at is not None:
            rank = dp_rank_of(at.remote_engine_id) or 0
            self.rank_endpoints = {**self.rank_endpoints, rank: at}


def rank_endpoint_in(params: object) -> RankEndpoint | None:
    """Return the endpoint if `params` has all of its fields with the right types."""
    try:
        return msgspec.convert(params, RankEndpoint)
    except msgspec.ValidationError:
        return None


def _texts_in(given: object) -> dict[str, str]:
    if not isinstance(given, Mapping):
        return {}
    return {name: text for name, text in given.items() if isinstance(text, str)}


def _compatibility_of(ranks: list[object], versions: object) -> str:
    """Engines with different versions of our extension reject each other, as do engines with
    different digests of the configuration."""
    known = [rank if isinstance(rank, dict) else {} for rank in ranks]
    hashes = [rank.get("compatibility_hash") for rank in known]
    digests = [_texts_in(rank.get("compatibility_factors")).get(CONFIGURATION) for rank in known]
    one = hashes[0] if hashes else None
    if not (isinstance(one, str) and one):
        return ""
    if any((hashes[0], digests[0]) != pair for pair in zip(hashes, digests, strict=True)):
        return ""
    extension = _texts_in(versions).get("extension")
    parts = ("extension", extension), (CONFIGURATION, digests[0])
    return " ".join([one, *(f"{name} {value}" for name, value in parts if value is not None)])
