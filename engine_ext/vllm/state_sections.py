"""How vLLM divides a state among tensor ranks.

A block has the last inputs of a short convolution, then a matrix of each head. Each rank has its
heads, of the convolution the channels of these (Mamba-2: x, then B and C of its groups; delta nets:
those of its queries, keys, then values). Of one group in all (Mamba-2), every rank has a copy. The
channels of a token lie together (VLLM_SSM_CONV_STATE_LAYOUT=SD, the default), or the tokens of a
channel (DS).
"""

from collections.abc import Collection
from typing import Any

from vllm import envs
from vllm.v1.kv_cache_interface import MambaSpec

from engine_ext.common.types import StateSection

NUM_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""The names of the number of Mamba-2 groups in model configurations."""


def state_sections(
    specs: Collection[Any], tp_size: int, model_config: object
) -> tuple[StateSection, ...]:
    """Return the sections of a block of these layers; none if they are not known, or not the same
    for all layers."""
    found = {_sections_of(spec, tp_size, model_config) for spec in specs}
    return found.pop() if len(found) == 1 else ()


def _sections_of(spec: Any, tp_size: int, model_config: object) -> tuple[StateSection, ...]:
    is_known = isinstance(spec, MambaSpec) and not spec.tp_replicated
    if not is_known or list(map(len, spec.shapes)) != [2, 3]:
        return ()
    convolution, (heads, head_size, key_size) = spec.shapes
    is_by_channel = envs.VLLM_SSM_CONV_STATE_LAYOUT == "DS"
    channels, num_tokens = convolution if is_by_channel else convolution[::-1]
    # What is not the heads' own is two halves: queries and keys, or B and C.
    groups, rest = divmod(channels - heads * head_size, 2 * key_size)
    if groups < 1 or rest:
        return ()
    each, of_state = (dtype.itemsize for dtype in spec.dtypes)
    values = StateSection(heads * tp_size, head_size * each)
    keys = StateSection(groups * tp_size, key_size * each)
    match spec.mamba_type.name:
        case "GDN_ATTN":
            inputs = keys, keys, values
        case "MAMBA2":
            num_groups = _num_groups(model_config)
            is_copied = groups == num_groups == 1
            if num_groups != groups * tp_size and not is_copied:
                return ()
            keys = keys._replace(items=num_groups)
            inputs = values, keys, keys
        case _:
            return ()
    together, times = (num_tokens, 1) if is_by_channel else (1, num_tokens)
    convolved = [StateSection(items, size * together) for items, size in inputs] * times
    return (*convolved, StateSection(heads * tp_size, head_size * key_size * of_state))


def _num_groups(model_config: object) -> int:
    """Return 0 if the configuration does not name them, or by two names."""
    found = [getattr(model_config, name, None) for name in NUM_GROUPS]
    named = [number for number in found if isinstance(number, int)]
    return named[0] if len(named) == 1 else 0
