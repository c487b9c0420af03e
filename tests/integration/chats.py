"""Many chats at once, of several turns each, in token ids. When all have ended, each answer is
compared with that of one engine alone."""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

import httpx

from router.fleet.engine import BOTH, DECODE, PREFILL
from router.fleet.fleet import Fleet
from router.settings import Settings
from tests.integration.oracle import NOISE, Answer, body_of, complete, differences, tokens_of
from tests.integration.processes import Server, wait_for

AT_ONCE = 8
TIMEOUT_S = 120
TURNS = 3
TARGET_ITL_S = 30.0
"""No step of the tests' engines takes as long."""
PROMPTS_BESIDE = count(1)


@dataclass(frozen=True)
class Shape:
    """The most tokens of a chat's first prompt, and of a later one; and the tokens of an answer."""

    first: int
    later: int
    answer: int


LONG_PROMPTS = Shape(first=700, later=250, answer=6)
LONG_ANSWERS = Shape(first=60, later=30, answer=90)


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    answer: Answer


@dataclass
class Chats:
    """Chats with one router. Every other chat streams. `before_turn` is called before each turn."""

    client: httpx.AsyncClient
    before_turn: Callable[[], None] = lambda: None
    asked: list[Asked] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Turns that were answered with an error; such a chat ends."""
    num: int = 0
    """Chats that have begun."""

    async def hold(self, *shapes: Shape) -> None:
        """Hold a chat of each shape, AT_ONCE at once."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, shape: Shape) -> None:
            async with places:
                await self._hold_one(number, shape)

        numbers = range(self.num, self.num + len(shapes))
        self.num += len(shapes)
        await asyncio.gather(*map(one, numbers, shapes))

    async def _hold_one(self, number: int, shape: Shape) -> None:
        lengths = random.Random(number)
        prompt = tokens_of(lengths.randint(shape.first // 2, shape.first), 10 * number)
        for turn in range(TURNS):
            self.before_turn()
            answer = await self._say(f"chat-{number}", prompt, shape.answer, number % 2 == 1)
            if answer is None:
                return
            self.asked.append(Asked(prompt, shape.answer, answer))
            more = tokens_of(lengths.randint(1, shape.later), 10 * number + turn + 1)
            prompt = [*prompt, *answer.tokens, *more]

    async def _say(self, name: str, prompt: list[int], most: int, stream: bool) -> Answer | None:
        fields = {"conversation_id": name, "max_tokens": most, "stream": stream}
        body = body_of(prompt, fields)
        try:
            response = await self.client.post("/v1/completions", json=body, timeout=TIMEOUT_S)
            if response.status_code == 200:
                text = response.text
                return Answer.in_events(text) if stream else Answer.in_body(response.json())
            self.problems.append(f"{name}: {response.status_code} {response.text}")
        except (httpx.HTTPError, ValueError) as error:
            self.problems.append(f"{name}: {error!r}")
        return None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(one.prompt) for one in self.asked)

    def find_wrong(self, alone: Server) -> list[str]:
        """Return the problems, and a line for each answer that differs from one engine's alone."""
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda one: compare(alone, one), self.asked)
            return [*self.problems, *(line for lines in found for line in lines)]


def compare(alone: Server, one: Asked) -> list[str]:
    """Return a line if the answer differs from that of `alone`. Where it has another token that is
    as likely up to float noise, what follows is compared with what `alone` answers after that."""
    right, got = complete(alone, one.prompt, one.max_tokens), one.answer
    pairs = enumerate(zip(right.tokens, got.tokens, strict=True))
    at = next((at for at, (token, other) in pairs if token != other), None)
    if at is None or abs(right.logprobs[at] - got.logprobs[at]) > NOISE:
        return differences([right], [got])
    parts = [Answer(each.tokens[:at], each.logprobs[:at], "") for each in (right, got)]
    found, at = differences(parts[:1], parts[1:]), at + 1
    if at < len(got.tokens):
        rest = Answer(got.tokens[at:], got.logprobs[at:], "")
        found += compare(alone, Asked([*one.prompt, *got.tokens[:at]], len(rest.tokens), rest))
    return found


def measure_steps(server: Server) -> None:
    """Send an engine prompts until it reports the time of its steps."""

    def is_measured() -> bool:
        for length in (20, 100, 250, 700):
            complete(server, tokens_of(length, 1_000_000 + next(PROMPTS_BESIDE)))
        return "step_model" in server.get("/disagg/identity").json()["ranks"][0]

    wait_for(is_measured, f"{server.name} knows the times of its steps", 300)


def settings_for(engines: Sequence[Server], **changes: object) -> Settings:
    """Return the settings of a router for these engines of both roles."""
    hosts, ports = ("127.0.0.1",) * len(engines), tuple(server.port for server in engines)
    wanted: dict[str, object] = {
        "prefiller_hosts": hosts,
        "prefiller_ports": ports,
        "decoder_hosts": hosts,
        "decoder_ports": ports,
        "target_itl": TARGET_ITL_S,
        "health_interval": 0.5,
        "health_timeout": 10.0,
    }
    return Settings.model_validate(wanted | changes)


def mover_of(fleet: Fleet) -> Callable[[], None]:
    """Return a function that places legs in another way from then on, at random: by cost, or with
    one or more engines that prefer prompts."""
    chance = random.Random(1)

    def move() -> None:
        names = [engine.name for engine in fleet.engines]
        chance.shuffle(names)
        num_prefillers = chance.randrange(len(names))
        others = DECODE if num_prefillers else BOTH
        roles = {
            name: (PREFILL if at < num_prefillers else others, "a test")
            for at, name in enumerate(names)
        }
        fleet.prefer_roles(roles, frozenset() if num_prefillers else fleet.groups)

    return move
