"""Which engine a leg of one request goes to.

The plan's order comes first. After a failure, or if something speaks against the first engine by
now, the other engines of the group are considered as they are at that moment, and last the engines
of another group. KV moves only within a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.engine import Engine
from router.fleet.engine_spec import DECODE, PREFILL, EngineRole
from router.http_client.deadlines import now
from router.openai.errors import LoadFailedError, NoEngineError, UnknownModelError
from router.proxy.resume import can_continue
from router.proxy.run import Run
from router.routing.prompt_chunks import estimate_tokens

# Failed KV loads after which a decode engine computes the prompt, if it may.
MAX_FAILED_LOADS = 3


def select_prefiller(run: Run) -> Engine | None:
    """Return the next prefill engine, or None if no engine of the group is left.

    Engines that the group's decode engines can load from come first. The decode engine of a
    conversation is kept, because it has a part of the prompt in its cache.
    """
    route = run.route
    engine = _planned(run, route.prefillers)
    if engine is not None and route.decoders and _is_avoided(run, engine, route.decoders[0]):
        pair = (engine.name, route.decoders[0].name)
        pairs = run.gateway.fleet.unreachable_pairs
        is_kept = run.plan.reuse is None and pairs.keeps_prefiller(*pair)
        others = _usable(run, DECODE) if is_kept else ()
        if not any(_can_pair(run, engine, decoder) for decoder in others):
            engine = None
    return engine or _next_best(run, PREFILL, None)


def select_decoder(run: Run, prefiller: Engine | None = None) -> Engine | None:
    """Return the next decode engine, or None if no engine of the group is left.

    With a `prefiller`, return an engine that can load KV from it, or the prefill engine itself if
    it plays both roles and no other engine is left.
    """
    return _planned(run, run.route.decoders, prefiller) or _next_best(run, DECODE, prefiller)


def another_decoder(run: Run, prefiller: Engine | None) -> Engine | None:
    """Return the next decode engine after a failure, as `select_decoder` would."""
    return _next_best(run, DECODE, prefiller)


def change_group(run: Run) -> bool:
    """Move the request to another group. Return False if no other group has usable engines.

    What was prefilled stays behind. A group that was left is not entered again.
    """
    run.groups_left |= {run.route.group}
    try:
        found = run.gateway.routes.find(run.request, but=run.groups_left)
    except (NoEngineError, UnknownModelError):
        return False
    if not found.decoders:
        return False
    run.route.end_feedback()
    run.route = found
    run.request.record.group = found.group
    return True


def lacks_pair(run: Run) -> bool:
    """Return True if a KV load has failed and a decode engine should compute the prompt.

    That is so when no other pair of engines of any group can exchange KV, and after
    MAX_FAILED_LOADS failed loads. Raises the failure if no decode engine may prefill a prompt of
    this length.
    """
    if not isinstance(run.failure, LoadFailedError):
        return False
    if len(run.cannot_load) < MAX_FAILED_LOADS or not _may_prefill_on_decoder(run):
        decoders = _usable(run, DECODE)
        if any(_can_pair(run, p, d) for p in _usable(run, PREFILL) for d in decoders):
            return False
        if change_group(run):
            return False
    require_short_prompt(run)
    run.prefiller = None
    return True


def require_short_prompt(run: Run) -> None:
    """Raise the last failure, or NoEngineError, if no decode engine may prefill this prompt."""
    limits = run.gateway.limits
    if limits.without_prefiller == "refuse":
        raise run.failure or NoEngineError("no prefill engine is healthy")
    if estimate_tokens(run.request.body) > limits.without_prefiller_tokens:
        raise run.failure or NoEngineError(
            "no prefill engine is healthy, and the prompt is too long for a decoder alone"
        )


def _may_prefill_on_decoder(run: Run) -> bool:
    limits = run.gateway.limits
    most = 0 if limits.without_prefiller == "refuse" else limits.without_prefiller_tokens
    return estimate_tokens(run.request.body) <= most


def _planned(run: Run, order: Sequence[Engine], prefiller: Engine | None = None) -> Engine | None:
    """Return the first engine of the plan, unless a leg has failed or the engine is not usable."""
    if not order or run.failed or run.cannot_load or run.resume.preempted:
        return None
    engine = order[0]
    if not engine.is_available:
        return None
    if prefiller is None:
        return engine
    if not _may_read(run, engine, prefiller) or _is_avoided(run, prefiller, engine):
        return None
    return engine


def _next_best(run: Run, role: EngineRole, prefiller: Engine | None) -> Engine | None:
    usable = _usable(run, role)
    if prefiller is not None:
        reading = [engine for engine in usable if _may_read(run, engine, prefiller)]
        usable = reading or [engine for engine in usable if engine is prefiller]
    if run.gateway.fleet.unreachable_pairs.failing and len(usable) > 1:
        usable = _paired(run, usable, prefiller)
    left = [engine for engine in usable if engine.is_available] or usable
    left = [engine for engine in left if engine not in run.resume.preempted] or left
    return next(iter(left), None) if run.slot is None else run.slot.first_with_room(left)


def _usable(run: Run, role: EngineRole) -> list[Engine]:
    """Return the group's engines of a role that have not failed this request, best first."""
    route = run.route
    order = route.prefillers if role is PREFILL else route.decoders
    known = (*order, *run.gateway.routes.others(run.request, route, role))
    fit = [engine for engine in known if engine.is_usable and engine.role.plays(role)]
    usable = [engine for engine in fit if engine not in run.failed]
    buffer = run.resume.continued
    if buffer is not None:
        usable = [engine for engine in usable if can_continue(engine, role, buffer)]
    return sorted(usable, key=run.cannot_load.count) if run.cannot_load else usable


def _paired(run: Run, usable: list[Engine], prefiller: Engine | None) -> list[Engine]:
    """Return the decode engines that can load from `prefiller`. Without a `prefiller`, return the
    prefill engines from which the first decode engine can load, else those from which any can.
    Return `usable` if there is no such engine."""
    if prefiller is not None:
        return [engine for engine in usable if not _is_avoided(run, prefiller, engine)] or usable
    decoders = _usable(run, DECODE)
    for wanted in (decoders[:1], decoders):
        found = [p for p in usable if any(_can_pair(run, p, d) for d in wanted)]
        if found:
            return found
    return usable


def _can_pair(run: Run, prefiller: Engine, decoder: Engine) -> bool:
    return _may_read(run, decoder, prefiller) and not _is_avoided(run, prefiller, decoder)


def _may_read(run: Run, decoder: Engine, prefiller: Engine) -> bool:
    """Return True if the decode engine may load KV from the prefill engine, as both are now."""
    if run.request.is_several and not decoder.capabilities.shares_kv_loads:
        return False
    return decoder is not prefiller and decoder.group == prefiller.group


def _is_avoided(run: Run, prefiller: Engine, decoder: Engine) -> bool:
    pairs = run.gateway.fleet.unreachable_pairs
    return bool(pairs.failing) and pairs.is_avoided(prefiller.name, decoder.name, now())
