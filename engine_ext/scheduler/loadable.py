"""How many of a request's leading tokens can be loaded from a remote: pure arithmetic.

Of its prompt, and of what was generated elsewhere where it begins in mid-answer.
"""

import logging
from collections.abc import Sequence

from engine_ext.common.config import ConnectorConfig
from engine_ext.common.prefix_hashes import PrefixHashes, UnusableHashes
from engine_ext.common.types import STATE, CacheGeometry, EngineRequest, RemoteSource, first_seen
from engine_ext.layout.plan import without_holes
from engine_ext.scheduler.params import TransferRole

logger = logging.getLogger(__name__)


class Loadable:
    def __init__(self, config: ConnectorConfig, geometry: CacheGeometry) -> None:
        self._config = config
        self._block_size = geometry.block_size
        self._windows: Sequence[int | None] = geometry.group_windows
        self._has_state = geometry.has_state
        self._lookahead = geometry.lookahead
        self._may_load = geometry.may_load

    def most_tokens(self, request: EngineRequest) -> int:
        """0 for a request whose KV depends on what nobody can tell, and where nothing is loaded.

        A host that has all of them computes the last one again. Where a group has a window,
        vLLM's block manager has by then given up the block in which that token's window begins, if
        it begins at the end of one; so the last token is left to compute. A state that knows the
        last token would count it twice. And where KV depends on tokens to come, more is computed
        again: those that the remote had guessed, or sampled, are not these."""
        return self._most_of(len(request.token_ids)) if self._loads(request) else 0

    def _loads(self, request: EngineRequest) -> bool:
        return self._may_load and request.content_keys is not None

    def _most_of(self, num_tokens: int) -> int:
        has_windows = any(window is not None for window in self._windows)
        num_left = self._lookahead if self._lookahead > 1 else has_windows
        return max(0, num_tokens - num_left)

    def tokens(
        self,
        request: EngineRequest,
        role: TransferRole,
        source: RemoteSource,
        proof: PrefixHashes | UnusableHashes,
        unix_time: float,
    ) -> int:
        """Tokens from position 0 whose KV the remote's blocks hold, and which are this request's,
        or may be, where there is no proof and the remote may be a stock engine."""
        if role is TransferRole.PREFILL and not self._may_pull_turn(source, proof, unix_time):
            return 0
        if not self._loads(request):
            return 0
        token_ids = request.token_ids  # asked for once: a host may copy them
        held = min(self._held_tokens(source), len(token_ids))
        shared = min(held, self._proven_tokens(request, token_ids, proof, held))
        most = self._most_of(len(token_ids))
        if shared < len(token_ids):
            most = min(most, shared - self._lookahead)
        tokens = max(0, min(shared, most))
        is_there = self._windows_reach(source, tokens) and self._state_is_of(source, tokens)
        return tokens if is_there else 0

    @staticmethod
    def _proven_tokens(
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
        proven = proof.count_verified_tokens(token_ids, keys)
        if proven < held:
            logger.info(
                "request %s: %d of %d remote tokens are this request's",
                request.request_id,
                proven,
                held,
            )
        return proven

    def _held_tokens(self, source: RemoteSource) -> int:
        """At most what the remote's lists can hold. Groups with a window list only its end; a peer
        that does not tell its block size is taken to have ours."""
        groups = zip(source.block_ids, self._windows, strict=False)
        lengths = [len(ids) for ids, window in groups if window is None]
        if not lengths:
            return source.num_tokens or 0
        held = min(lengths) * (source.block_size or self._block_size)
        return held if source.num_tokens is None else min(held, source.num_tokens)

    def _windows_reach(self, source: RemoteSource, num_tokens: int) -> bool:
        """Whether the remote keeps what the token behind `num_tokens` sees through a window, and
        all else of our blocks in which that is: its lists end with its own last token, which it has
        to name, and it may have gone further than we can follow."""
        if source.num_tokens is None:
            return all(window is None for window in self._windows)
        block_size = source.block_size or self._block_size
        end = -(-source.num_tokens // block_size)
        kept = without_holes(source.block_ids, self._windows)
        return all(
            (end - len(ids)) * block_size <= self._block_start(first_seen(window, num_tokens))
            for ids, window in zip(kept, self._windows, strict=False)
            if window is not None and window != STATE
        )

    def _block_start(self, token: int) -> int:
        return token - token % self._block_size

    def _state_is_of(self, source: RemoteSource, num_tokens: int) -> bool:
        """A state is of all that the remote has computed: there is none of fewer tokens."""
        return not self._has_state or source.num_tokens == num_tokens

    def _may_pull_turn(
        self, source: RemoteSource, proof: PrefixHashes | UnusableHashes, unix_time: float
    ) -> bool:
        """Without proof it is the operator's word that counts, and only a stock engine is read."""
        if not self._config.bidirectional or self._has_state:
            return False
        if source.expires_at is not None and source.expires_at <= unix_time:
            return False
        return proof is not UnusableHashes.ABSENT or self._config.trust_unproven_prefix
