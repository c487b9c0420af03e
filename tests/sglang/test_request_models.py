"""SGLang's own code validates the requests that the router sends to its engines.

The tests of this folder are outside CI: an environment with what SGLang imports has 2.8 GB, and
1 GB of it is Triton:

    python -m venv E; E/bin/pip install torch==2.13.0+cpu transformers==5.19.0 xgrammar==0.2.7
    E/bin/pip install aiohttp fastapi msgspec numpy orjson pydantic pyzmq requests openai psutil \
        pillow uvicorn uvloop openai-harmony partial_json_parser einops pybase64 setproctitle \
        prometheus-client IPython interegular python-multipart sentencepiece tiktoken xxhash \
        zstandard blobfile anthropic distro dill scipy nvidia-ml-py compressed-tensors gguf \
        soundfile jsonschema torchao pydantic-settings outlines==0.1.11 torch_memory_saver
    E/bin/pip install --no-deps sglang==0.5.23 nixl==1.5.1 nixl-cu12==1.5.1
    DISAGG_SGLANG=E/bin/python python -m pytest tests/sglang
"""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.router.engine_scripts import usual_decode, usual_prefill
from tests.unit.router.harness import running_router, settings_for
from tests.unit.router.mock_engine import running_engine
from tests.unit.router.sglang_engine import DECODE, PREFILL, Rooms, SGLangEngine

SGLANG = os.environ.get("DISAGG_SGLANG", "")
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 7, "min_tokens": 3, "logprobs": 2}),
    ("/v1/completions", {"prompt": [1, 2, 3], "stream": True}),
    ("/v1/completions", {"prompt": ["x", "y", "z"], "echo": True}),
    ("/v1/completions", {"prompt": [[1], [2]], "routed_dp_rank": 0}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 7, "min_tokens": 3}),
    (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": MESSAGES, "conversation_id": "c", "tools": []}),
]


@pytest.mark.skipif(not SGLANG, reason="DISAGG_SGLANG names no Python with SGLang")
async def test_sglang_reads_both_legs_as_parts_of_one_transfer() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rooms = Rooms()
    async with running_engine(usual_prefill) as p, running_engine(usual_decode) as d:
        engines = SGLangEngine(p, PREFILL, rooms, port), SGLangEngine(d, DECODE, rooms)
        async with running_router(settings_for(p=[p], d=[d])) as router:
            await router.knows_its_engines()
            for path, body in REQUESTS:
                answer = await router.client.post(path, json={"model": "m", **body})
                assert answer.status_code == 200
        paths = [path for path, _ in REQUESTS]
        legs = [
            {"path": path, "body": body}
            for engine in engines
            for path, body in zip(paths, engine.bodies, strict=True)
        ]
    legs.append({"path": "/abort_request", "body": {"rid": "x"}})
    done = subprocess.run(  # noqa: ASYNC221 # nothing else runs
        [SGLANG, Path(__file__).with_name("real_engine_code.py")],
        input=json.dumps({"port": port, "legs": legs}),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    *read, aborted = json.loads(done.stdout.splitlines()[-1])
    assert aborted == {"rid": "x"}
    prefills, decodes = read[: len(paths)], read[len(paths) :]
    for prefill, decode, (_, body) in zip(prefills, decodes, REQUESTS, strict=True):
        assert prefill["stream"] is False
        assert decode["stream"] is body.get("stream", False)
        for name in ("rids", "rooms", "ranks", "unknown", "found"):
            assert prefill[name] == decode[name]
        count = 1 if not isinstance(body.get("prompt"), list) else len(body["prompt"])
        assert len(decode["rooms"]) == (1 if body.get("prompt") == [1, 2, 3] else count)
        assert decode["unknown"] == []
        assert decode["found"]["dp_size"] == 1
    numbers = [number for leg in decodes for number in leg["rooms"]]
    assert len({*numbers}) == len(numbers)
