"""One request's outputs on their way from the engine's thread to an event loop."""

import asyncio
from collections.abc import Iterable

from engine_ext.reference.messages import RequestOutput


class OutputStream:
    """`put` and `get` belong to the loop's thread. What came while the consumer was busy is
    handed over as one output, so a slow consumer costs no more than the answer itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pending: list[RequestOutput] = []
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._pending.append(output)
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        outputs, self._pending = self._pending, []
        return merge(outputs)


Delivery = tuple[OutputStream, RequestOutput]


def deliver(deliveries: Iterable[Delivery]) -> None:
    """From any thread: one wake-up per loop, however many streams have news."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
    for stream, output in deliveries:
        by_loop.setdefault(stream.loop, []).append((stream, output))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, batch)
        except RuntimeError:  # The loop is closed: nobody is left to read.
            continue


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """`outputs` of one request, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        kv_transfer_params=last.kv_transfer_params,
        num_cached_tokens=last.num_cached_tokens,
        error=last.error,
        load_failure=last.load_failure,
    )


def _put_all(batch: list[Delivery]) -> None:
    for stream, output in batch:
        stream.put(output)
