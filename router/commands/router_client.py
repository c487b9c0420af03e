"""Requests of commands to a router, and the URLs that people give for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from router.commands.connection_errors import no_answer
from router.commands.console import DEFAULT_URL, CommandError, UsageError
from router.openai.answers import parse_object
from router.settings import variable_of

API_KEY = "OPENAI_API_KEY"
ANSWER_TIMEOUT_S = 10.0
MAX_ROUTER_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_TEXT = 300
ENCODING_HEADERS = ("content-encoding", "content-length", "transfer-encoding")
tls_context = cache(partial(httpx.create_ssl_context, trust_env=False))


def ask_router(method: str, url: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Send a request and return the answer; not for use within an event loop.

    A whole answer takes at most ANSWER_TIMEOUT_S, however it is split, and MAX_ROUTER_ANSWER_BYTES.
    Raises CommandError.
    """
    return asyncio.run(send(method, url, headers))


async def send(
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float | None = None,
) -> httpx.Response:
    """Send a request as `ask_router` does, within an event loop. Raises CommandError."""
    timeout_s = timeout_s or ANSWER_TIMEOUT_S
    content = bytearray()
    # httpx' timeouts are for each read, so an answer in small pieces would never time out.
    client = httpx.AsyncClient(headers=headers, timeout=None, verify=tls_context(), trust_env=False)
    try:
        async with (
            client,
            asyncio.timeout(timeout_s),
            client.stream(method, url, content=body) as answer,
        ):
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MAX_ROUTER_ANSWER_BYTES:
                    raise CommandError(f"{url} sent more than {MAX_ROUTER_ANSWER_BYTES} bytes")
    except TimeoutError:
        raise CommandError(no_answer(url, None, timeout_s)) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # a host may be no name
        raise CommandError(no_answer(url, error, timeout_s)) from None
    decoded = [one for one in answer.headers.items() if one[0] not in ENCODING_HEADERS]
    return httpx.Response(answer.status_code, headers=decoded, content=bytes(content))


def key_headers(variables: Mapping[str, str], key: str | None = None) -> dict[str, str]:
    """Return the headers with the API key, by default the one in OPENAI_API_KEY; {} without a key.

    Raises UsageError.
    """
    name = API_KEY if key is None else "--api-key"
    key = variables.get(API_KEY, "") if key is None else key
    if not (key.isascii() and (key.isprintable() or not key)):
        raise UsageError(f"{name} is not a key: ASCII without line breaks")
    return {"authorization": f"Bearer {key}"} if key else {}


def first_model(url: str, headers: Mapping[str, str]) -> str:
    """Return the first model that the router at `url` serves. Raises CommandError."""
    answer = ask_router("GET", f"{url.rstrip('/')}/v1/models", headers)
    content = parse_object(answer.content) or {}
    if answer.status_code != 200 and "error" in content:
        raise CommandError(f"{url} answers {answer.status_code} {error_message(content)}")
    name = first_model_in(content).get("id")
    if not isinstance(name, str) or not name.isprintable():
        raise CommandError(f"{url} names no model: give one with --model")
    return name


def first_model_in(content: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the first model in an answer of /v1/models, {} if it has none."""
    models = (content or {}).get("data")
    first = models[0] if isinstance(models, list) and models else None
    return first if isinstance(first, dict) else {}


def error_message(content: Mapping[str, Any]) -> str:
    """Return the message of an error object in one line."""
    error = content.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or "").split())[:MAX_ERROR_TEXT]


def router_url(text: str) -> str:
    """Return the URL of a router that a person has given. Raises UsageError."""
    url = with_scheme(text).rstrip("/")
    parsed = http_url(url)
    if parsed is None or parsed.query or parsed.fragment:
        raise UsageError(f"{text!r} is not a router: give its URL, as in {DEFAULT_URL}")
    return url


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def http_url(text: str) -> httpx.URL | None:
    """Return the URL, or None for text that is not a URL of HTTP(S) with a host."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return None
    return url if url.scheme in ("http", "https") and url.host else None


def token_headers(setting: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with the token from the variable of a setting, or from the file that its
    -file variable names; {} if neither is set. Raises UsageError."""
    variable, file_variable = variable_of(setting), variable_of(f"{setting}_file")
    token = variables.get(variable) or None
    if token is None and variables.get(file_variable):
        path = Path(variables[file_variable])
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(f"{file_variable} {path}: {reason}") from None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError(f"{variable} is not a token: ASCII without line breaks")
    return {"authorization": f"Bearer {token}"} if token is not None else {}
