"""Work that is too much for the event loop that serves requests, though it mostly waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine in a thread and a loop of its own. It has to end by itself: who waits for it
    may be cancelled, and the process may end, without it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = asyncio.run(make())
        except BaseException as error:
            tell(outcome.set_exception, error)
        else:
            tell(outcome.set_result, result)

    def tell(settle: Callable[[Any], None], value: object) -> None:
        def tell_now() -> None:
            if not outcome.done():  # nobody has stopped waiting
                settle(value)

        with contextlib.suppress(RuntimeError):  # the other loop is closed
            loop.call_soon_threadsafe(tell_now)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await outcome
