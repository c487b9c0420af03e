"""The facts of an engine's identity page (`GET /disagg/identity`) about KV transfers, and the first
fact in which the pages of two engines differ. Pure functions.

An engine without the page, such as a stock engine, is not compared: it fits every other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The most factors of a page that are kept, and the longest text in characters.
IDENTITY_PATH = "/disagg/identity"
MAX_FACTORS = 64
MAX_TEXT = 80
SHOWN_HASH_CHARS = 12
VLLM_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
SGLANG_CACHE = re.compile(r"^sglang:max_total_num_tokens(?:\{.*\})? (\d+)", re.MULTILINE)
# The metrics that are read here. The expressions are slow for what they do not match.
READ_METRICS = (
    b"vllm:cache_config_info",
    b"sglang:max_total_num_tokens",
    b"process_start_time_seconds",
)
START_TIME = re.compile(r"^process_start_time_seconds (\S{1,32})$", re.MULTILINE)
# Without the look-behind, a long text without quotes would take quadratic time.
LABEL = re.compile(r'(?<!\w)(\w+)="([^"]*)"')
# More data-parallel ranks than this behind one address are not credible.
MAX_RANKS = 1024
NO_CONNECTOR = "started without --kv-transfer-config"
# The factor that is a digest of the model's configuration. The hash does not contain it.
CONFIGURATION = "configuration"
SECRET_REQUIRED, SECRET_OPTIONAL, SECRET_NONE = "required", "mixed", "none"


@dataclass(frozen=True, slots=True)
class KvFacts:
    """The facts of an identity page about KV transfers. Hashable, because a large fleet has few
    different values. Empty texts, None and 0 stand for facts that the page lacks."""

    has_page: bool = False
    has_connector: bool = True
    modes: tuple[str, ...] = ()
    compatibility_hash: str = ""
    factors: tuple[tuple[str, str], ...] = ()
    """The inputs of the hash, in the order of the page."""
    extension: str = ""
    """The version of our extension of the protocol."""
    block_size: int = 0
    tp_size: int = 0
    secret: str = ""
    """SECRET_REQUIRED, SECRET_OPTIONAL or SECRET_NONE, for the side channel."""
    lease_seconds: float | None = None

    @property
    def configuration(self) -> str:
        """The digest of the model's configuration; empty if the page has none, as those of older
        releases and of other engines do."""
        return dict(self.factors).get(CONFIGURATION, "")


class RankFacts(NamedTuple):
    """A data-parallel rank of an engine: its number in engine ids, and the tokens that its KV cache
    holds (0: unknown)."""

    number: int
    cache_tokens: int


class Difference(NamedTuple):
    """The first fact in which two engines differ, and what to do about it."""

    text: str
    cure: str


def parse_kv_facts(page: object) -> KvFacts:
    """Read an identity page, whose content may be anything; never raises."""
    if not isinstance(page, dict):
        return KvFacts()
    ranks = page.get("ranks")
    if not isinstance(ranks, list):
        return KvFacts()
    modes = page.get("transfer_modes")
    secret = short_text(page.get("side_channel_secret"))
    if not ranks:
        # Other servers' pages may omit the ranks that they have.
        lacks_connector = isinstance(modes, list) and not modes
        return KvFacts(has_page=True, secret=secret, has_connector=not lacks_connector)
    rank = ranks[0] if isinstance(ranks[0], dict) else {}
    versions = page.get("versions")
    factors = rank.get("compatibility_factors")
    pairs = list(factors.items())[:MAX_FACTORS] if isinstance(factors, dict) else []
    return KvFacts(
        has_page=True,
        secret=secret,
        modes=tuple(map(short_text, modes[:8])) if isinstance(modes, list) else (),
        compatibility_hash=_hash_of(ranks),
        factors=tuple((short_text(name), short_text(value)) for name, value in pairs),
        extension=short_text(versions.get("extension")) if isinstance(versions, dict) else "",
        block_size=_count(rank.get("block_size")),
        tp_size=_count(rank.get("tp_size")),
        lease_seconds=_seconds(page.get("lease_seconds")),
    )


def cache_tokens_of_ranks(ranks: Sequence[object]) -> int:
    """Return the tokens that the KV caches of these data-parallel ranks hold; 0 if unknown."""
    known = [rank for rank in ranks if isinstance(rank, dict)]
    return sum(_count(r.get("num_blocks")) * _count(r.get("block_size")) for r in known)


def ranks_of_page(page: Mapping[str, object]) -> Sequence[RankFacts]:
    """Return the data-parallel ranks of an identity page, in the order of their numbers. Return ()
    if the page may lack some: it lists those of its machine only."""
    ranks = page.get("ranks")
    if not isinstance(ranks, list) or page.get("dp_size") != len(ranks) or len(ranks) > MAX_RANKS:
        return ()
    tokens = {rank_number(rank): cache_tokens_of_ranks([rank]) for rank in ranks}
    return [RankFacts(number, tokens[number]) for number in sorted(tokens)]


def rank_number(rank: object) -> int:
    """Return the number of a data-parallel rank of an identity page."""
    number = rank.get("dp_rank", 0) if isinstance(rank, dict) else 0
    return number if type(number) is int else 0


def ranks_of_metrics(text: str) -> Sequence[RankFacts]:
    """Return the data-parallel ranks that vLLM's metrics list (cache_config_info), or one rank with
    the cache of an SGLang engine (max_total_num_tokens). Each rank of vLLM reports the blocks of
    all ranks together."""
    labels = [dict(LABEL.findall(line)) for line in VLLM_CACHE.findall(text)]
    tokens = {
        _int(one.get("engine")): _int(one.get("num_gpu_blocks")) * _int(one.get("block_size"))
        for one in labels
    }
    if 0 < len(tokens) <= MAX_RANKS:
        return [RankFacts(number, tokens[number] // len(tokens)) for number in sorted(tokens)]
    return [RankFacts(0, sum(map(_int, SGLANG_CACHE.findall(text))))]


def start_time_in(text: str) -> str:
    """Return when the process that writes these metrics started; empty if they do not say so."""
    found = START_TIME.search(text)
    return "" if found is None else found[1]


def _int(text: str | None) -> int:
    return _count(int(text)) if text is not None and text.isdecimal() and len(text) < 12 else 0


def _hash_of(ranks: Sequence[object]) -> str:
    """Return the hash of all ranks; empty if they differ, or if one has none."""
    found = [rank.get("compatibility_hash") if isinstance(rank, dict) else None for rank in ranks]
    first = found[0]
    return first if isinstance(first, str) and found.count(first) == len(found) else ""


def short_text(value: object) -> str:
    """Return a bounded text in one line: it is logged and shown."""
    text = value if isinstance(value, str) else "" if value is None else str(value)[: 2 * MAX_TEXT]
    text = " ".join(text[: 2 * MAX_TEXT].split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value < 2**31 else 0


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e9 else None  # type: ignore[operator, arg-type]


def find_kv_difference(p: KvFacts, d: KvFacts) -> Difference | None:
    """Return the first difference between the pages of a prefill and a decode engine."""
    if not (p.has_page and d.has_page):
        return None
    if not (p.has_connector and d.has_connector):
        return Difference(
            NO_CONNECTOR,
            "start the engine with --kv-transfer-config (docs/engine-configuration.md)",
        )
    if p.modes and d.modes and not set(p.modes) & set(d.modes):
        modes = f"transfer modes {' '.join(p.modes)} and {' '.join(d.modes)}"
        return Difference(modes, "give both engines the same kv_connector")
    if p.extension and d.extension and p.extension != d.extension:
        text = f"protocol extension {p.extension} and {d.extension}"
        return Difference(text, "install the same release of disagg-router beside both engines")
    hashes = {p.compatibility_hash, d.compatibility_hash} - {""}
    if len(hashes) > 1:
        return _difference_in_factors(p, d)
    if p.configuration and d.configuration and p.configuration != d.configuration:
        return Difference(
            f"{CONFIGURATION} {p.configuration} and {d.configuration}",
            "start both engines with the same --revision, --hf-overrides and quantization",
        )
    if {p.secret, d.secret} == {SECRET_REQUIRED, SECRET_NONE}:
        without = "the prefill engine" if p.secret == SECRET_NONE else "the decode engine"
        return Difference(
            f"side_channel_secret_file missing at {without}",
            "give both engines the same side_channel_secret_file",
        )
    sizes = p.tp_size, d.tp_size
    if all(sizes) and max(sizes) % min(sizes):
        text = f"tp_size {sizes[0]} and {sizes[1]}"
        return Difference(text, "choose a tp_size that is a multiple of the other engine's")
    return None


def _difference_in_factors(p: KvFacts, d: KvFacts) -> Difference:
    ours, theirs = dict(p.factors), dict(d.factors)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(name, "not set"), theirs.get(name, "not set")
        if one != other:
            return Difference(f"{name} {one} and {other}", _cure_of(name))
    one, other = p.compatibility_hash, d.compatibility_hash
    return Difference(
        f"compatibility hash {one[:SHOWN_HASH_CHARS]} and {other[:SHOWN_HASH_CHARS]}",
        "start both engines with the same release, model and options",
    )


def _cure_of(name: str) -> str:
    if name.endswith("version"):
        return "install the same release for both engines"
    if name in ("dtype", "cache_dtype", "attn_backend", "transfer_mode"):
        return f"start both engines with the same {name}"
    return "start both engines with the same model and options"
