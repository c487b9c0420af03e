"""A decode engine measures its steps with trial prompts, and then computes prompts itself where it
keeps --target-itl and is sooner than the prefill engine."""

from itertools import count

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import Launcher, Server, metric, wait_for

COMPUTED = "disagg_engine_prompt_tokens_computed_total"


def alone(router: Server, reason: str) -> float:
    """Return how many requests a decode engine answered alone for this reason."""
    name = f'disagg_router_decode_only_total{{reason="{reason}"}}'
    return router.metrics().get(name, 0.0)


def test_decode_engine_computes_prompts_when_it_has_measured_its_steps(
    launcher: Launcher, prefiller: Server, decoder: Server
) -> None:
    numbers = count(1)
    # No step of this engine takes as long as the one target, or as short as the other one.
    with launcher.router([prefiller], [decoder], "--target-itl", "30") as router:

        def is_sooner() -> bool:
            # Steps of different sizes, and answers with contexts of different sizes.
            for length in (20, 100, 250, 700):
                complete(router, tokens_of(length, next(numbers)))
            return alone(router, "sooner") > 0

        wait_for(is_sooner, "the router knows the engine's steps", 120, 0.2)
        assert alone(router, "trial") > 0
        for length in (20, 700):
            prompt, before = tokens_of(length, next(numbers)), metric(prefiller, COMPUTED)
            answer = complete(router, prompt)
            assert metric(prefiller, COMPUTED) == before
            assert differences([complete(prefiller, prompt)], [answer]) == []
    with launcher.router([prefiller], [decoder], "--target-itl", "0.00001") as router:
        before = metric(prefiller, COMPUTED)
        complete(router, tokens_of(700, next(numbers)))
        assert metric(prefiller, COMPUTED) - before == 700
        assert (alone(router, "sooner"), alone(router, "trial")) == (0, 0)
