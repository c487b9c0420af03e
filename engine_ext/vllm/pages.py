"""The pages that our plugin adds to vLLM's HTTP server: `GET /disagg/identity`, `POST
/disagg/release` and `GET /disagg/leases`.

vLLM builds its FastAPI application and then calls `attach_endpoint_plugins(app)`, which adds the
pages of plugins of the group `vllm.endpoint_plugins`. These must be named in VLLM_PLUGINS, which
would switch off every plugin that is not; so we wrap the function itself. The pages call the
engine's process as vLLM's own do (`call_utility_all_async`), a method that we add to EngineCore. If
vLLM calls the function no more, the pages are missing, and the router treats this engine as stock.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from vllm.config import SchedulerConfig
from vllm.entrypoints.launchers import app as launcher
from vllm.v1.engine.core import EngineCore

from engine_ext.common.short_hash import short_hash
from engine_ext.http import identity, leases, release
from engine_ext.vllm import describe
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.patching import wrap
from engine_ext.vllm.connector_calls import find_our_connector, inspect_worker
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.without_patch import RENDERS

logger = logging.getLogger(__name__)

CALL = "disagg_call"
"""A method that we add to vLLM's EngineCore, for its HTTP server to call by name."""
RENDERED = "disagg_renders"
"""Found out once."""
RANKS = "disagg_ranks"
"""The attribute that holds the last facts about all ranks."""
RANKS_SECONDS = 1.0
KEY = leases.new_key()
"""Each process makes one; the engine's is used."""
SAMPLES = 64
SAMPLE_BYTES = 4096
LOCAL_FIELDS = ("_name_or_path", "transformers_version")
"""Fields of a model's configuration that depend on where this engine has it from."""


def install() -> None:
    """Idempotent."""
    setattr(EngineCore, CALL, _call_in_engine)
    wrap(launcher, "attach_endpoint_plugins", _wrap_attach_endpoint_plugins)


def _wrap_attach_endpoint_plugins(original: Any) -> Any:
    def attach(app: FastAPI, *args: Any, **kwargs: Any) -> None:
        original(app, *args, **kwargs)
        app.add_api_route(identity.PATH, get_identity, methods=["GET"])
        app.add_api_route(release.PATH, release_kv, methods=["POST"])
        app.add_api_route(leases.PATH, get_leases, methods=["GET"])
        if support.is_on(LOAD_FAILURES):
            from engine_ext.vllm.optional.load_failures import patch_load_errors

            patch_load_errors.add_handler(app)

    return attach


async def get_identity(request: Request) -> JSONResponse:
    state = request.app.state
    try:
        ranks = await _facts_about_ranks(state)
        return JSONResponse(await run_in_threadpool(_identity, state, ranks))
    except (identity.IdentityError, ValueError) as error:
        return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


async def _facts_about_ranks(state: Any) -> list[dict[str, Any]]:
    """Return `_facts_in_engine` of each rank. A rank in a long step answers late: then the last
    ones that were seen."""
    if state.vllm_config.kv_transfer_config is None:
        return []
    try:
        async with asyncio.timeout(RANKS_SECONDS):
            facts = await _core(state).call_utility_all_async(CALL, "facts", [])
    except TimeoutError:
        facts = getattr(state, RANKS, [])
    setattr(state, RANKS, facts)
    return list(facts)


def _identity(state: Any, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Blocks. Raises as `identity` does."""
    known = getattr(state, RENDERED, None)
    if known is None:
        known = _renders(state) if support.is_on(RENDERS) else {}
        setattr(state, RENDERED, known)
    config = state.vllm_config
    found = replace(
        describe.engine(config),
        renders=known,
        max_step_tokens=max_step_tokens(config.scheduler_config),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        step_models={rank["dp_rank"]: rank["step_model"] for rank in ranks if rank["step_model"]},
        lends=bool(ranks) and all(rank["lends"] for rank in ranks),
        borrows=bool(ranks) and all(rank["borrows"] for rank in ranks),
        loan_scheme=next((rank["loan_scheme"] for rank in ranks if rank["loan_scheme"]), None),
        loan_problem=next((rank["loan_problem"] for rank in ranks if rank["loan_problem"]), None),
    )
    return identity.identity(found)


def max_step_tokens(scheduler: SchedulerConfig) -> int:
    """Return how many tokens of one prompt a step computes beside decoding requests. vLLM raises an
    adaptive threshold up to the whole budget, of which speculation takes its share."""
    budget: int = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if scheduler.long_prefill_token_threshold_adaptive:
        return budget
    return min(budget, scheduler.long_prefill_token_threshold or budget)


async def release_kv(request: Request) -> JSONResponse:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > release.MAX_BODY:
            return _error("the body is too large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    try:
        names = release.parse(json.loads(body))
    except (ValueError, RecursionError) as error:  # JSON's own included
        return _error(str(error), HTTPStatus.BAD_REQUEST)
    answers = await _core(request.app.state).call_utility_all_async(CALL, "release", list(names))
    return JSONResponse({"released": any(answers)})


async def get_leases(request: Request) -> JSONResponse:
    asked = request.query_params.get(leases.ASKED)
    try:
        async with asyncio.timeout(leases.ANSWER_SECONDS):
            answers = await _core(request.app.state).call_utility_all_async(CALL, "leases", [asked])
    except TimeoutError:
        return _error("the engine's step takes too long", HTTPStatus.SERVICE_UNAVAILABLE)
    ranks = [
        {**rank, "dp_rank": number} if isinstance(rank, dict) else rank
        for number, of_engine in enumerate(answers)
        for rank in of_engine
    ]
    problems = [each for each in ranks if isinstance(each, str)]
    if problems:
        return _error(problems[0], HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse(leases.page(ranks))


def _core(state: Any) -> Any:
    return state.engine_client.engine_core


def _call_in_engine(core: Any, what: str, args: list[Any]) -> Any:
    """Call one of our functions in the engine's process. vLLM wants a parameter for each
    argument."""
    return IN_ENGINE[what](core, *args)


def _facts_in_engine(core: Any) -> dict[str, Any]:
    connector = find_our_connector(getattr(core.scheduler, "connector", None))
    return {
        "dp_rank": core.vllm_config.parallel_config.data_parallel_index,
        "step_model": None if connector is None else connector.step_model,
        "lends": connector is not None and connector.lends,
        "borrows": connector is not None and connector.borrows,
        "loan_problem": None if connector is None else connector.loan_problem,
        "loan_scheme": None if connector is None else connector.loan_scheme,
    }


def _leases_in_engine(core: Any, asked: str | None) -> list[dict[str, Any] | str]:
    """Return the entry of each worker, or a message where it has none.

    No deadline of its own: a late answer would be taken for the next call's. A worker answers
    within a second, or between two steps.
    """
    if find_our_connector(getattr(core.scheduler, "connector", None)) is None:
        return []
    found: list[dict[str, Any] | str] = core.model_executor.collective_rpc(
        inspect_worker, args=(KEY, asked)
    )
    return found


def _release_in_engine(core: Any, engine_id: str, request_id: str) -> bool:
    connector = find_our_connector(getattr(core.scheduler, "connector", None))
    return connector is not None and connector.release(engine_id, request_id)


IN_ENGINE: dict[str, Callable[..., Any]] = {
    "release": _release_in_engine,
    "leases": _leases_in_engine,
    "facts": _facts_in_engine,
}


def _error(message: str, status: HTTPStatus) -> JSONResponse:
    kind = f"{status.phrase.replace(' ', '')}Error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def _renders(state: Any) -> dict[str, str]:
    """Return what two engines must share to read token ids alike and to render messages alike, as
    short hashes: one resumes the other's answers only where they are equal. Empty if they cannot
    be found, so that no router relies on them. Blocks: files are read."""
    try:
        return _hashes(state)
    except Exception as error:
        logger.exception("what this engine renders with")
        support.turn_off(RENDERS, f"it cannot be read: {error!r}")
        return {}


def _hashes(state: Any) -> dict[str, str]:
    config, online = state.vllm_config.model_config, state.online_renderer
    tokenizer = online.renderer.tokenizer
    special = json.dumps(getattr(tokenizer, "special_tokens_map", {}), sort_keys=True, default=str)
    template = online.chat_template or getattr(tokenizer, "chat_template", None)
    kwargs = json.dumps(online.default_chat_template_kwargs, sort_keys=True, default=str)
    return {
        "model": _model(config),
        "tokenizer": short_hash(special, _tokens(tokenizer)),
        "chat_template": short_hash(special, json.dumps(template, default=str), kwargs),
    }


def _model(config: Any) -> str:
    named = config.hf_config.to_dict()
    shared = {key: named[key] for key in sorted(named.keys() - set(LOCAL_FIELDS))}
    directory = Path(str(config.model))
    parts: list[str | bytes] = [json.dumps(shared, sort_keys=True, default=str)]
    for path in sorted(directory.glob("*.safetensors")):
        parts += [path.name, *_samples(path)]
    if len(parts) == 1:
        # From a hub: its name and revision say which weights they are.
        parts.append(f"{config.model} {config.revision}")
    return short_hash(*parts)


def _samples(path: Path) -> list[bytes]:
    """Return parts of a file of many gigabytes."""
    size = path.stat().st_size
    found = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            found.append(file.read(SAMPLE_BYTES))
    return found


def _tokens(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        whole: str = backend.to_str()
        return whole
    return json.dumps(sorted(tokenizer.get_vocab().items()))
