"""Push inside the newest release of vLLM that is supported: right as one of its engines alone."""

from tests.integration.oracle import complete, differences, tokens_of
from tests.integration.processes import metric, wait_for
from tests.vllm.measures import COMPUTED, counted, freed
from tests.vllm.releases import LENGTHS, of_next
from tests.vllm.servers import PUSH, SCHEDULER, Fleet, Kind
from tests.vllm.test_push import both_legs


def test_pushed_prompts_and_a_turn_are_those_of_one_engine_alone(fleet: Fleet) -> None:
    alone = ("--no-enable-prefix-caching",)
    with of_next(fleet).servers(
        Kind("next-push-p", PUSH, (*SCHEDULER, *alone)), Kind("next-push-d", PUSH, SCHEDULER)
    ) as (prefiller, decoder):
        for length in LENGTHS:
            prompt = tokens_of(length, 7400 + length)
            right = complete(prefiller, prompt)
            turn = both_legs(prefiller, decoder, prompt)
            assert differences([right], [turn.answer]) == [], length
        wait_for(lambda: counted(prefiller, "pushes_ok") == len(LENGTHS), "all were pushed")
        longer = [*prompt, *turn.answer.tokens, *tokens_of(50, 7500)]
        right = complete(prefiller, longer)
        before = metric(prefiller, COMPUTED)
        again = both_legs(prefiller, decoder, longer, turn.params)
        assert differences([right], [again.answer]) == []
        assert metric(prefiller, COMPUTED) - before <= 51
        wait_for(lambda: freed(prefiller), "P has its blocks back")
