"""Every attribute that we take of vLLM's objects has a probe, in the features of who takes it."""

from pathlib import Path

import pytest

from engine_ext.vllm import optional
from engine_ext.vllm.compat.probe import Feature
from engine_ext.vllm.compat.vllm_symbols import PROMISED, REQUIRED
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN, RESUME, THRESHOLD
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.loans import LENDING
from engine_ext.vllm.optional.steps import STEP_BUDGET
from engine_ext.vllm.optional.without_patch import (
    EARLY_WRITES,
    FAILURE_POLICY,
    LAST_WINDOW,
    LOOKAHEAD,
    RENDERS,
    SCHEDULER,
    STATE_LAYERS,
    STOCK_PEERS,
)
from tests.unit.engine_ext.vllm.used_attributes import taken

OURS = Path(__file__).parents[4] / "engine_ext" / "vllm"
FEATURES = PROMISED + optional.TIER_2
BESIDE = {
    "connector": (
        RESUME,
        LOAD_FAILURES,
        EARLY_WRITES,
    ),
    "connector_calls": (FAILURE_POLICY,),
    "describe": (
        LENDING,
        STOCK_PEERS,
        SCHEDULER,
        STATE_LAYERS,
        STEP_BUDGET,
        LOOKAHEAD,
    ),
    # Of a request with a payload, which is refused where it cannot be resumed.
    "optional/answers/patch_requests": (RESUME,),
    "optional/answers/resumed_request": (RESUME,),
    "request_view": (STATE_LAYERS, PREEMPTION_RETURN),
    "state_sections": (STATE_LAYERS,),
    "scheduler": (FAILURE_POLICY, LAST_WINDOW, LOAD_FAILURES),
    "pages": (RENDERS,),
    # Parsers are asked for the sake of replayed tokens.
    "optional/answers/early_ends": (THRESHOLD,),
}
"""Features that a module's code runs for, beside those that it is a module of. Of these each must
have a probe of what it takes: they are on one by one."""

NOT_VLLMS = {
    "of Python's": {"name", "put_nowait"},
    "of torch's types and generators": {
        "device",
        "get_offset",
        "itemsize",
        "set_offset",
        "type",
    },
    "of transformers'": {
        "_commit_hash",
        "backend_tokenizer",
        "get_vocab",
        "index_topk",
        "model_type",
        "rope_parameters",
        "special_tokens_map",
        "to_dict",
        "to_str",
    },
    # What follows fails in one place, which turns off the feature with the exception as its reason.
    "of the renderer, see pages.py": {
        "chat_template",
        "default_chat_template_kwargs",
        "renderer",
        "tokenizer",
    },
    "of the connectors' factory, see connector_names.py": {"register_connector"},
    "of our own classes": {
        "_end",
        "_ended",
        "_lent",
        "_on_wakeup",
        "_wakeups",
        "loan_reports",
        "loan_requests",
        "disagg_is_leaving",
        "failure",
        "note_loading",
        "on_scheduled",
        "payload",
        "problems",
        "set_wake",
        "worker",
    },
}
MODULES = [str(path.relative_to(OURS).with_suffix("")) for path in sorted(OURS.rglob("*.py"))]


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_takes_is_in_its_features(module: str) -> None:
    dotted = module.replace("/", ".")
    always = _probed((*REQUIRED, *BESIDE.get(module, ())))
    of_each = [_probed((each,)) for each in FEATURES if dotted in each.modules]
    probed = always | set.intersection(*of_each) if of_each else always
    found = taken((OURS / module).with_suffix(".py"))
    assert found - probed - set().union(*NOT_VLLMS.values()) == set()


def test_what_need_not_be_probed_is_taken_somewhere() -> None:
    found = set().union(*(taken((OURS / module).with_suffix(".py")) for module in MODULES))
    assert set().union(*NOT_VLLMS.values()) <= found
    assert set(BESIDE) <= set(MODULES)


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


def _probed(wanted: tuple[Feature, ...]) -> set[str]:
    found: set[str] = set()
    for symbol in (symbol for feature in wanted for symbol in feature.symbols):
        found |= {*symbol.at.partition(":")[2].split("."), *symbol.has.split()}
    for each in wanted:
        found |= _probed(each.requires)
    return found
