"""Latent attention's tensors, and how its projections are folded into those of one shared head.

A head's key is `up_key @ latent`, so its product with a query is that of `up_key.T @ query` with
the latent vector itself; likewise values need not be made before they are added up. With `up_key`
in the query's projection and `up_value` in the output's, all heads attend to the one row that the
cache has of a token, and nothing of the cache is ever expanded. That makes the projections larger:
it is for small models.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine_ext.reference.model_config import LatentShape, ModelConfig

Shape = tuple[int, ...]


class Folded(NamedTuple):
    qkv: Tensor
    """[num_heads * row_dim + row_dim, hidden]: queries, then the latent vector and rotated key."""
    output: Tensor
    """[hidden, num_heads * rank]"""


def expected_shapes(config: ModelConfig, latent: LatentShape) -> dict[str, Shape]:
    heads, hidden = config.num_heads, config.hidden_size
    return {
        "self_attn.q_proj.weight": (heads * config.head_dim, hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (config.row_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.plain + latent.value), latent.rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.value),
    }


def fold(own: dict[str, Tensor], config: ModelConfig, latent: LatentShape) -> Folded:
    heads, hidden = config.num_heads, config.hidden_size
    up = own["self_attn.kv_b_proj.weight"].view(heads, -1, latent.rank)
    up_key, up_value = up.tensor_split((latent.plain,), dim=1)
    query = own["self_attn.q_proj.weight"].view(heads, -1, hidden)
    plain, rotated = query.tensor_split((latent.plain,), dim=1)
    down, key = own["self_attn.kv_a_proj_with_mqa.weight"].tensor_split((latent.rank,))
    queries = torch.cat((up_key.mT @ plain, _in_halves(rotated)), dim=1).flatten(0, 1)
    output = own["self_attn.o_proj.weight"].view(hidden, heads, -1).transpose(0, 1) @ up_value
    return Folded(
        torch.cat((queries, down, _in_halves(key))),
        output.transpose(0, 1).reshape(hidden, -1),
    )


def _in_halves(rows: Tensor) -> Tensor:
    """DeepSeek rotates neighbours, `rotate` the halves: queries and keys are both reordered, which
    leaves their products what they are."""
    return torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), dim=-2)
