"""An object that lives in a process of its own and does what it is told, one call at a time."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from scripts.bench.errors import ActorError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

CALL_SECONDS = 300.0


class Actor(Generic[T]):
    """`Actor(Thing, argument)` makes a Thing elsewhere; `actor.call(Thing.method, argument)`.

    Processes come from a fork server that has imported NIXL, which takes seconds, and nothing else.
    """

    def __init__(self, make: Callable[..., T], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["scripts.transfer_bench.throughput"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(CALL_SECONDS)

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Raises ActorError."""
        self.tell(method, *args, **kwargs)
        answer: R = self._answer(CALL_SECONDS)
        return answer

    def tell(
        self, method: Callable[Concatenate[T, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """As `call`, whose answer `collect` waits for."""
        try:
            self._pipe.send((method, args, kwargs))
        except OSError as error:
            raise ActorError(f"the process is gone: {error}") from None

    def collect(self) -> Any:
        return self._answer(CALL_SECONDS)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=10)

    def __enter__(self) -> "Actor[T]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise ActorError(f"no answer within {seconds:g} s")
            good, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise ActorError("the process is gone") from None
        if not good:
            raise ActorError(answer)
        return answer


def _serve(pipe: "Connection[Any, Any]", make: Callable[..., Any], arguments: tuple[Any]) -> None:
    """Until the other end closes. The object's `close`, if it has one, is called last."""
    thing: Any = None
    try:
        thing = make(*arguments)
        pipe.send((True, None))
        while True:
            method, args, kwargs = pipe.recv()
            pipe.send((True, method(thing, *args, **kwargs)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception:
        pipe.send((False, traceback.format_exc()))
    finally:
        if hasattr(thing, "close"):
            thing.close()
