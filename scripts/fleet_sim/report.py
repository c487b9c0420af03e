"""What a run came to, as figures and as a line of a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

from scripts.fleet_sim.engines import Engine
from scripts.fleet_sim.simulation import Outcome, Setup

HEADER = (
    f"{'shape':<9} {'fleet':>8} {'prefill by':<12} {'decode by':<12} {'remote':>6} "
    f"{'TTFT ms p50':>11} {'p99':>7} {'TPOT ms p50':>11} {'p99':>6} "
    f"{'hits P':>6} {'D':>4} {'max/mean P':>10} {'D':>5} "
    f"{'alone':>6} {'extra':>6} {'us P':>5} {'D':>5}"
)


class Figures(NamedTuple):
    """Milliseconds; shares of tokens that were cached; the busiest engine beside the mean one."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    prefill_hits: float
    decode_hits: float
    prefill_imbalance: float
    decode_imbalance: float
    alone: float
    """The share of jobs that a decoder did by itself."""
    extra: float
    """Legs that answered nothing, for each job."""


class Costs(NamedTuple):
    """Median microseconds of a choice, on this machine."""

    prefill: float
    decode: float


def figures_of(outcome: Outcome) -> Figures:
    return Figures(
        1000 * _at(outcome.first_tokens, 0.5),
        1000 * _at(outcome.first_tokens, 0.99),
        1000 * _at(outcome.per_token, 0.5),
        1000 * _at(outcome.per_token, 0.99),
        _hits(outcome.prefillers),
        _hits(outcome.decoders),
        _imbalance(outcome.prefillers),
        _imbalance(outcome.decoders),
        outcome.alone / max(1, len(outcome.decode_costs)),
        outcome.extra / max(1, len(outcome.decode_costs)),
    )


def costs_of(outcome: Outcome) -> Costs:
    return Costs(median(outcome.prefill_costs or [0.0]), median(outcome.decode_costs or [0.0]))


def line(setup: Setup, figures: Figures, costs: Costs) -> str:
    fleet = f"{setup.prefillers}+{setup.decoders}"
    remote = f"x{setup.scatter}" if setup.scatter else setup.min_remote_prefill_tokens or "all"
    return (
        f"{setup.shape:<9} {fleet:>8} {setup.prefill_policy:<12} {setup.decode_policy:<12} "
        f"{remote:>6} {figures.ttft_p50:>11.0f} {figures.ttft_p99:>7.0f} "
        f"{figures.tpot_p50:>11.1f} {figures.tpot_p99:>6.1f} "
        f"{figures.prefill_hits:>6.0%} {figures.decode_hits:>4.0%} "
        f"{figures.prefill_imbalance:>10.2f} {figures.decode_imbalance:>5.2f} "
        f"{figures.alone:>6.0%} {figures.extra:>6.1f} {costs.prefill:>5.1f} {costs.decode:>5.1f}"
    )


def _at(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def _hits(engines: Sequence[Engine]) -> float:
    return sum(e.cached for e in engines) / max(1, sum(e.asked for e in engines))


def _imbalance(engines: Sequence[Engine]) -> float:
    busy = [engine.busy for engine in engines]
    return max(busy) / (mean(busy) or 1.0)
