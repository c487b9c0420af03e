"""Run a blocking function in a daemon thread, which does not delay the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def call_in_daemon_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns. Neither a cancelled caller nor the end of the process waits
    for it, as they do for the threads of `asyncio.to_thread`."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a cancelled caller does not cancel it

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
