"""What an engine's own answers have shown about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Answers that could have shown something and did not, before it is taken for absent.
ENOUGH = 3
DP_RANK = re.compile(r"_dp\d+$")


def instance_of(engine_id: str) -> str:
    """The id without the data-parallel rank that vLLM appends to it."""
    return DP_RANK.sub("", engine_id)


@dataclass(slots=True)
class Learned:
    """Forgotten when the engine is lost: another one may come back at its address.

    None means not known. Flows note what they see; `wanted` asks the prober for the engine's own
    word (GET /disagg/identity), which no answer overrules.
    """

    engine_id: str | None = None
    proves_prefix: bool = False
    streams_params: bool | None = None
    knows_threshold: bool | None = None
    releases: bool = False
    """It has POST /disagg/release, which frees what it keeps for another engine."""
    wanted: bool = False
    asked: bool = False
    told: bool = False
    _bare_streams: int = 0
    _bare_accepts: int = 0

    def note_kept(self, params: dict[str, object]) -> None:
        engine_id = params.get("remote_engine_id")
        self.engine_id = instance_of(engine_id) if isinstance(engine_id, str) else None

    def note_stream(self, has_params: bool) -> None:
        """Whether a stream that was to bring params brought them."""
        if has_params:
            self.streams_params, self._bare_streams = True, 0
        elif self.streams_params is None:
            self._bare_streams += 1
            if self._bare_streams >= ENOUGH:
                self.streams_params = False

    def note_rejected(self) -> None:
        self.knows_threshold = True

    def note_accepted(self, threshold: float, cached_share: float | None) -> bool:
        """An engine that computed more than it was allowed to does not know the field.

        Nor does one whose answers never tell how much that was: True when it is taken for that,
        which may be wrong, if its cache had it all.
        """
        if self.knows_threshold is not None:
            return False
        if cached_share is not None:
            if cached_share < threshold:
                self.knows_threshold = False
            return False
        self._bare_accepts += 1
        if self._bare_accepts < ENOUGH:
            return False
        self.knows_threshold = False
        return True

    def note_identity(self, identity: dict[str, object]) -> None:
        capabilities = identity.get("capabilities")
        if isinstance(capabilities, list | dict):
            self.told = True
            self.knows_threshold = "cache_hit_threshold" in capabilities
            self.releases = "release" in capabilities
