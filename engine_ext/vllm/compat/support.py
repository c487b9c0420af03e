"""Which features this vLLM bears, and why others are off."""

import functools
import logging
import os
from collections.abc import Iterator

from vllm import __version__ as vllm_version

from engine_ext.vllm.compat.features import OPTIONAL, REQUIRED, Feature
from engine_ext.vllm.compat.names import problem

logger = logging.getLogger(__name__)

KNOWN = ("0.32", "0.33")
"""Releases that were tested. On others, too, the names decide."""

SAID = "DISAGG_SAID_OF_VLLM"
"""In the environment: processes that vLLM starts say nothing again."""

_lost: dict[str, str] = {}
"""What could not be installed in this process."""


def is_on(feature: Feature) -> bool:
    return reason(feature) is None


def reason(feature: Feature) -> str | None:
    """Why it is off: one line; None where it is on."""
    return _lost.get(feature.name) or _problem(feature)


def lose(feature: Feature, why: str) -> None:
    """It is off in this process."""
    _lost[feature.name] = why
    logger.warning(_line(feature, why))


def features() -> list[str]:
    return [each.name for each in REQUIRED + OPTIONAL if is_on(each)]


def missing() -> dict[str, str]:
    """Why what is off is off."""
    return {each.name: why for each, why in _off(OPTIONAL)}


def require(*wanted: Feature) -> None:
    """Raises RuntimeError, one line, naming all that is off."""
    off = [f"{each.name}: {why}" for each, why in _off(wanted)]
    if off:
        raise RuntimeError(f"engine_ext does not fit vLLM {vllm_version}: {'; '.join(off)}")


def say() -> None:
    """Once: that the version is not known, and a line for each feature that is off."""
    if os.environ.get(SAID) == vllm_version:
        return
    os.environ[SAID] = vllm_version
    if ".".join(vllm_version.split(".")[:2]) not in KNOWN:
        logger.warning(
            "vLLM %s was not tested, %s were: what it names as they do is on",
            vllm_version,
            " and ".join(KNOWN),
        )
    for feature, why in _off(OPTIONAL):
        logger.warning(_line(feature, why))


def _line(feature: Feature, why: str) -> str:
    return f"{feature.name} is off with vLLM {vllm_version} ({feature.lost}): {why}"


def _off(wanted: tuple[Feature, ...]) -> Iterator[tuple[Feature, str]]:
    for feature in wanted:
        why = reason(feature)
        if why is not None:
            yield feature, why


@functools.cache
def _problem(feature: Feature) -> str | None:
    return next(filter(None, map(problem, feature.needs)), None)
