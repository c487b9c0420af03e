"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), the half-split form of Llama."""

import math

import torch
from torch import Tensor

from engine_ext.reference.model_config import Llama3RopeScaling, ModelConfig


class RotaryEmbedding:
    """Tables of cosine and sine, float32, `[max_positions, rotated_dim]`: what the left and the
    right half of a head are multiplied with, the sines with their signs."""

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), _frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `positions` [tokens], ready to broadcast over heads."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x`: [tokens, heads, head_dim]."""
    wide = x.float()
    halves_swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cos, halves_swapped, sin).to(x.dtype)


def _frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.rotated_dim, 2, dtype=torch.float32) / config.rotated_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies
    return _stretch_llama3(frequencies, config.rope_scaling)


def _stretch_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's rule: waves longer than the trained context are stretched by `factor`, short
    ones kept, those between blended linearly in context / wavelength."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
