"""SGLang's engines as far as a router sees them (read in SGLang 0.5.23), without a model.

A prefill and a decode engine meet in a room: the host and port of the prefill engine's bootstrap
server, and a number. Either waits there for the other. Files of SGLang that say so:

    srt/managers/io_struct.py           rooms and rids of several prompts (GenerateReqInput)
    srt/managers/tokenizer_manager.py   aborts, duplicate rids, ranks that do not exist
    srt/managers/scheduler.py           a request without a room; an abort ends all rids beneath it
    srt/disaggregation/common/conn.py   a room that is used twice, a rank that is not the room's
    srt/disaggregation/decode.py        where the decode engine looks for the prefill engine's rank
    srt/entrypoints/openai/             shapes of answers and errors
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from scripts.mock_engine import DONE, MockEngine, Peer, Received

MAX_ROOM = (1 << 63) - 1
PREFILL, DECODE, NULL = "prefill", "decode", "null"
Json = dict[str, Any]
# Host, port, room and the prefill engine's data-parallel rank.
RoomKey = tuple[str, int, int, int]


class RefusedError(Exception):
    """`by_tokenizer`: it is found before a stream begins, else it is an event of the stream."""

    def __init__(self, message: str, status: int = 400, by_tokenizer: bool = False) -> None:
        super().__init__(message)
        self.status, self.by_tokenizer = status, by_tokenizer


@dataclass
class Room:
    came: set[str] = field(default_factory=set)
    both: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Leg:
    """A request of one prompt, as the scheduler has it."""

    rid: str
    room: Room | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class Rooms:
    """Where the legs of a test's engines meet. `dp_size` is that of the prefill engines."""

    def __init__(self, dp_size: int = 1) -> None:
        self.dp_size = dp_size
        self.rooms: dict[RoomKey, Room] = {}

    def enter(self, key: RoomKey, mode: str) -> Room:
        room = self.rooms.setdefault(key, Room())
        if mode in room.came:
            raise RefusedError("Duplicate or cancelled bootstrap room", 500)
        room.came.add(mode)
        if len(room.came) == 2:
            room.both.set()
        return room


class SGLangEngine:
    """Makes a mock engine one of SGLang, in one of its disaggregation modes."""

    def __init__(self, engine: MockEngine, mode: str, rooms: Rooms, port: int = 8998) -> None:
        self.engine, self.mode, self.rooms, self.port = engine, mode, rooms, port
        self.dp_size = dp_size = rooms.dp_size
        self.legs: dict[str, Leg] = {}
        """The waiting and running legs, by rid."""
        self.aborted: list[str] = []
        self.tokens = ["a", "b"]
        """The answer to each prompt."""
        engine.usual = self.answer
        engine.listing = self._list_models
        # A part of the real pages: they have every argument of the server.
        info = {
            "model_path": "/mnt/models",
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": port,
            "dp_size": dp_size,
            "load_balance_method": "follow_bootstrap_room" if mode == PREFILL else "round_robin",
            "max_total_num_tokens": 5000,
            "internal_states": [{}] * dp_size,
            "version": "0.5.23",
            "frontend": "python",
        }
        model = {"model_path": "/mnt/models", "is_generation": True, "disaggregation_mode": mode}
        engine.pages = {
            "/server_info": json.dumps(info).encode(),
            "/model_info": json.dumps(model).encode(),
            "/metrics": b'sglang:max_total_num_tokens{model_name="m"} 5000\n',
        }

    @property
    def bodies(self) -> list[Json]:
        """The bodies of the legs that it got."""
        return [one.json for one in self.engine.requests if one.path.startswith("/v1/")]

    async def answer(self, request: Received, peer: Peer) -> None:
        if request.path == "/abort_request":
            self._abort(request.json["rid"])
            return await peer.answer(b"")
        is_stream = request.json.get("stream") is True
        legs: list[Leg] = []
        try:
            self._check(request)
            self._add_legs(request, legs)
            if not await self._meet(legs, peer):
                return peer.close()
        except RefusedError as refused:
            kind = "BadRequest" if refused.status == 400 else str(refused.status)
            error: Json = {"object": "error", "message": str(refused), "type": kind}
            error |= {"param": None, "code": refused.status}
            if is_stream and not refused.by_tokenizer:
                data = json.dumps({"error": error}).encode()
                return await peer.stream(b"data: %b\n\n" % data, DONE)
            return await peer.answer(error, refused.status)
        finally:
            for leg in legs:
                del self.legs[leg.rid]
        if is_stream:
            return await peer.stream(*self._events(request, len(legs)), DONE)
        return await peer.answer(self._whole(request, len(legs)))

    def _check(self, request: Received) -> None:
        body, room = request.json, request.json.get("bootstrap_room")
        if self.mode != NULL:
            if room is None:
                raise RefusedError("Disaggregated request received without bootstrap room id.")
            for name, kind in (("host", str), ("port", int), ("room", int)):
                if type(body.get(f"bootstrap_{name}")) is not kind:
                    raise RefusedError(f"bootstrap_{name} should be of {kind}", by_tokenizer=True)
        routed, hint = self._routed_rank(request), body.get("disagg_prefill_dp_rank")
        if routed is not None and not 0 <= routed < self.dp_size:
            text = f"routed_dp_rank={routed} out of range [0, {self.dp_size})"
            raise RefusedError(text, by_tokenizer=True)
        is_other = routed is not None and room is not None and routed != room % self.dp_size
        if self.mode == PREFILL and is_other and hint is None:
            raise RefusedError(f"follow_bootstrap_room conflict: dispatched to {routed}", 500)

    def _routed_rank(self, request: Received) -> int | None:
        header, body = request.header("x-data-parallel-rank"), request.json
        if header is not None:
            return int(header)
        routed: int | None = body.get("routed_dp_rank", body.get("data_parallel_rank"))
        return routed

    def _add_legs(self, request: Received, legs: list[Leg]) -> None:
        """Add the leg of each prompt, which enters its room."""
        body = request.json
        prompt: Any = body.get("prompt")
        is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
        count = len(prompt) if is_list else 1
        for at in range(count):
            rid = f"{body['rid']}_{at}" if is_list else body["rid"]
            if rid in self.legs:
                raise RefusedError(f"Duplicate request ID: {rid}", by_tokenizer=True)
            legs.append(Leg(rid))
            self.legs[rid] = legs[-1]
            if self.mode == NULL:
                continue
            number = body["bootstrap_room"] + at
            if number > MAX_ROOM:
                raise RefusedError("Expected `int` of 64 bits", by_tokenizer=True)
            if self.mode == PREFILL:
                port, rank = self.port, self._routed_rank(request)
            else:
                port, rank = body["bootstrap_port"], body.get("disagg_prefill_dp_rank")
            if rank is None:
                rank = number % self.rooms.dp_size
            key = (body["bootstrap_host"], port, number, rank)
            for _ in range(body.get("n") or 1):  # all answers to one prompt are in its room
                legs[-1].room = self.rooms.enter(key, self.mode)

    async def _meet(self, legs: list[Leg], peer: Peer) -> bool:
        """Wait until all legs have met their peers. Return False if the router has left."""
        rooms = [leg.room for leg in legs if leg.room is not None]
        left: asyncio.Future[Any] = asyncio.ensure_future(peer.connection.left.wait())
        met: asyncio.Future[Any] = asyncio.gather(*(room.both.wait() for room in rooms))
        aborts = [asyncio.ensure_future(leg.aborted.wait()) for leg in legs]
        try:
            await asyncio.wait([met, left, *aborts], return_when=asyncio.FIRST_COMPLETED)
            if any(leg.aborted.is_set() for leg in legs):
                raise RefusedError("Prefill bootstrap failed: Aborted by AbortReq.", 500)
            return not left.done()
        finally:
            for task in [met, left, *aborts]:
                task.cancel()

    def _abort(self, rid: str) -> None:
        """The tokenizer takes only rids that it knows; the scheduler ends all that begin so."""
        if rid not in self.legs:
            return
        self.aborted.append(rid)
        for known, leg in self.legs.items():
            if known.startswith(rid):
                leg.aborted.set()

    def _texts(self) -> list[str]:
        """A prefill engine stops after one token by itself."""
        return self.tokens[:1] if self.mode == PREFILL else self.tokens

    def _whole(self, request: Received, count: int) -> Json:
        is_chat, text = "chat" in request.path, "".join(self._texts())
        reason = "length" if self.mode == PREFILL else "stop"
        message = {"role": "assistant", "content": text}
        said: Json = {"message": message} if is_chat else {"text": text}
        choices = [
            {"index": at, **said, "logprobs": None, "finish_reason": reason, "matched_stop": None}
            for at in range(count)
        ]
        done = len(self._texts())
        usage = {"prompt_tokens": 9, "completion_tokens": done, "total_tokens": 9 + done}
        kind = "chat.completion" if is_chat else "text_completion"
        return {
            "id": request.json["rid"],
            "object": kind,
            "created": 1,
            "model": "m",
            "choices": choices,
            "usage": usage,
            "metadata": {"weight_version": "default"},
        }

    def _events(self, request: Received, count: int) -> list[bytes]:
        is_chat, events = "chat" in request.path, []
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        last = len(self._texts()) - 1
        for at, text in enumerate(self._texts()):
            delta = {"role": "assistant", "content": text}
            said: Json = {"delta": delta} if is_chat else {"text": text}
            said |= {"logprobs": None, "finish_reason": "stop" if at == last else None}
            for index in range(count):
                content: Json = {"id": request.json["rid"], "object": kind, "created": 1}
                content |= {"model": "m", "choices": [{"index": index} | said], "usage": None}
                events.append(b"data: %b\n\n" % json.dumps(content).encode())
        return events

    async def _list_models(self, request: Received, peer: Peer) -> None:
        card = {"id": "m", "object": "model", "created": 1, "owned_by": "sglang", "root": "m"}
        card |= {"parent": None, "max_model_len": 4096}
        await peer.answer({"object": "list", "data": [card]})
