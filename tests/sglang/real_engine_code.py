"""Runs in an environment with SGLang: judges legs with SGLang's own code.

Reads {"port": P, "legs": [{"path": ..., "body": ...}]} and writes, for each leg, the request that
SGLang's tokenizer makes of it. P is the port for SGLang's bootstrap server, in which one rank is
registered: `found` is what a decode engine finds at the address of the leg.
"""

import json
import sys
import time
from typing import Any

import imports  # type: ignore[import-not-found]  # noqa: F401
import requests
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
)
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.utils.network import NetworkAddress

RANK: dict[str, str | int] = {
    "attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1,
    "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
    "rank_ip": "127.0.0.1", "rank_port": 1, "page_size": 1, "kv_cache_dtype": "auto",
}  # fmt: skip
ANY_RANK = dict.fromkeys(
    ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"), -1
)


def judge(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/abort_request":
        return {"rid": AbortReq(**body).rid}
    is_chat = path.endswith("/chat/completions")
    request = (ChatCompletionRequest if is_chat else CompletionRequest).model_validate(body)
    prompt = "hello" if is_chat else request.prompt
    is_text = isinstance(prompt if isinstance(prompt, str) else prompt[0], str)
    made = GenerateReqInput(
        **{"text" if is_text else "input_ids": prompt},
        sampling_params={"n": request.n, "min_new_tokens": request.min_tokens},
        stream=request.stream,
        rid=request.rid,
        **request.pd_routing_kwargs(),
    )
    made.normalize_batch_and_arguments()
    parts = [made] if made.is_single else [made[at] for at in range(made.batch_size)]
    at = NetworkAddress(request.bootstrap_host, request.bootstrap_port).to_host_port_str()
    return {
        "rids": [part.rid for part in parts],
        "rooms": [part.bootstrap_room for part in parts],
        "ranks": [part.disagg_prefill_dp_rank for part in parts],
        "unknown": sorted(body.keys() - type(request).model_fields.keys()),
        "stream": made.stream,
        "found": requests.get(f"http://{at}/route", params=ANY_RANK, timeout=5).json(),
    }


given = json.load(sys.stdin)
server = CommonKVBootstrapServer("127.0.0.1", given["port"])
address = f"http://127.0.0.1:{given['port']}/route"
for _ in range(100):
    try:
        requests.put(address, json=RANK, timeout=5).raise_for_status()
        break
    except requests.ConnectionError:
        time.sleep(0.1)
print(json.dumps([judge(**leg) for leg in given["legs"]]))
