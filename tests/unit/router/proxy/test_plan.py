"""The plan of a request, a value that depends on the request and the engines' capabilities."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from router.conversations.conversations import Turn
from router.conversations.reuse import TurnReuse
from router.fleet.capabilities import EngineCapabilities
from router.fleet.engine import DECODE, PREFILL, Engine, EngineRole, EngineSpec
from router.http_client.pool import EnginePool
from router.proxy.exchange import Exchange
from router.proxy.plan import MAX_SHORT_BODY_BYTES, Mode, make_plan
from router.proxy.request import Request
from router.proxy.request_limits import RequestLimits
from router.routing.policy import PolicyFeedback
from router.routing.route import NOWHERE, Route
from router.settings import Address, Settings
from router.telemetry.record import Record


def decode_engine(knows_threshold: bool | None = None) -> Engine:
    return cast(
        Engine, SimpleNamespace(capabilities=EngineCapabilities(supports_threshold=knows_threshold))
    )


def request(size: int = 10, turn: bool = False, **fields: Any) -> Request:
    exchange = cast(Exchange, SimpleNamespace(body=b"x" * size))
    made = Request(exchange, Record("/v1/completions", 0.0, "id"), b"", 100.0, 0, **fields)
    made.turn, made.names_conversation = cast(Turn, object()) if turn else None, turn
    return made


def limits(**changes: Any) -> RequestLimits:
    engines: dict[str, Any] = {f"{role}_hosts": ("h",) for role in ("prefiller", "decoder")}
    ports: dict[str, Any] = {"prefiller_ports": (1,), "decoder_ports": (2,)}
    return RequestLimits.of(Settings(**engines, **ports, **changes))


def cached_turn(at: Engine) -> TurnReuse:
    """Return a last turn of which the decode engine has 60 % of the prompt in its cache."""
    return TurnReuse(cast(Turn, object()), "whole", "entry", decoder=at, cached_share=0.6)


def route(*decoders: Engine) -> Route:
    return Route("g", (decode_engine(),), decoders)


@pytest.mark.parametrize("why", ["n", "prompt_list", "client_params"])
def test_request_that_cannot_be_shared_is_decode_only(why: str) -> None:
    plan = make_plan(
        request(decode_only_reason=why, threshold=0.5), route(decode_engine()), None, limits()
    )
    assert (plan.mode, plan.flow, plan.decode_only_reason) == (Mode.DECODE_ONLY, "decode_only", why)
    assert (plan.threshold, plan.skips_threshold, plan.reuse) == (0, False, None)


@pytest.mark.parametrize(
    ("body", "proves", "is_alone"),
    [
        ({"prompt_embeds": "eA=="}, "prefiller", True),
        ({"prompt_embeds": ["eA=="], "prompt": None}, "decoder", True),
        ({"prompt_embeds": "eA=="}, "", False),
        ({"prompt_embeds": None, "prompt": "hello"}, "prefiller", False),
        ({"prompt_embeds": [], "prompt": "hello"}, "prefiller", False),
        ({"prompt_embeds": "eA==", "messages": []}, "prefiller", False),
    ],
)
def test_embeddings_are_not_shared_with_engines_that_verify_prefixes(
    body: dict[str, Any], proves: str, is_alone: bool
) -> None:
    """Two stock engines share them like any prompt."""
    asked = request(body=body)
    given = route(decode_engine())
    given.prefillers[0].capabilities.verifies_prefix = proves == "prefiller"
    given.decoders[0].capabilities.verifies_prefix = proves == "decoder"
    plan = make_plan(asked, given, None, limits())
    assert (plan.mode is Mode.DECODE_ONLY) == is_alone
    assert plan.decode_only_reason == ("prompt_embeds" if is_alone else "")


@pytest.mark.parametrize(
    ("fields", "flow"),
    [({}, "pull"), ({"threshold": 0.5}, "decode_first"), ({"turn": True}, "turn")],
)
def test_other_requests_are_pulled(fields: dict[str, Any], flow: str) -> None:
    plan = make_plan(request(**fields), route(decode_engine()), None, limits())
    assert (plan.mode, plan.flow, plan.decode_only_reason) == (Mode.PULL, flow, "")


@pytest.mark.parametrize(
    ("knows", "size", "asks"),
    [
        (True, 10 * MAX_SHORT_BODY_BYTES, True),
        (None, 10 * MAX_SHORT_BODY_BYTES, True),
        (False, MAX_SHORT_BODY_BYTES, True),
        (False, MAX_SHORT_BODY_BYTES + 1, False),
    ],
)
def test_decoder_that_ignores_thresholds_is_asked_first_only_for_short_prompts(
    knows: bool | None, size: int, asks: bool
) -> None:
    plan = make_plan(request(size, threshold=0.5), route(decode_engine(knows)), None, limits())
    assert (plan.threshold, plan.skips_threshold) == ((0.5, False) if asks else (0, True))


def test_decode_first_is_skipped_without_a_decoder() -> None:
    plan = make_plan(request(threshold=0.5), NOWHERE, None, limits())
    assert (plan.threshold, plan.route.decoders, plan.route.prefillers) == (0, (), ())


@pytest.mark.parametrize(
    ("share", "knows", "body", "asked"),
    [
        (0.5, True, {}, 0.5),
        (0.6, True, {}, 0.6),
        (0.7, True, {}, 0),
        (0, True, {}, 0),
        (0.5, None, {}, 0),
        (0.5, False, {}, 0),
        (0.5, True, {"cache_hit_threshold": 0}, 0),
    ],
)
def test_last_turns_decoder_is_asked_first_if_its_cache_has_enough(
    share: float, knows: bool | None, body: dict[str, Any], asked: float
) -> None:
    home = decode_engine(knows)
    asking = request(turn=True, body=body)
    plan = make_plan(asking, route(home), cached_turn(home), limits(decode_first_turns=share))
    assert (plan.threshold, plan.flow) == (asked, "turn")
    assert plan.reuse is not None


def reporting(port: int, role: EngineRole = DECODE) -> Engine:
    """Return an engine that reports the time of its steps."""
    made = Engine(EngineSpec(role, Address("h", port)), cast(EnginePool, None))
    model = {"base_ms": 10, "token_us": 50, "token_context_ns": 1, "context_ns": 30}
    budget = 256 if role is DECODE else 8192
    page = {"max_step_tokens": budget, "num_blocks": 9000, "block_size": 16, "step_model": model}
    made.capabilities.note_identity({"ranks": [page]})
    return made


@pytest.mark.parametrize(
    ("share", "queued_s", "reason"),
    [
        (0.95, 0.0, "sooner"),  # it lacks 200 of 4,000 tokens
        (0.0, 0.0, ""),
        (0.95, 0.6, ""),  # an idle engine without the last turn's KV is no alternative
    ],
)
def test_a_turn_is_judged_by_what_its_decode_engine_lacks(
    share: float, queued_s: float, reason: str
) -> None:
    home, idle = reporting(1), reporting(2)
    home.add_local_prefill(queued_s, 0)
    asking = request(turn=True, body={"prompt": [1] * 4000})
    reuse = TurnReuse(cast(Turn, object()), "whole", "entry", decoder=home, cached_share=share)
    given = Route("g", (reporting(3, PREFILL),), (home, idle))
    plan = make_plan(asking, given, reuse, limits(target_itl=0.05))
    assert plan.decode_only_reason == reason
    assert plan.route.decoders[0] is home


def test_a_threshold_judges_the_turn_whose_kv_is_there() -> None:
    """The KV may be gone, which only the engine knows."""
    home = reporting(1)
    home.capabilities.supports_threshold = True
    asking = request(turn=True, body={"prompt": [1] * 4000})
    reuse = TurnReuse(cast(Turn, object()), "whole", "entry", decoder=home, cached_share=0.95)
    given = Route("g", (reporting(3, PREFILL),), (home,))
    plan = make_plan(asking, given, reuse, limits(target_itl=0.05))
    assert (plan.threshold, plan.decode_only_reason) == (0.9, "")


def test_a_prompt_that_the_prefill_engine_has_cached_goes_there() -> None:
    prefiller, decoder = reporting(3, PREFILL), reporting(1)
    given = Route("g", (prefiller,), (decoder,))
    asking = request(body={"prompt": [1] * 2000})
    prefiller.add_load(1, 20_000)  # a queue makes the decode engine sooner
    assert make_plan(asking, given, None, limits(target_itl=0.05)).decode_only_reason == "sooner"
    knows = cast(PolicyFeedback, SimpleNamespace(expected_tokens=lambda name: 1900))
    given = replace(given, prefill_feedback=knows)
    prefiller.add_load(-1, -15_000)
    assert make_plan(asking, given, None, limits(target_itl=0.05)).decode_only_reason == ""


@pytest.mark.parametrize(("tokens", "reason"), [(90, "short"), (200, "sooner")])
def test_each_rule_has_its_reason(tokens: int, reason: str) -> None:
    given = Route("g", (reporting(3, PREFILL),), (reporting(1),))
    asking = request(body={"prompt": [1] * tokens})
    both = limits(target_itl=0.05, min_remote_prefill_tokens=100)
    assert make_plan(asking, given, None, both).decode_only_reason == reason
