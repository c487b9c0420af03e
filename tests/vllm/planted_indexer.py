"""A connector that leaves out the indexer's keys: a plugin of vLLM's, for the servers of one
test."""

from typing import Any

from engine_ext.common.types import Region


def register() -> None:
    from engine_ext.vllm import describe

    original = describe.regions

    def regions(kv_caches: Any, kv_cache_config: Any) -> list[Region]:
        found = original(kv_caches, kv_cache_config)
        return [region for region in found if "indexer" not in region.name]

    describe.regions = regions
