"""What an engine's own answers have shown about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# Answers that could have shown something and did not, before it is taken for absent.
ENOUGH = 3
RANKED = "_dp"
DP_RANK = re.compile(RANKED + r"(\d{1,6})$")


class RankEndpoint(NamedTuple):
    """Where a rank of a prefiller takes registrations, in the words of kv_transfer_params."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    pp_size: int


def strip_dp_rank(engine_id: str) -> str:
    """The id without the data-parallel rank that vLLM appends to it."""
    return DP_RANK.sub("", engine_id) if RANKED in engine_id else engine_id


def dp_rank_of(engine_id: str) -> int | None:
    """The data-parallel rank; None where there is but one."""
    found = DP_RANK.search(engine_id)
    return None if found is None else int(found[1])


@dataclass(slots=True)
class EngineCapabilities:
    """Forgotten when the engine is lost: another one may come back at its address.

    None means not known. Flows note what they see; the prober asks for the engine's own word (GET
    /disagg/identity), which no answer overrules.
    """

    engine_id: str | None = None
    verifies_prefix: bool = False
    streams_kv_params: bool | None = None
    supports_threshold: bool | None = None
    supports_release: bool = False
    """It has POST /disagg/release, which frees what it keeps for another engine."""
    is_identity_known: bool = False
    lists_capabilities: bool = False
    lacks_turns: bool = False
    """It has said so: it does not keep an answer's KV, nor pull another's."""
    is_lack_logged: bool = False
    """Of that the log has a line."""
    transfer_modes: frozenset[str] | None = None
    compatibility: str = ""
    """What two engines must have in common to read each other's KV: a hash of the model, how it is
    laid out and the connector's version, and the version of our extension, where it has it. Empty
    where it does not say, or its ranks differ."""
    supports_push: bool = False
    """It has said so."""
    supports_hand_over: bool = False
    supports_resume: bool = False
    """It goes on from what another has sampled."""
    reports_token_ids: bool = False
    """Of a stream, the ids of the tokens that it says."""
    returns_preempted: bool = False
    """It ends what it would have to preempt, for another to go on. All four: it has said so."""
    shares_kv_loads: bool = False
    """Of several answers to one prompt it reads the remote KV once. It has said so."""
    reports_load_failures: bool = False
    """It says of a load that failed from whom, and why. It has said so."""
    render_hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes of what two engines must share for that: by the name of it."""
    rank_endpoints: Mapping[int, RankEndpoint] = field(default_factory=dict)
    """For push: by data-parallel rank."""
    _bare_streams: int = 0
    _bare_accepts: int = 0

    def note_engine_id(self, params: dict[str, object]) -> None:
        engine_id = params.get("remote_engine_id")
        self.engine_id = strip_dp_rank(engine_id) if isinstance(engine_id, str) else None

    def note_stream_params(self, has_params: bool) -> None:
        """Whether a stream that was to bring params brought them."""
        if has_params:
            self.streams_kv_params, self._bare_streams = True, 0
        elif self.streams_kv_params is None:
            self._bare_streams += 1
            if self._bare_streams >= ENOUGH:
                self.streams_kv_params = False

    def note_threshold_rejected(self) -> None:
        self.supports_threshold = True

    def note_threshold_accepted(self, threshold: float, cached_share: float | None) -> bool:
        """An engine that computed more than it was allowed to does not know the field.

        Nor does one whose answers never tell how much that was: True when it is taken for that,
        which may be wrong, if its cache had it all.
        """
        if self.supports_threshold is not None:
            return False
        if cached_share is not None:
            if cached_share < threshold:
                self.supports_threshold = False
            return False
        self._bare_accepts += 1
        if self._bare_accepts < ENOUGH:
            return False
        self.supports_threshold = False
        return True

    def note_identity(self, identity: dict[str, object]) -> None:
        capabilities = identity.get("capabilities")
        if isinstance(capabilities, list | dict):
            self.lists_capabilities = True
            self.supports_threshold = "cache_hit_threshold" in capabilities
            self.supports_release = "release" in capabilities
            # Ours alone name what they prove; others' pages may know no turns by that name.
            self.lacks_turns = "prefix_proof" in capabilities and "turns" not in capabilities
            self.verifies_prefix = self.verifies_prefix or "prefix_proof" in capabilities
            self.supports_hand_over = "hand_over" in capabilities
            self.supports_resume = "begun" in capabilities
            self.reports_token_ids = "tell_token_ids" in capabilities
            self.shares_kv_loads = "shared_loads" in capabilities
            self.returns_preempted = "hand_back" in capabilities
            self.reports_load_failures = "load_failures" in capabilities
            self.render_hashes = _texts_in(identity.get("renders"))
        modes, ranks = identity.get("transfer_modes"), identity.get("ranks")
        if isinstance(modes, list):
            self._note_modes(mode for mode in modes if isinstance(mode, str))
        if isinstance(ranks, list):
            self.compatibility = _compatibility_of(ranks, identity.get("versions"))
            known = {_rank_of(rank): rank_endpoint_in(rank) for rank in ranks}
            self.rank_endpoints = {rank: at for rank, at in known.items() if at is not None}

    def note_push_failed(self) -> None:
        """A push failed: the prefiller may be another by now, somewhere else."""
        self.is_identity_known, self.rank_endpoints = False, {}

    def note_kv_params(self, params: Mapping[str, object]) -> None:
        """What a prefiller's own kv_transfer_params say; they are newer than its page."""
        mode, at = params.get("transfer_mode"), rank_endpoint_in(params)
        if isinstance(mode, str):
            self._note_modes((mode,))
        if at is not None:
            self.rank_endpoints = {**self.rank_endpoints, dp_rank_of(at.remote_engine_id) or 0: at}

    def _note_modes(self, modes: Iterable[str]) -> None:
        self.transfer_modes = frozenset(modes)
        self.supports_push = "push" in self.transfer_modes


def rank_endpoint_in(params: object) -> RankEndpoint | None:
    """Of a dict that has them all, rightly typed."""
    if not isinstance(params, Mapping):
        return None
    given = [params.get(name) for name in ("remote_engine_id", "remote_host", "remote_port")]
    match given, params.get("tp_size", 1), params.get("pp_size", 1):
        case [str() as engine_id, str() as host, int() as port], int() as tp, int() as pp:
            return RankEndpoint(engine_id, host, port, tp, pp)
    return None


def _texts_in(given: object) -> dict[str, str]:
    if not isinstance(given, Mapping):
        return {}
    return {name: text for name, text in given.items() if isinstance(text, str)}


def _compatibility_of(ranks: list[object], versions: object) -> str:
    """Engines with two versions of our extension refuse each other."""
    hashes = {rank.get("compatibility_hash") if isinstance(rank, dict) else None for rank in ranks}
    extension = _texts_in(versions).get("extension")
    match list(hashes):
        case [str() as one] if one:
            return one if extension is None else f"{one} extension {extension}"
    return ""


def _rank_of(rank: object) -> int:
    number = rank.get("dp_rank", 0) if isinstance(rank, dict) else 0
    return number if type(number) is int else 0
