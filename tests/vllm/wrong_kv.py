"""Stock vLLM's NixlConnector, with KV that arrives wrong: `kv_connector_module_path` of a server.

No engine notices: the blocks are changed when a load has ended well. The file $DISAGG_WRONG_KV
holds "FAULT EACH [URL]": each load whose number is a multiple of EACH is changed.

    moved    each block is where the one before it belongs
    others   the blocks are those of the request before
    zeroed   the blocks are empty
    swapped  two requests have each other's blocks; the first one waits for the second
    early    the prefill engine, at URL, ends all leases at once, and has computed other prompts in
             the same blocks before this decode engine reads them
"""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

FILLERS = [[number] * 1900 for number in (1, 2)]
"""Prompts that fill the cache of a prefill engine of 66 blocks."""


class WrongKvConnector(NixlConnector):  # type: ignore[misc, unused-ignore] # vLLM is not installed
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._caches: list[torch.Tensor] = []
        self._blocks: dict[str, list[int]] = {}
        self._last: list[torch.Tensor] = []
        self._waiting: str | None = None
        self._loads = 0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        for cache in kv_caches.values():
            self._caches.append(cache.movedim(list(cache.shape).index(self._num_blocks), 0))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        params = request.kv_transfer_params or {}
        is_lent, returned = super().request_finished_all_groups(request, block_ids)
        if params.get("do_remote_decode") and self._fault()[0] == "early":
            self.connector_scheduler._reqs_need_send.pop(request.request_id, None)
            self.connector_scheduler._reqs_not_processed.add(request.request_id)
            is_lent = False
        return is_lent, returned

    def _fault(self) -> list[str]:
        return Path(os.environ["DISAGG_WRONG_KV"]).read_text().split()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        fault, each, *url = self._fault()
        loads = self._connector_metadata.reqs_to_recv.values()
        begins = any(meta.local_block_ids for meta in loads)
        if fault == "early" and begins and (self._loads + 1) % int(each) == 0:
            fill(*url)
        for request, meta in self._connector_metadata.reqs_to_recv.items():
            if meta.local_block_ids:  # else it only tells the prefill engine of an aborted one
                self._blocks[request] = list(meta.local_block_ids[0])
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in sorted(results.finished_recving & self._blocks.keys()):
            blocks, last = self._blocks[request], self._last
            self._last = [cache[blocks].clone() for cache in self._caches]
            fault, each, *_ = self._fault()
            self._loads += 1
            if self._waiting is not None:
                self._swap(blocks, self._blocks[self._waiting])
                results.finished_recving.add(self._waiting)
                self._waiting = None
            elif self._loads % int(each) or fault == "early":
                continue
            elif fault == "swapped":
                self._waiting = request
                results.finished_recving.discard(request)
            elif fault == "others":
                for cache, others in zip(self._caches, last, strict=False):
                    count = min(len(blocks), len(others))
                    cache[blocks[:count]] = others[:count]
            else:
                for cache in self._caches:
                    cache[blocks] = 0 if fault == "zeroed" else cache[blocks].roll(1, 0)
        return results

    def _swap(self, one: list[int], other: list[int]) -> None:
        count = min(len(one), len(other))
        for cache in self._caches:
            held = cache[one[:count]].clone()
            cache[one[:count]] = cache[other[:count]]
            cache[other[:count]] = held


def fill(url: str) -> None:
    """Let an engine compute FILLERS."""
    for prompt in FILLERS:
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}).encode()
        asked = urllib.request.Request(
            f"{url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()
