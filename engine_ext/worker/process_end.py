"""How a process ends that has used NIXL.

NIXL's wheel (1.5.1) brings copies of libnl and libibverbs. Where the distribution's RDMA user
libraries are installed, UCX loads those as well, and the two copies destroy each other's objects in
their exit handlers: the process ends with signal 11 instead of its status.

    Python's shutdown (threads, atexit, buffers) --> C: our handler, which ends the process
                                                          (the handlers of libraries do not run)

So our C handler is registered last, and C runs the handlers in reverse order. It gets the process's
status, and everything that Python does at its end is done by then.
"""

import atexit
import ctypes
import functools


@functools.cache
def skip_library_exit_handlers() -> None:
    """End this process with its own status, without the exit handlers of native libraries.

    Without glibc's `on_exit` this does nothing.
    """
    # Python runs the callback that was registered first at the end: libraries loaded until then
    # have registered their handlers.
    atexit.register(_end_before_libraries)


def _end_before_libraries() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.fflush(None)  # UCX logs through C's buffers, which nothing flushes later.
        libc.on_exit(libc._exit, None)
