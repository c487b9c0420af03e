"""disagg-router chat: a conversation with a router in the terminal, and how each answer came.

Answers go to standard output; prompts, figures and errors go to standard error.
Exit code 0: ended by the user, or all answers complete. 1: an answer from a pipe or of --once
failed. 2: wrong usage. 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from router.commands.chat.conversation import Conversation
from router.commands.console import (
    DIM,
    CommandError,
    CommandParser,
    UsageError,
    columns_of,
    number_in,
    paint_for,
    time_text,
)
from router.commands.router_client import API_KEY, first_model, key_headers, router_url, send
from router.commands.why import UnknownRequestError, find_request
from router.common.did_you_mean import did_you_mean
from router.openai.answers import count_in, parse_object
from router.settings import variable_of
from router.telemetry.logs import visible
from router.ui.engine_reports import LEASES_PATH, Transfer, hash_request_id, parse_transfers

PROGRAM = "disagg-router chat"
TOKEN = variable_of("ui_token")
DESCRIPTION = f"""\
Chats with a model behind a router. Answers are shown while they stream. Below each, one line has
its TTFT and tokens per second, the engines that served it, whether KV moved between them, how many
prompt tokens came from a cache, and whether another engine had to continue the answer. The engines
are known if the router serves the dashboard (--ui).

/new begins another conversation, /quit or Ctrl-D ends. Ctrl-C ends an answer, or the program if
there is none. From a pipe, each line is one message.

{API_KEY} has the API key, and {TOKEN} the dashboard's token, or
{TOKEN}_FILE the name of its file.
"""
COMMANDS = ("/new", "/quit")
# What is not printable to Python, but has no effect on a terminal: lines, tabs, joined characters.
HARMLESS = "\n\t\u200c\u200d"
# A router notes a request just after its answer has ended.
NOTED_WITHIN_S = 1.5
POLL_S = 0.1
ENGINE_TIMEOUT_S = 1.0


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(PROGRAM, DESCRIPTION)
    add = parser.add_argument
    parser.add_router_url()
    add("--model", metavar="NAME", help="default: the first that the router serves")
    add("--api-key", metavar="KEY", help=f"default: the variable {API_KEY}, which ps does not show")
    count, seconds = number_in(1, 1e9, int), number_in(0.001, 1e6, unit="s")
    add("--max-tokens", type=count, default=1024, metavar="N", help="of an answer (1024 tokens)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest")
    add("--timeout", type=seconds, default=300.0, metavar="SECONDS", help="longest pause (300 s)")
    add("--once", metavar="TEXT", help="send this message, print the answer and exit")
    options = parser.parse_args(argv)
    return parser.run(lambda: _chat(options))


def _chat(options: argparse.Namespace) -> int:
    url = router_url(options.url).removesuffix("/v1")
    if options.once is not None and not options.once.strip():
        raise UsageError("--once: the message is empty")
    headers = key_headers(os.environ, options.api_key)
    # A terminal may lack a character of the answer, and a file may not be text.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    model = options.model or first_model(url, headers)
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    conversation = Conversation(url, model, headers, fields, options.timeout)
    chat = ChatPrinter(conversation, RequestRoutes(url))
    if options.once is not None:
        chat.answer(options.once)
        return 0
    if sys.stdin is None or not sys.stdin.isatty():
        return chat.answer_lines(sys.stdin or ())
    return chat.talk()


class ChatPrinter:
    """Prints answers, and a line about each."""

    def __init__(self, conversation: Conversation, routes: RequestRoutes) -> None:
        self._conversation = conversation
        self._routes = routes
        self._was_hinted = False

    def talk(self) -> int:
        """Read messages from a terminal until the user ends the chat."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 # gives input() a history and editing
        where = f"{self._conversation.model} at {self._conversation.url}"
        self._note(f"{where}; /new begins another conversation, /quit ends")
        while True:
            try:
                message = _read_message()
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:
                print(file=sys.stderr)
                raise
            if message == "/quit":
                return 0
            if message == "/new":
                self._conversation = self._conversation.begin_anew()
                self._note("a new conversation")
            elif message.startswith("/") and len(message.split()) == 1:
                self._note(f"unknown command {message}{did_you_mean(message, COMMANDS)}")
            elif message:
                try:
                    self.answer(message)
                except KeyboardInterrupt:
                    print(flush=True)
                    self._note("stopped; Ctrl-C once more ends the chat")
                except CommandError as error:
                    print(f"{PROGRAM}: error: {error}", file=sys.stderr)

    def answer_lines(self, lines: Sequence[str] | Iterator[str]) -> int:
        """Answer each line, up to /quit. Raises CommandError."""
        for line in lines:
            message = line.strip()
            if message == "/quit":
                break
            if message:
                self.answer(message)
        return 0

    def answer(self, message: str) -> None:
        """Print the answer to a message and the line about it. Raises CommandError."""
        conversation = self._conversation
        try:
            with closing(conversation.ask(message)) as pieces:
                for piece in pieces:
                    print(shown(piece), end="", flush=True)
        except CommandError as error:
            if conversation.answer.text:
                print(flush=True)
            name = conversation.answer.request_id
            request = f" (request {visible(name)})" if name else ""
            raise CommandError(f"{visible(str(error))}{request}") from None
        print(flush=True)
        route = map(visible, self._routes.find(conversation.answer.request_id))
        self._note(", ".join([*parts(conversation), *route]))
        if self._routes.hint and not self._was_hinted:
            self._was_hinted = True
            self._note(self._routes.hint)

    def _note(self, text: str) -> None:
        """Print a dim line to standard error, broken between words where the terminal ends."""
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            width = max(20, columns_of(sys.stderr) - 1)
            text = textwrap.fill(text, width, break_on_hyphens=False)
        print(paint_for(sys.stderr)(text, DIM), file=sys.stderr, flush=True)


def _read_message() -> str:
    if sys.stdout is not None and sys.stdout.isatty():
        return input("> ").strip()
    print("> ", end="", file=sys.stderr, flush=True)
    return input().strip()


def parts(conversation: Conversation) -> Iterator[str]:
    """Yield what is known of the latest answer without the router's help."""
    answer = conversation.answer
    prompt = count_in(answer.usage, "prompt_tokens")
    cached = count_in(answer.usage.get("prompt_tokens_details"), "cached_tokens")
    if answer.first is None:
        yield "an answer without text"
    else:
        yield f"TTFT {time_text(answer.first - answer.asked)}"
    if answer.tokens_per_second is not None:
        yield f"{answer.tokens_per_second:.1f} tokens/s"
    if prompt is not None and cached is None:
        yield f"{prompt} prompt tokens"
    elif prompt is not None:
        yield f"{cached} of {prompt} prompt tokens from a cache"
    if answer.finish_reason == "length":
        yield f"ended by --max-tokens {conversation.fields['max_tokens']}"


def shown(text: str) -> str:
    """Escape characters that could drive a terminal; keep lines, tabs and all that is written."""
    if text.isprintable():
        return text
    return "".join(
        one if one in HARMLESS or unicodedata.category(one) == "Zs" else visible(one)
        for one in text
    )


@dataclass(slots=True)
class RequestRoutes:
    """Finds the routes of requests at the router `url`. What does not answer is not asked again."""

    url: str
    hint: str = ""
    """Why routes are not known, for a person; empty if they are."""
    _unreachable: set[str] = field(default_factory=set)

    def find(self, request_id: str) -> list[str]:
        """Return the parts of a line about the request's route; [] if it is not known."""
        if self.hint or not request_id:
            return []
        latest = time.monotonic() + NOTED_WITHIN_S
        while True:
            try:
                found = find_request(self.url, request_id)
            except UnknownRequestError:
                if time.monotonic() > latest:
                    return []
                time.sleep(POLL_S)
            except CommandError as error:
                self.hint = f"engines are not known: {error}"
                return []
            else:
                return list(self._parts(found, request_id))

    def _parts(self, found: Mapping[str, Any], request_id: str) -> Iterator[str]:
        prefiller, decoder = found.get("prefiller"), found.get("decoder")
        if prefiller:
            yield f"prefill {prefiller}"
        if decoder:
            yield f"decode {decoder}"
        if why := found.get("without_transfer"):
            yield f"no KV moved ({str(why).replace('_', ' ')})"
        elif prefiller and decoder:
            moved = self._transfer(request_id, str(decoder), str(prefiller))
            if moved is None:
                yield "KV offered"
            else:
                yield f"KV moved ({moved.blocks} block{'' if moved.blocks == 1 else 's'})"
        if times := found.get("resumes"):
            often = "" if times == 1 else f" {times} times"
            yield f"resumed on another engine{often}"

    def _transfer(self, request_id: str, decoder: str, prefiller: str) -> Transfer | None:
        """Return what a decode engine has read, or a prefill engine written."""
        digest = hash_request_id(request_id)
        for engine, operation in ((decoder, "READ"), (prefiller, "WRITE")):
            if engine in self._unreachable:
                continue
            try:
                url = f"http://{engine}{LEASES_PATH}"
                answer = asyncio.run(send("GET", url, timeout_s=ENGINE_TIMEOUT_S))
            except CommandError:
                self._unreachable.add(engine)
                continue
            content = parse_object(answer.content)
            if answer.status_code != 200 or content is None:
                self._unreachable.add(engine)
                continue
            moved = parse_transfers(content, time.monotonic()).transfers.get((operation, digest))
            if moved is not None:
                return moved
        return None
