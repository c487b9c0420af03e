"""How a request ends whose grammar does not allow what it began with."""

from typing import Any


def refuse(scheduler: Any, request_id: str) -> None:
    """With an error, at the end of this step, as vLLM ends those whose grammar cannot be compiled.
    0.32 has a set of them; 0.33 a dict with what their clients are told, which may be nothing."""
    refused = scheduler.grammar_compile_error_reqs
    if isinstance(refused, set):
        refused.add(request_id)
    else:
        refused[request_id] = None
