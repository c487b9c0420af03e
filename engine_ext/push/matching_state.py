"""The records and tables of P's matcher: offers, registrations, request names and tombstones.

Decode engines and clients choose the names and the number of requests. So every table has a limit,
and a sender that reaches it loses its own entries and no other sender's (`FairTable`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from engine_ext.common.latest import keep_latest
from engine_ext.common.orders import PushOffer
from engine_ext.common.request_names import names_of, stock_names_of
from engine_ext.common.types import PeerAddress, num_blocks_in
from engine_ext.wire.notifications import PushRegistered, Withdraw

K = TypeVar("K")
V = TypeVar("V")


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
    """Why a registration may wait in vain, and when it is refused if no offer has come."""

    reason: str
    until: float


@dataclass(slots=True)
class Registered:
    """A registration that arrived."""

    message: PushRegistered
    sender: str
    deadline: float
    """No WRITE begins after this, by our clock. D sets it where it runs our extension."""
    came_at: float
    """By our clock."""
    trusts_request_ids: bool = False
    doubt: Doubt | None = None

    def fits(self, offer: PushOffer) -> bool:
        """The content is the same, as far as D sent a digest."""
        return self.message.disagg is None or self.message.disagg.digest == offer.digest

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which P may have the request, the most certain first."""
        name, transfer_id = self.message.request_id, self.message.transfer_id
        if self.message.disagg is None:
            return stock_names_of(name, transfer_id, self.trusts_request_ids)
        return names_of(name, transfer_id, self.message.disagg.remote_request_id)

    @property
    def generation(self) -> int:
        return self.message.disagg.generation if self.message.disagg else 0

    @property
    def num_ids(self) -> int:
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
    """Return the names to remember of a request that ended. The router uses a transfer id once; all
    other names come back when it tries again."""
    return names if transfer_id is None else names[:1]


def means_another(wanted: str | None, offered: str | None) -> bool:
    """D's transfer id names another offer than the one with this id. Two attempts of one request
    share the request id, not the transfer id. vLLM 0.32 sends none: it means any."""
    return wanted is not None and wanted != offered


@dataclass(slots=True)
class HeldOffer:
    """An offer. From its first match on, its blocks stay until the end is reported. The blocks of a
    partial offer are those of the running request."""

    offer: PushOffer
    is_partial: bool = False
    request: RequestKey | None = None
    """The request of D that it is written to, once one rank of D has registered."""
    senders: set[str] = field(default_factory=set)
    """Agents of D that have registered, or left."""
    num_readers: int = 1
    num_writing: int = 0
    deadline: float = 0.0
    """Until when the other ranks may register."""

    @property
    def is_complete(self) -> bool:
        return self.request is not None and len(self.senders) >= self.num_readers

    def may_serve(self, registered: Registered) -> bool:
        if self.request is None:
            is_known = registered.message.disagg is not None or not self.is_partial
            return is_known and self.may_be_meant(registered) and registered.fits(self.offer)
        return self.request == registered.request and registered.sender not in self.senders

    def may_be_meant(self, registered: Registered) -> bool:
        """Names and transfer ids do not exclude it."""
        is_other = means_another(registered.key.transfer_id, self.offer.transfer_id)
        return self.request is None and not is_other

    def is_for(self, message: Withdraw) -> bool:
        """D's withdrawal means this offer."""
        if self.request is None:
            return not means_another(message.transfer_id, self.offer.transfer_id)
        withdrawn = RequestKey(self.request.engine_id, message.request_id, message.transfer_id)
        return self.request == withdrawn


class NameTable(Generic[K]):
    """Keys by several names. Keys may share a name, because clients choose names."""

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
        """Return keys, those with the most certain name first; of those that share a name, the
        latest first."""
        found = (key for name in names for key in reversed(self._keys_of.get(name, {})))
        return list(dict.fromkeys(found))

    def oldest(self, names: tuple[str, ...]) -> K | None:
        """Return the oldest key with the most certain name that is known."""
        keys = next((self._keys_of[name] for name in names if name in self._keys_of), ())
        return next(iter(keys), None)

    def remove(self, key: K) -> None:
        for name in self._names.pop(key, ()):
            del self._keys_of[name][key]
            if not self._keys_of[name]:
                del self._keys_of[name]


class Tombstones:
    """Names of requests that ended without their counterpart, for `seconds` or as `add` says."""

    LIMIT = 8192

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, names: tuple[str, ...], now: float, seconds: float | None = None) -> None:
        until = now + (self._seconds if seconds is None else seconds)
        for name in names:
            keep_latest(self._until, name, until, self.LIMIT)

    def take(self, names: tuple[str, ...], now: float) -> bool:
        """Forget these names. Return whether one of them was here."""
        found = [name for name in names if self._until.get(name, now) > now]
        for name in found:
            del self._until[name]
        return bool(found)

    def has(self, names: tuple[str, ...], now: float) -> bool:
        return any(self._until.get(name, now) > now for name in names)


class FairTable(Generic[K, V]):
    """Values by sender and key, bounded for each sender and in all. A sender with too many entries
    loses its own oldest one; where there are too many in all, the sender with most does. So a
    sender with less than an even share loses none because of another."""

    LIMIT = 16384
    LIMIT_BY_SENDER = 4096

    def __init__(self) -> None:
        self._by_sender: dict[str, OrderedDict[K, V]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[V]:
        """Iterate over a snapshot of the values."""
        return iter(list(chain.from_iterable(one.values() for one in self._by_sender.values())))

    def find(self, sender: str, key: K) -> V | None:
        values = self._by_sender.get(sender)
        return None if values is None else values.get(key)

    def add(self, sender: str, key: K, value: V) -> V | None:
        """Add or replace a value. Return the value that had to make room, if any."""
        values = self._by_sender.setdefault(sender, OrderedDict())
        self._size += key not in values
        values[key] = value
        if len(values) > self.LIMIT_BY_SENDER:
            return self._pop_oldest(sender)
        if self._size > self.LIMIT:
            return self._pop_oldest(max(self._by_sender, key=lambda one: len(self._by_sender[one])))
        return None

    def pop(self, sender: str, key: K) -> V | None:
        values = self._by_sender.get(sender)
        if values is None or key not in values:
            return None
        value = values.pop(key)
        self._size -= 1
        if not values:
            del self._by_sender[sender]
        return value

    def _pop_oldest(self, sender: str) -> V | None:
        return self.pop(sender, next(iter(self._by_sender[sender])))


class BoundedRegistrations:
    """Registrations by key. `has_room_for` is asked before `add`."""

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
        """Iterate over a snapshot."""
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
        """Return whether it waits already; then it is kept for longer."""
        waiting = self._by_key.get(registered.key)
        if waiting is None:
            return False
        waiting.deadline = max(waiting.deadline, registered.deadline)
        return True

    def add(self, registered: Registered) -> None:
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

    def discard(self, key: RegistrationKey) -> None:
        if key in self:
            self.pop(key)


class RegistrationTable(BoundedRegistrations):
    """Registrations that wait for an offer. Those of one request's ranks are found together."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[RequestKey, dict[str, RegistrationKey]] = {}
        """By sender, the latest."""
        self._names: NameTable[RequestKey] = NameTable()

    def add(self, registered: Registered) -> None:
        super().add(registered)
        self._ranks.setdefault(registered.request, {})[registered.sender] = registered.key
        self._names.add(registered.request, registered.names)

    def pop(self, key: RegistrationKey) -> Registered:
        registered = super().pop(key)
        ranks = self._ranks.get(registered.request, {})
        if ranks.get(key.sender) == key:
            del ranks[key.sender]
            if not ranks:
                del self._ranks[registered.request]
                self._names.remove(registered.request)
        return registered

    def named(self, names: tuple[str, ...], transfer_id: str | None) -> list[list[Registered]]:
        """Return what the ranks of each request with one of these names have registered."""
        return [
            [self[key] for key in self._ranks[request].values()]
            for request in self._names.find(names)
            if not means_another(request.transfer_id, transfer_id)
        ]

    def pop_all(self, registered: list[Registered]) -> list[Registered]:
        return [self.pop(one.key) for one in registered]

    def pop_everything(self) -> list[Registered]:
        return [self.pop(one.key) for one in self]

    def pop_ranks(self, registered: Registered) -> list[Registered]:
        """Pop it, and what the other ranks of its request have registered."""
        others = self._ranks.get(registered.request, {}).values()
        return [self.pop(key) for key in dict.fromkeys((registered.key, *others))]

    def doubtful(self, now: float) -> list[tuple[Registered, Doubt]]:
        """Return those that are to be refused now, and why."""
        waiting = [(one, one.doubt) for one in self if one.doubt is not None]
        return [(one, doubt) for one, doubt in waiting if doubt.until <= now]

    def pop_due(self, now: float) -> list[Registered]:
        due = [one.key for one in self if one.deadline <= now]
        return [self.pop(key) for key in due]
