"""Every attribute that we take of vLLM's objects has a probe, in the features of who takes it."""

from pathlib import Path

import pytest

from engine_ext.vllm.compat import features
from tests.unit.engine_ext.vllm.taken import taken

OURS = Path(__file__).parents[4] / "engine_ext" / "vllm"
BEGUN = {
    f"compat/begun_{name}": (features.BEGUN,)
    for name in ("answer", "hand_over", "prompt", "worker")
}
FEATURES = {
    **BEGUN,
    "compat/by_name": (features.SEVERAL,),
    "compat/engine_loop": (features.LEAVING,),
    "compat/finish_reason": (features.THRESHOLD,),
    "compat/grammar": (features.BEGUN,),
    "compat/load_failures": (features.LOAD_FAILURES,),
    "compat/request_field": (features.THRESHOLD,),
    # Parsers are asked for the sake of what begun_answer.py says.
    "compat/streams": (features.STREAMS, features.BEGUN),
    "compat/told": (features.BEGUN,),
    "connector": (features.BEGUN, features.LOAD_FAILURES),
    "describe": (
        features.STOCK_PEERS,
        features.SCHEDULER,
        features.STATE_LAYERS,
        features.LOOKAHEAD,
    ),
    "fit": (features.BEGUN,),
    "given": (features.BEGUN,),
    "pages": (features.PAGES,),
    "prefill_stats": (features.BEGUN,),
    "problems": (features.LOAD_FAILURES,),
    "prompts": (features.EARLY_WRITES,),
    "renders": (features.RENDERS,),
    "request": (features.STATE_LAYERS,),
    "scheduler": (
        features.SCHEDULER,
        features.FAILURE_POLICY,
        features.REST,
        features.LAST_WINDOW,
        features.THRESHOLD,
        features.BEGUN,
        features.LOAD_FAILURES,
    ),
    "stats": (features.METRICS,),
}
"""Without which a module's code does not run; others depend on what KV does, alone."""

NOT_VLLMS = {
    "of Python's": {"name", "put_nowait", "_member_map_", "_member_names_", "_value2member_map_"},
    "of torch's generators": {"device", "get_offset", "set_offset", "type"},
    "of pydantic's models": {"model_dump"},
    "of transformers'": {
        "backend_tokenizer",
        "get_vocab",
        "index_topk",
        "special_tokens_map",
        "to_dict",
        "to_str",
    },
    "of our own classes": {
        "by_request",
        "disagg_is_leaving",
        "failure",
        "note_loading",
        "num_loading",
        "payload",
        "set_wake",
    },
}
MODULES = [str(path.relative_to(OURS).with_suffix("")) for path in sorted(OURS.rglob("*.py"))]


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_takes_is_in_its_features(module: str) -> None:
    probed = _probed(features.REQUIRED + FEATURES.get(module, ()))
    found = taken((OURS / module).with_suffix(".py"))
    assert found - probed - set().union(*NOT_VLLMS.values()) == set()


def test_what_need_not_be_probed_is_taken_somewhere() -> None:
    found = set().union(*(taken((OURS / module).with_suffix(".py")) for module in MODULES))
    assert set().union(*NOT_VLLMS.values()) <= found
    assert set(FEATURES) <= set(MODULES)


EXAMPLE = """
from typing import Any

import vllm.theirs as theirs
from vllm.theirs import Base, Request
from ours import Other


class Ours(Base):
    own = 1

    def override(self, *args: Any) -> "Request":
        self.kept = self.own
        return super().overridden(self.kept, self.inherited, args[0].of_arguments)


def function(request: "Request", other: Other, given: Any) -> None:
    theirs.of_module(other.not_theirs)
    first, second = request.of_parameters[0], other
    first.of_names.chained().called(second.not_theirs)
    for number, each in enumerate(sorted(given.of_any or ())):
        found = [one.of_loops for one in each.items() if getattr(one, "by_name", None)]
    found[0].of_lists

    def inner(request: Other) -> None:
        request.not_theirs(given.of_the_outer)
"""


def test_what_is_taken_is_found_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE, encoding="utf-8")
    assert taken(path) == {
        "by_name",
        "called",
        "chained",
        "inherited",
        "of_any",
        "of_arguments",
        "of_lists",
        "of_loops",
        "of_module",
        "of_names",
        "of_parameters",
        "of_the_outer",
        "overridden",
    }


def _probed(wanted: tuple[features.Feature, ...]) -> set[str]:
    found: set[str] = set()
    for name in (name for feature in wanted for name in feature.needs):
        found |= {*name.at.partition(":")[2].split("."), *name.has}
    return found
