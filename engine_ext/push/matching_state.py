"""What P's writer remembers: offers and registrations by name, how each ended, what is gone."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engine_ext.common.latest import keep_latest
from engine_ext.common.request_names import names_of, stock_names_of
from engine_ext.common.types import PeerAddress, PushOffer, num_blocks_in
from engine_ext.wire.notifications import PushDone, PushFailed, PushRegistered, Withdraw

K = TypeVar("K")


class RequestKey(NamedTuple):
    """What the registrations of all ranks of D for one request have in common."""

    engine_id: str
    request_id: str
    transfer_id: str | None


class RegistrationKey(NamedTuple):
    """One registration among all that were ever made."""

    sender: str
    request_id: str
    generation: int
    transfer_id: str | None


class Doubt(NamedTuple):
    """Why a registration may wait for nothing, and when it is refused if nothing has come."""

    reason: str
    until: float


@dataclass(slots=True)
class Registered:
    """A registration as it arrived: by which agent, and until when it is worth keeping."""

    message: PushRegistered
    sender: str
    deadline: float
    """By our clock, and D's word where it speaks our extension: no WRITE begins after this."""
    came_at: float
    """By our clock."""
    trusts_request_ids: bool = False
    doubt: Doubt | None = None

    def fits(self, offer: PushOffer) -> bool:
        """It is of the same content, as far as D says of which."""
        return self.message.disagg is None or self.message.disagg.digest == offer.digest

    @property
    def names(self) -> tuple[str, ...]:
        """What P may know the request by, most certain first."""
        name, transfer_id = self.message.request_id, self.message.transfer_id
        if self.message.disagg is None:
            return stock_names_of(name, transfer_id, self.trusts_request_ids)
        return names_of(name, transfer_id, self.message.disagg.remote_request_id)

    @property
    def generation(self) -> int:
        return self.message.disagg.generation if self.message.disagg else 0

    @property
    def num_ids(self) -> int:
        """Of blocks. A list of them costs what an id does."""
        block_ids = self.message.local_block_ids
        return num_blocks_in(block_ids) + len(block_ids)

    @property
    def key(self) -> RegistrationKey:
        message = self.message
        return RegistrationKey(
            self.sender, message.request_id, self.generation, message.transfer_id
        )

    @property
    def request(self) -> RequestKey:
        message = self.message
        return RequestKey(message.decode_engine_id, message.request_id, message.transfer_id)

    @property
    def address(self) -> PeerAddress:
        message = self.message
        return PeerAddress(
            message.decode_engine_id,
            message.decode_host,
            message.decode_port,
            message.decode_tp_size,
            message.disagg.pp_size if message.disagg else 1,
        )


def lasting(names: tuple[str, ...], transfer_id: str | None) -> tuple[str, ...]:
    """What to remember of a request that ended: the router's name for the transfer is used once,
    all others come back when it tries again."""
    return names if transfer_id is None else names[:1]


def are_different(transfer_id: str | None, other: str | None) -> bool:
    """Two attempts of one request share its id, not the transfer's."""
    return transfer_id is not None and other is not None and transfer_id != other


@dataclass(slots=True)
class HeldOffer:
    """An offer. From its first match on, its blocks are ours alone until the end is reported. A
    draft grows into one; its blocks are the running request's."""

    offer: PushOffer
    is_draft: bool = False
    request: RequestKey | None = None
    """Whose ranks it is written to, once one of them has registered."""
    senders: set[str] = field(default_factory=set)
    """Agents of D that have registered, or left."""
    num_readers: int = 1
    num_writing: int = 0
    deadline: float = 0.0
    """Until when the other ranks may register."""

    @property
    def is_complete(self) -> bool:
        """Nobody else will register."""
        return self.request is not None and len(self.senders) >= self.num_readers

    def may_serve(self, registered: Registered) -> bool:
        if self.request is None:
            is_known = registered.message.disagg is not None or not self.is_draft
            return is_known and self.may_be_meant(registered) and registered.fits(self.offer)
        return self.request == registered.request and registered.sender not in self.senders

    def may_be_meant(self, registered: Registered) -> bool:
        """As far as names say."""
        is_other = are_different(self.offer.transfer_id, registered.key.transfer_id)
        return self.request is None and not is_other

    def is_for(self, message: Withdraw) -> bool:
        """Whether D's withdrawal means this offer."""
        if self.request is None:
            return not are_different(self.offer.transfer_id, message.transfer_id)
        withdrawn = RequestKey(self.request.engine_id, message.request_id, message.transfer_id)
        return self.request == withdrawn


class NameTable(Generic[K]):
    """Things to be found by any of several names, each of which others may have, too: clients
    choose names."""

    def __init__(self) -> None:
        self._keys_of: dict[str, dict[K, None]] = {}
        self._names: dict[K, tuple[str, ...]] = {}

    def add(self, key: K, names: tuple[str, ...]) -> None:
        self.remove(key)
        self._names[key] = names
        for name in names:
            self._keys_of.setdefault(name, {})[key] = None

    def has(self, names: tuple[str, ...]) -> bool:
        return any(name in self._keys_of for name in names)

    def find(self, names: tuple[str, ...]) -> list[K]:
        """By the most certain name first; of those that share it, the last one to claim it."""
        found = (key for name in names for key in reversed(self._keys_of.get(name, {})))
        return list(dict.fromkeys(found))

    def oldest(self, names: tuple[str, ...]) -> K | None:
        """By the most certain name, the first one to claim it."""
        keys = next((self._keys_of[name] for name in names if name in self._keys_of), ())
        return next(iter(keys), None)

    def remove(self, key: K) -> None:
        for name in self._names.pop(key, ()):
            del self._keys_of[name][key]
            if not self._keys_of[name]:
                del self._keys_of[name]


class Tombstones:
    """Names of what ended without its counterpart, for so many seconds where `add` says no other.
    Bounded by number, too."""

    LIMIT = 8192

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, names: tuple[str, ...], now: float, seconds: float | None = None) -> None:
        until = now + (self._seconds if seconds is None else seconds)
        for name in names:
            keep_latest(self._until, name, until, self.LIMIT)

    def take(self, names: tuple[str, ...], now: float) -> bool:
        """True: one of the names ended a short while ago; it is forgotten now."""
        found = [name for name in names if self._until.get(name, now) > now]
        for name in found:
            del self._until[name]
        return bool(found)

    def has(self, names: tuple[str, ...], now: float) -> bool:
        return any(self._until.get(name, now) > now for name in names)


class Outcomes:
    """How registrations ended, for those who ask again. Who has too many forgets his own, the
    oldest first; where there are too many in all, it is who has most. So nobody who has fewer than
    an even share loses any because of another."""

    LIMIT = 16384
    LIMIT_BY_SENDER = 4096

    def __init__(self) -> None:
        self._answers: dict[str, OrderedDict[RegistrationKey, PushDone | PushFailed]] = {}
        self._num_answers = 0

    def __len__(self) -> int:
        return self._num_answers

    def add(self, key: RegistrationKey, answer: PushDone | PushFailed) -> None:
        answers = self._answers.setdefault(key.sender, OrderedDict())
        self._num_answers += key not in answers
        answers[key] = answer
        if len(answers) > self.LIMIT_BY_SENDER:
            self._forget_oldest(key.sender)
        elif len(self) > self.LIMIT:
            self._forget_oldest(max(self._answers, key=lambda name: len(self._answers[name])))

    def find(self, key: RegistrationKey) -> PushDone | PushFailed | None:
        answers = self._answers.get(key.sender)
        return None if answers is None else answers.get(key)

    def _forget_oldest(self, sender: str) -> None:
        answers = self._answers[sender]
        answers.popitem(last=False)
        self._num_answers -= 1
        if not answers:
            del self._answers[sender]


class RegisteredByKey:
    """By key; whoever adds asks first whether there is room, for each agent and in all."""

    LIMIT = 16384
    LIMIT_BY_SENDER = 2048
    LIMIT_IDS = 1 << 22
    LIMIT_IDS_BY_SENDER = 1 << 19
    """Eight million tokens in blocks of 16."""

    def __init__(self) -> None:
        self._by_key: dict[RegistrationKey, Registered] = {}
        self._num_by_sender: Counter[str] = Counter()
        self._ids_by_sender: Counter[str] = Counter()
        self._num_ids = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Registered]:
        """Of those that are there now, whatever becomes of them meanwhile."""
        return iter(list(self._by_key.values()))

    def __contains__(self, key: RegistrationKey) -> bool:
        return key in self._by_key

    def __getitem__(self, key: RegistrationKey) -> Registered:
        return self._by_key[key]

    def has_room_for(self, registered: Registered) -> bool:
        sender, num_ids = registered.sender, registered.num_ids
        return (
            len(self) < self.LIMIT
            and self._num_by_sender[sender] < self.LIMIT_BY_SENDER
            and self._num_ids + num_ids <= self.LIMIT_IDS
            and self._ids_by_sender[sender] + num_ids <= self.LIMIT_IDS_BY_SENDER
        )

    def refresh(self, registered: Registered) -> bool:
        """True: it waits already, and is worth keeping for longer now."""
        waiting = self._by_key.get(registered.key)
        if waiting is None:
            return False
        waiting.deadline = max(waiting.deadline, registered.deadline)
        return True

    def add(self, registered: Registered) -> None:
        """One that is not there yet."""
        self._by_key[registered.key] = registered
        self._num_by_sender[registered.sender] += 1
        self._ids_by_sender[registered.sender] += registered.num_ids
        self._num_ids += registered.num_ids

    def pop(self, key: RegistrationKey) -> Registered:
        registered = self._by_key.pop(key)
        self._num_ids -= registered.num_ids
        self._ids_by_sender[key.sender] -= registered.num_ids
        self._num_by_sender[key.sender] -= 1
        if not self._num_by_sender[key.sender]:
            del self._num_by_sender[key.sender], self._ids_by_sender[key.sender]
        return registered


class RegistrationTable:
    """Registrations that wait for an offer. Those of one request's ranks are found together."""

    def __init__(self) -> None:
        self._registered = RegisteredByKey()
        self._ranks: dict[RequestKey, dict[str, RegistrationKey]] = {}
        """By sender, the latest."""
        self._names: NameTable[RequestKey] = NameTable()

    def __len__(self) -> int:
        return len(self._registered)

    def __contains__(self, key: RegistrationKey) -> bool:
        return key in self._registered

    def has_room_for(self, registered: Registered) -> bool:
        return self._registered.has_room_for(registered)

    def refresh(self, registered: Registered) -> bool:
        return self._registered.refresh(registered)

    def add(self, registered: Registered) -> None:
        self._registered.add(registered)
        self._ranks.setdefault(registered.request, {})[registered.sender] = registered.key
        self._names.add(registered.request, registered.names)

    def pop(self, key: RegistrationKey) -> Registered:
        registered = self._registered.pop(key)
        ranks = self._ranks.get(registered.request, {})
        if ranks.get(key.sender) == key:
            del ranks[key.sender]
            if not ranks:
                del self._ranks[registered.request]
                self._names.remove(registered.request)
        return registered

    def named(self, names: tuple[str, ...], transfer_id: str | None) -> list[list[Registered]]:
        """Of each request that has one of these names, what its ranks have registered."""
        return [
            [self._registered[key] for key in self._ranks[request].values()]
            for request in self._names.find(names)
            if not are_different(request.transfer_id, transfer_id)
        ]

    def pop_all(self, registered: list[Registered]) -> list[Registered]:
        return [self.pop(one.key) for one in registered]

    def pop_everything(self) -> list[Registered]:
        return [self.pop(one.key) for one in self._registered]

    def pop_ranks(self, registered: Registered) -> list[Registered]:
        """It, and what the other ranks of its request have registered."""
        others = self._ranks.get(registered.request, {}).values()
        return [self.pop(key) for key in dict.fromkeys((registered.key, *others))]

    def doubtful(self, now: float) -> list[tuple[Registered, Doubt]]:
        """Those whose time to be refused has come, and why."""
        waiting = [(one, one.doubt) for one in self._registered if one.doubt is not None]
        return [(one, doubt) for one, doubt in waiting if doubt.until <= now]

    def pop_due(self, now: float) -> list[Registered]:
        due = [one.key for one in self._registered if one.deadline <= now]
        return [self.pop(key) for key in due]
