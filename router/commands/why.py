"""disagg-router why: tells what a request waited for, which engines served it, and what was reused.

The router keeps its last requests in memory if it serves the dashboard (--ui). `story` turns what
the router knows about one of them into lines.
Exit code 0: shown. 1: not shown, and the error line has the reason. 2: wrong usage.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from router.commands.console import CommandError, CommandParser, UsageError
from router.commands.router_client import ask_router, error_message, router_url, token_headers
from router.openai.answers import parse_object
from router.settings import variable_of

TOKEN, TOKEN_FILE = variable_of("ui_token"), variable_of("ui_token_file")
DESCRIPTION = f"""\
Shows where a request spent its time, which engines served it, what failed, and how much of its
prompt came from a cache. REQUEST_ID is the response header x-request-id, the id in the access log,
or the id of the answer (chatcmpl-...). The router must serve the dashboard (--ui), and keeps the
last 1000 requests that have ended.

If the dashboard has a token, set {TOKEN}, or {TOKEN_FILE} to the path of its file.
"""
# With --workers each connection reaches any one of the processes.
MAX_LOOKUPS = 40
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
ANSWER_ID = re.compile(r"(?:chatcmpl|cmpl)-(.+?)(?:\.[^.]*)?")
FLOWS = {
    "pull": "a prefill engine computes the prompt, and a decode engine pulls its KV",
    "push": "a prefill engine computes the prompt and pushes its KV to a decode engine",
    "mooncake": "a prefill engine computes the prompt, and a decode engine gets its KV by Mooncake",
    "moriio": "a prefill engine computes the prompt and writes its KV to a decode engine (MoRI-IO)",
    "sglang": "a prefill and a decode engine of SGLang get the request at once and meet in a room",
    "trtllm": "a context server computes the prompt, and a generation server continues",
    "store": "a prefill engine writes KV into a store, where a decode engine finds it",
    "turn": "a conversation's turn: its engines may reuse the last turn's KV",
    "decode_first": "a decode engine gets the request first, because its cache may hold the prompt",
    "decode_only": "a decode engine computes the prompt itself",
    "prefill_only": "a prefill engine answers alone, since the answer is one token",
    "warm_up": "the router warms up a new pair of engines",
    "none": "the request did not reach an engine",
}
# What a client changed in the last turn's answer, from which its next prompt then differs.
ANSWER_CHANGES = {
    "reasoning_missing": "its client left the reasoning out",
    "reasoning_changed": "its client changed the text of the reasoning",
    "line_break": "its client put a line break before the text",
}


class UnknownRequestError(CommandError):
    """The router keeps requests, but does not know this one, or not yet."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("disagg-router why", DESCRIPTION)
    parser.add_argument("request_id", metavar="REQUEST_ID")
    parser.add_router_url()
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(argv)

    def show() -> int:
        url = router_url(options.url)
        if not REQUEST_ID.fullmatch(options.request_id):
            text = "REQUEST_ID is not the id of a request: see the header x-request-id"
            raise UsageError(text)
        try:
            found = find_request(url, options.request_id)
        except UnknownRequestError:
            # An answer's id has the request's id within.
            within = ANSWER_ID.fullmatch(options.request_id)
            if within is None:
                raise
            found = find_request(url, within[1])
        print(json.dumps(found) if options.json else "\n".join(story(found)), flush=True)
        return 0

    return parser.run(show)


def find_request(url: str, request_id: str) -> dict[str, Any]:
    """Ask the router at `url` until one of its processes knows the request.

    Raises UnknownRequestError, other kinds of CommandError, and UsageError.
    """
    headers = token_headers("ui_token", os.environ)
    for _ in range(MAX_LOOKUPS):
        page = f"{url}/ui/requests/{quote(request_id, safe='')}"
        answer = ask_router("GET", page, headers)
        content = parse_object(answer.content)
        if answer.status_code == 200:
            if content and "ms" in content:
                return content
            raise CommandError(f"{url} is not a disagg-router, or not of this version")
        message = error_message(content or {})
        if answer.status_code != 404 or "worker process" not in message:
            break
    if answer.status_code == 404 and "has no request" not in message:
        raise CommandError("the router does not keep requests: start it with --ui")
    kind = UnknownRequestError if answer.status_code == 404 else CommandError
    raise kind(message or f"{url} answers {answer.status_code}")


def story(request: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about one request, as GET /ui/requests/ID returns it."""
    ms = request["ms"]
    status = f"status {request['status']}" if request["status"] else "no status yet"
    yield f"request {request['id']}: {request['endpoint']}, {request['outcome']}, {status}"
    model = f", model {request['model']}" if request["model"] else ""
    arrived = datetime.fromtimestamp(request["at"]).astimezone()
    yield f"  arrived {arrived.isoformat(sep=' ', timespec='milliseconds')}{model}"
    flow = request["flow"]
    yield f"  flow {flow}: {FLOWS.get(flow, 'see docs/metrics.md')}"
    if request.get("without_transfer"):
        yield f"  no KV transfer: {request['without_transfer']}"
    yield from _timeline(request, ms)
    yield from _tokens(request, ms)
    if request["conversation"]:
        where = f", KV from {request['reused_from']}" if request["reused_from"] else ""
        reason = f" ({why})" if (why := request.get("conversation_reason")) else ""
        yield f"  conversation: {request['conversation']}{reason}{where} (docs/conversations.md)"
    if request.get("diverges_in"):
        yield f"  the prompt parts from earlier ones in {request['diverges_in']}"
    if change := ANSWER_CHANGES.get(request.get("answer_change", "")):
        yield f"  the history parts at the head of the last answer: {change}"
    if borrowed := request.get("borrowed_tokens"):
        yield f"  borrowed: {borrowed} tokens from the prefix cache of {request['borrowed_from']}"
    for failure in request["failures"]:
        yield f"  failed: {failure}"
    if request["retries"]:
        yield f"  retries: {request['retries']}"
    if request["error"]:
        yield f"  error: {request['error']}"


def _timeline(request: dict[str, Any], ms: dict[str, float | None]) -> Iterator[str]:
    """Yield a line for each phase: its start after the arrival, and how long it took.

    The router knows the legs that were sent last. Where another engine continued the answer, these
    legs began after the answer's first byte.
    """
    end, first_byte = ms["ended"], ms["first_byte"]
    began = ms["decode_started"]
    is_resumed = first_byte is not None and began is not None and began > first_byte
    until_first_byte = "the rest of the answer" if is_resumed else "until its first byte"
    phases: list[tuple[str, float | None, float | None]] = [
        ("waited for a slot at an engine", ms["queued"], _first(ms["admitted"], end)),
        (
            f"prefill on {request['prefiller']}",
            ms["prefill_started"],
            _first(ms["prefill_done"], began, end),
        ),
        (
            f"decode on {request['decoder']}, {until_first_byte}",
            began,
            end if is_resumed else _first(first_byte, end),
        ),
        (
            "first part of the answer, from another engine" if is_resumed else "rest of the answer",
            first_byte,
            _first(ms["prefill_started"], began) if is_resumed else end,
        ),
    ]
    known = [(start, stop, what) for what, start, stop in phases if start is not None]
    for start, stop, what in sorted(known, key=lambda phase: phase[0]):
        took = "still running" if stop is None else f"{stop - start:,.1f} ms"
        yield f"  {start:>9,.1f} ms  {what}: {took}"
    if end is not None:
        yield f"  {end:>9,.1f} ms  ended"


def _first(*moments: float | None) -> float | None:
    return next((moment for moment in moments if moment is not None), None)


def _tokens(request: dict[str, Any], ms: dict[str, float | None]) -> Iterator[str]:
    prompt, cached = request["prompt_tokens"], request["cached_tokens"]
    if prompt is not None:
        known = "reuse not reported" if cached is None else f"{cached} of them from a cache"
        yield f"  prompt: {prompt} tokens, {known}"
    count, begin, end = request["completion_tokens"], ms["first_byte"], ms["ended"]
    if count is not None:
        pace = ""
        if count > 1 and begin is not None and end is not None and end - begin >= count / 10:
            pace = f", one in {(end - begin) / (count - 1):.1f} ms"  # a whole answer comes at once
        what = "events" if request.get("counted") == "events" else "tokens"
        yield f"  answer: {count} {what}{pace}"
