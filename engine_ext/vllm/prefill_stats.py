"""How much of a begun request's prompt was computed, cached or loaded.

vLLM asserts that what is at hand when a request is first scheduled is prompt. Of a begun request it
may be more; so it finds no statistics to fill in, and these are filled in by our scheduler class.
"""

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request


class BegunPrefillStats(PrefillStats):
    num_loading = 0

    def __bool__(self) -> bool:
        """vLLM fills in what is true."""
        return False

    def note_loading(self, num_tokens: int) -> None:
        """They come from a remote. Called by the connector, which has no need of this class."""
        self.num_loading = num_tokens

    @staticmethod
    def note_scheduled(request: Request, num_computed_tokens: int) -> None:
        stats = request.prefill_stats
        if isinstance(stats, BegunPrefillStats):
            at_hand = min(num_computed_tokens, request.num_prompt_tokens)
            loaded = min(stats.num_loading, at_hand)
            stats.set(request.num_prompt_tokens, at_hand - loaded, loaded)
