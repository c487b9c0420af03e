"""Which features are on in this process, and why others are off.

A feature is off where vLLM's names are not as the probe expects, where its patch could not be
installed, or where the operator turned it off: `DISAGG_VLLM_DISABLE=resume,idle_rest` in the
environment. The switch is a variable because the patches are installed in every process of vLLM
before there is a configuration, and its processes inherit the environment.
"""

import difflib
import functools
import importlib
import logging
import os
from collections.abc import Iterator

from vllm import __version__ as vllm_version

from engine_ext.vllm.compat.probe import Feature, problem
from engine_ext.vllm.compat.vllm_symbols import PROMISED, REQUIRED
from engine_ext.vllm.optional import TIER_2

logger = logging.getLogger(__name__)

KNOWN = ("0.32", "0.33")
"""Releases that were tested. On others, too, the names decide."""

OPTIONAL = PROMISED + TIER_2
"""Without one of these the rest works."""

LOGGED = "DISAGG_VLLM_LOGGED"
"""In the environment: processes that vLLM starts do not repeat the lines."""
DISABLE = "DISAGG_VLLM_DISABLE"
DISABLED = f"{DISABLE} turns it off"
OLD_NAMES = {
    "begun": "resume",
    "hand_back": "preemption_return",
    "leaving": "early_exit",
    "rest": "idle_rest",
}
"""Names of features that DISABLE takes for one more release."""

NO_PLUGIN = (
    "VLLM_PLUGINS leaves out the plugin disagg, which adds the finish reason cache_threshold"
)

_turned_off: dict[str, str] = {}
"""What could not be installed in this process."""
_installed: set[str] = set()
"""Features whose patches are installed in this process. vLLM loads plugins in all of its processes,
so what is installed here is installed in the HTTP server, too."""


def is_on(feature: Feature) -> bool:
    return reason(feature) is None


def reason(feature: Feature) -> str | None:
    """Return why the feature is off, in one line; None if it is on."""
    if feature.name in _turned_off:
        return _turned_off[feature.name]
    if feature not in REQUIRED and feature.name in _disabled():
        return DISABLED
    off = (f"{needed.name} is off" for needed in feature.requires if not is_on(needed))
    return _problem(feature) or next(off, None)


def install(feature: Feature) -> None:
    """Install the feature's patches in this process; turn it off if that fails. Idempotent."""
    try:
        for patch in feature.patches:
            importlib.import_module(f"engine_ext.vllm.{patch}").install()
    except Exception as error:
        logger.exception(feature.name)
        turn_off(feature, f"it could not be installed: {error!r}")
    else:
        _installed.add(feature.name)


def is_installed(feature: Feature) -> bool:
    return feature.name in _installed


def turn_off(feature: Feature, why: str) -> None:
    """Turn the feature off in this process."""
    _turned_off[feature.name] = why
    logger.warning(_line(feature, why))


def probe_again() -> None:
    """Turn on what was turned off in this process, unless vLLM's names are not as expected."""
    _turned_off.clear()
    _problem.cache_clear()


def features() -> list[str]:
    return [each.name for each in REQUIRED + OPTIONAL if is_on(each)]


def missing() -> dict[str, str]:
    """Return the reason of each feature that is off."""
    return {each.name: why for each, why in _off(OPTIONAL)}


def require(*wanted: Feature) -> None:
    """Raise RuntimeError, one line that names all that is off, unless all of them are on."""
    off = [f"{each.name}: {why}" for each, why in _off(wanted)]
    if off:
        raise RuntimeError(f"engine_ext does not fit vLLM {vllm_version}: {'; '.join(off)}")


def log_what_is_off() -> None:
    """Log, once, that the version is not known, and a line for each feature that is off."""
    if os.environ.get(LOGGED) == vllm_version:
        return
    os.environ[LOGGED] = vllm_version
    if ".".join(vllm_version.split(".")[:2]) not in KNOWN:
        logger.warning(
            "vLLM %s is untested (tested: %s): features are on whose vLLM symbols are unchanged",
            vllm_version,
            " and ".join(KNOWN),
        )
    names = [each.name for each in OPTIONAL]
    for old in sorted(_listed() & OLD_NAMES.keys()):
        logger.warning("%s: %s is now %s; the old name is deprecated", DISABLE, old, OLD_NAMES[old])
    for unknown in sorted(_disabled() - {*names}):
        nearest = difflib.get_close_matches(unknown, names, 1, 0)
        logger.warning("%s: no feature %s; did you mean %s?", DISABLE, unknown, *nearest)
    for feature, why in _off(OPTIONAL):
        logger.warning(_line(feature, why))


def log_where_vllm_logs() -> None:
    """Send what this package logs where vLLM's own lines go, at vLLM's level. Idempotent. A logger
    that VLLM_LOGGING_CONFIG_PATH has configured is left alone."""
    ours, theirs = logging.getLogger("engine_ext"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


@functools.cache
def _disabled() -> set[str]:
    return {OLD_NAMES.get(name, name) for name in _listed()}


def _listed() -> set[str]:
    return {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}


def _line(feature: Feature, why: str) -> str:
    return f"{feature.name} is off with vLLM {vllm_version} ({feature.lost}): {why}"


def _off(wanted: tuple[Feature, ...]) -> Iterator[tuple[Feature, str]]:
    for feature in wanted:
        why = reason(feature)
        if why is not None:
            yield feature, why


@functools.cache
def _problem(feature: Feature) -> str | None:
    for symbol in feature.symbols:
        if (found := problem(symbol)) is not None:
            return found
    for module in feature.modules:
        try:
            importlib.import_module(f"engine_ext.vllm.{module}")
        except Exception as error:
            return f"{module} cannot be imported: {error!r}"
    return None
