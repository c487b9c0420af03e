"""What the one who breaks things asks and says, besides the load."""

import asyncio
import json
from typing import Any

from scripts.bench.errors import BenchError

PATIENCE = 5.0


class AnswerError(BenchError):
    """None, or none that can be read."""


async def is_ok(port: int, path: str) -> bool:
    try:
        status, _ = await _exchange(port, "GET", path)
    except (OSError, AnswerError):
        return False
    return status == 200


async def post(port: int, path: str, content: bytes = b"") -> Any:
    """Raises AnswerError."""
    try:
        status, body = await _exchange(port, "POST", path, content)
    except OSError as error:
        raise AnswerError(f"{path} is not answered: {error!r}") from error
    if status != 200:
        raise AnswerError(f"{path} answers {status}")
    return json.loads(body)


async def _exchange(port: int, method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            return await _read(reader)
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _length(head)
        return int(head.split()[1]), await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ValueError, IndexError) as error:
        raise AnswerError(f"no HTTP: {error}") from error


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
