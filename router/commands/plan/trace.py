"""The requests of a trace: Mooncake's JSON lines, or the router's access log in JSON."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from router.commands.console import CommandError, UsageError
from router.openai.answers import count_in, parse_object

# The tokens that one hash of a trace stands for.
BLOCK_TOKENS = 512
# The message of an access log line.
ACCESS_MESSAGE = "request"


class TracedRequest(NamedTuple):
    """`at` is the arrival in seconds. `cached` is how many prompt tokens the log reports as cached;
    of a trace, `blocks` are the hashes of the prompt's blocks."""

    at: float
    prompt: int
    output: int
    cached: int
    blocks: Sequence[int] = ()


def read_trace(path: Path) -> tuple[list[TracedRequest], int]:
    """Return the requests in the order of their arrival, and how many are left out because their
    tokens are not known. Lines of other kinds do not count. Raises CommandError, UsageError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    entries = [parse_object(line) or {} for line in lines]
    read = list(map(_request_in, entries))
    answered = (e.get("outcome") == "ok" and bool(e.get("decoder")) for e in entries)
    left_out = sum(ok and one is None for ok, one in zip(answered, read, strict=True))
    found = sorted(filter(None, read), key=lambda one: one.at)
    if not found:
        text = f"none of {len(lines)} lines is a request of Mooncake's format, or of an access log "
        more = f" ({left_out} requests tell no tokens)" if left_out else ""
        raise CommandError(f"{path}: {text}in JSON (--log-format json){more}")
    if found[-1].at <= found[0].at:
        raise CommandError(f"{path}: all requests have the same time, so they show no load")
    return [one._replace(at=one.at - found[0].at) for one in found], left_out


def _request_in(entry: Mapping[str, Any]) -> TracedRequest | None:
    if entry.get("message") == ACCESS_MESSAGE:
        return _logged_request(entry)
    at, prompt = entry.get("timestamp"), count_in(entry, "input_length")
    output, blocks = count_in(entry, "output_length"), entry.get("hash_ids")
    if not isinstance(at, int | float) or not prompt or not output:
        return None
    hashes = blocks if isinstance(blocks, list) and all(type(b) is int for b in blocks) else []
    return TracedRequest(at / 1000, prompt, output, 0, hashes)


def _logged_request(entry: Mapping[str, Any]) -> TracedRequest | None:
    prompt, output = count_in(entry, "prompt_tokens"), count_in(entry, "completion_tokens")
    total_ms, time = count_in(entry, "total_ms"), str(entry.get("time"))
    if not prompt or not output or total_ms is None:
        return None
    try:
        ended = datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None
    cached = min(count_in(entry, "cached_tokens") or 0, prompt - 1)
    return TracedRequest(ended - total_ms / 1000, prompt, output, cached)


def with_cache(requests: Sequence[TracedRequest], tokens: int) -> Iterator[TracedRequest]:
    """Yield the requests with what a prefix cache of so many tokens has of each prompt (LRU), as if
    the router always found the engine that has it. What a log reports stays as it is."""
    kept: OrderedDict[int, None] = OrderedDict()
    for request in requests:
        if not request.blocks:
            yield request
            continue
        depth = next((n for n, b in enumerate(request.blocks) if b not in kept), None)
        held = (len(request.blocks) if depth is None else depth) * BLOCK_TOKENS
        for block in reversed(request.blocks):  # the ends of prompts are evicted first
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) * BLOCK_TOKENS > tokens:
            kept.popitem(last=False)
        yield request._replace(cached=min(held, request.prompt - 1))
