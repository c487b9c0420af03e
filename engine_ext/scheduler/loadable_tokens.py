"""How many leading tokens of a request can be loaded from a remote engine: pure arithmetic. The
tokens are the prompt's and, for a resumed answer, those that another engine has generated.
"""

import logging
from collections.abc import Sequence

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.log_rate_limit import LogRateLimit
from engine_ext.common.prefix_hashes import PrefixHashes, UnusableHashes
from engine_ext.common.types import STATE, CacheGeometry, EngineRequest, RemoteSource, first_seen
from engine_ext.layout.plan import without_holes
from engine_ext.scheduler.params import TransferRole

logger = logging.getLogger(__name__)
logger.addFilter(LogRateLimit())


class LoadableTokens:
    """The limits that the cache's geometry and the settings put on loads."""

    def __init__(self, config: ConnectorConfig, geometry: CacheGeometry) -> None:
        self._config = config
        self._geometry = geometry
        self._windows: Sequence[int | None] = geometry.group_windows
        self._has_state = geometry.has_state
        self._lookahead = geometry.lookahead
        self._may_load = geometry.may_load

    def limit(self, request: EngineRequest) -> int:
        """Return the most tokens that may be loaded for the request.

        It is 0 if the KV depends on content without a name, or if the engine loads nothing. A host
        that has the KV of all tokens computes the last one again. Three cases need more care:

        * Groups with a window: vLLM's block manager has freed the block in which the last token's
          window begins, if it begins at the end of a block. So the last token is not loaded.
        * A state that includes the last token would count it twice.
        * KV that depends on later tokens (`lookahead`): more tokens are computed again, because the
          remote used the tokens that it had drafted or sampled.
        """
        return self._most_of(len(request.token_ids)) if self._may_load_for(request) else 0

    def _may_load_for(self, request: EngineRequest) -> bool:
        return self._may_load and request.content_keys is not None

    def _most_of(self, num_tokens: int) -> int:
        has_windows = any(window is not None for window in self._windows)
        num_left = self._lookahead if self._lookahead > 1 else has_windows
        return max(0, num_tokens - num_left)

    def count(
        self,
        request: EngineRequest,
        role: TransferRole,
        source: RemoteSource,
        proof: PrefixHashes | UnusableHashes,
        unix_time: float,
    ) -> int:
        """Return how many tokens from position 0 can be loaded from the remote's blocks.

        They are verified to be this request's, except for a stock engine, which sends no hashes.
        """
        if role is TransferRole.PREFILL and not self._may_pull_turn(source, proof, unix_time):
            return 0
        if not self._may_load_for(request):
            return 0
        token_ids = request.token_ids  # read once, because a host may copy them
        held = min(self._count_held(source), len(token_ids))
        shared = min(held, self._count_verified(request, token_ids, proof, held))
        most = self._most_of(len(token_ids))
        if shared < len(token_ids):
            most = min(most, shared - self._lookahead)
        tokens = max(0, min(shared, most))
        is_usable = self._holds_windows(source, tokens) and self._has_state_at(source, tokens)
        return tokens if is_usable else 0

    @staticmethod
    def _count_verified(
        request: EngineRequest,
        token_ids: Sequence[int],
        proof: PrefixHashes | UnusableHashes,
        held: int,
    ) -> int:
        if proof is UnusableHashes.ABSENT:
            return held
        keys = request.content_keys
        if isinstance(proof, UnusableHashes) or keys is None:
            return 0
        verified = proof.count_verified_tokens(token_ids, keys)
        if verified < held:
            logger.info(
                "request %s: %d of %d remote tokens are this request's",
                request.request_id,
                verified,
                held,
            )
        return verified

    def _count_held(self, source: RemoteSource) -> int:
        """Return the most tokens that the remote's block lists can hold. Groups with a window list
        only its end."""
        groups = zip(source.block_ids, self._windows, self._block_sizes_of(source), strict=False)
        lengths = [len(ids) * size for ids, window, size in groups if window is None]
        if not lengths:
            return source.num_tokens or 0
        held = min(lengths)
        return held if source.num_tokens is None else min(held, source.num_tokens)

    def _block_sizes_of(self, source: RemoteSource) -> Sequence[int]:
        """Return the tokens of a remote block, by group. A peer that does not send its block size
        is taken to have ours, as one whose groups differ has: the handshake compares them."""
        if source.block_size is None or self._geometry.group_block_sizes:
            return self._geometry.block_sizes
        return (source.block_size,) * len(self._windows)

    def _holds_windows(self, source: RemoteSource, num_tokens: int) -> bool:
        """Return True if the remote's blocks cover the windows of the token behind `num_tokens`,
        and the rest of our blocks in which they lie. The remote's lists end with its own last
        token, which it must name; it may be further ahead than we can use."""
        if source.num_tokens is None:
            return all(window is None for window in self._windows)
        kept = without_holes(source.block_ids, self._windows)
        sizes = zip(self._block_sizes_of(source), self._geometry.block_sizes, strict=True)
        return all(
            (-(-source.num_tokens // theirs) - len(ids)) * theirs
            <= first_seen(window, num_tokens) // ours * ours
            for ids, window, (theirs, ours) in zip(kept, self._windows, sizes, strict=False)
            if window is not None and window != STATE
        )

    def _has_state_at(self, source: RemoteSource, num_tokens: int) -> bool:
        """Return True if the remote's state can be used for so many tokens. A state includes all
        tokens that the remote has computed."""
        return not self._has_state or source.num_tokens == num_tokens

    def _may_pull_turn(
        self, source: RemoteSource, proof: PrefixHashes | UnusableHashes, unix_time: float
    ) -> bool:
        """Return True if a retained turn may be read. Without hashes it may be read only from a
        stock engine, and if the operator trusts it (trust_unproven_prefix)."""
        if not self._config.bidirectional or self._has_state:
            return False
        if source.expires_at is not None and source.expires_at <= unix_time:
            logger.warning(
                "request %s at engine %s: this turn's time ended %.0f s ago by this machine's "
                "clock, so its tokens are computed. If all turns of an engine end early, the "
                "clocks of the two machines differ",
                source.request_id,
                source.address.engine_id,
                unix_time - source.expires_at,
            )
            return False
        return proof is not UnusableHashes.ABSENT or self._config.trust_unproven_prefix
