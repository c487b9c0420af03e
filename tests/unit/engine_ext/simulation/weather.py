"""What becomes of messages, transfers and processes from now on. Seconds; shares from 0 to 1."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weather:
    lose: float = 0.0
    """Share of messages that are lost."""
    copies: int = 1
    delay: float = 0.0
    spread: float = 0.0
    """Each message is late by up to this much more: they overtake each other."""
    transfer: float = 0.01
    """How long a READ or WRITE takes; its blocks move one by one in that time."""
    handshake: float = 0.01
    losses_at_most: int | None = None
    """In `Network.WINDOW` seconds. A number: a link with errors, not a wall."""
    late: float = 0.0
    """Share of messages that are late by up to `lateness`."""
    lateness: float = 180.0
    overrun: float = 0.0
    """Share of transfers that take up to `longest`."""
    longest: float = 120.0
    fail: float = 0.0
    """Share of transfers that stop after some of their blocks; NIXL says so."""
    never: float = 0.0
    """Share of transfers that stop after some of their blocks; NIXL never says so."""
    straggle: float = 0.0
    """Share of WRITEs that have failed of which something lands yet."""
    held: float = 0.0
    """Share of `discard`s of a running transfer that NIXL refuses; the others stop nothing."""
    lag: float = 0.0
    """Loops wake late by up to this much, and engines look at results as much later."""
    forget: float = 0.0
    """Share of an engine's steps in which the worker half's reports are lost."""
    flip: float = 0.0
    """Share of READs that bring a block other than it was sent."""
    swap: float = 0.0
    """Share of READs that bring two blocks in each other's place."""
    emulated: bool = False
    """A transfer needs both processes: while one is frozen it waits. Else a NIC moves it."""


CALM = Weather()
