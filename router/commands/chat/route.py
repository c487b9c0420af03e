"""Which engines answered a request, and whether KV moved between them.

A router that serves the dashboard (--ui) knows the engines of its last requests. Whether KV moved
is what the engines report, if they can be reached from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.commands.console import CommandError
from router.commands.router_client import send
from router.commands.why import UnknownRequestError, find_request
from router.openai.answers import parse_object
from router.ui.transfers import Transfer, hash_request_id, parse_transfers

LEASES_PATH = "/disagg/leases"
# A router notes a request just after its answer has ended.
NOTED_WITHIN_S = 1.5
POLL_S = 0.1
ENGINE_TIMEOUT_S = 1.0


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
