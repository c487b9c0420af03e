"""Where things are, for people: `/` and `/docs`. Without scripts, and without other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

router = APIRouter(tags=["Operations"])
METHODS = ("get", "post", "put", "patch", "delete")
STYLE = """\
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code{font-family:ui-monospace,monospace}
table{border-collapse:collapse}
th,td{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0}
section{border-top:1px solid;margin-top:1.5rem}"""


class Operation(NamedTuple):
    method: str
    path: str
    summary: str
    content: Mapping[str, Any]


@router.head("/", include_in_schema=False)
@router.get("/", summary="Where things are: JSON, or a page for browsers")
async def index(request: Request) -> Response:
    found = list(operations(request.app.openapi()))
    if wants_page(request.headers.get("accept", "")):
        return HTMLResponse(_page("disagg-router", _table(found) + _where()))
    places = {f"{one.method} {one.path}": one.summary for one in found if one.path != "/"}
    content = {
        "name": "disagg-router",
        "version": version("disagg-router"),
        "endpoints": places,
        "docs": "/docs",
        "openapi": "/openapi.json",
    }
    return JSONResponse(content)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    schema = request.app.openapi()
    sections = "".join(map(_section, operations(schema)))
    return HTMLResponse(_page("disagg-router: its endpoints", sections + _where()))


def operations(schema: Mapping[str, Any]) -> Iterator[Operation]:
    for path, methods in schema.get("paths", {}).items():
        for method in METHODS:
            if method in methods:
                content = methods[method]
                yield Operation(method.upper(), path, content.get("summary", ""), content)


def wants_page(accept: str) -> bool:
    """Browsers name HTML; curl and clients of APIs take anything, or JSON."""
    return "text/html" in accept.lower()


def _page(title: str, body: str) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>{title}</title>'
        f"<style>{STYLE}</style></head>"
        f"<body><main><h1>{title}</h1>{body}</main></body></html>\n"
    )


def _where() -> str:
    return (
        '<p><a href="/docs">Endpoints in detail</a>, '
        '<a href="/openapi.json">the same for machines</a>, '
        f'<a href="/metrics">metrics</a>. Version {escape(version("disagg-router"))}.</p>'
    )


def _table(found: list[Operation]) -> str:
    rows = "".join(
        f"<tr><td>{one.method}</td><td>{_linked(one)}</td><td>{escape(one.summary)}</td></tr>"
        for one in found
        if one.path != "/"
    )
    head = '<tr><th scope="col">Method</th><th scope="col">Path</th><th scope="col">What</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _linked(one: Operation) -> str:
    path = escape(one.path)
    is_link = one.method == "GET" and "{" not in path
    return f'<a href="{path}"><code>{path}</code></a>' if is_link else _code(one.path)


def _section(one: Operation) -> str:
    answers = "".join(
        f"<tr><td>{escape(str(status))}</td>"
        f"<td>{escape(str(told.get('description', '')))}</td></tr>"
        for status, told in one.content.get("responses", {}).items()
    )
    return (
        f"<section><h2>{one.method} {_code(one.path)}</h2><p>{escape(one.summary)}</p>"
        f"{_fields(one)}<h3>Answers</h3><table><tbody>{answers}</tbody></table></section>"
    )


def _fields(one: Operation) -> str:
    """Of a JSON body; empty where there is none."""
    body = one.content.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = body.get("schema", {})
    rows = "".join(
        f"<tr><td>{_code(name)}</td><td>{escape(_type(told))}</td>"
        f"<td>{'required' if name in schema.get('required', ()) else ''}</td></tr>"
        for name, told in schema.get("properties", {}).items()
    )
    more = "<p>Other fields go to the engines as they are.</p>"
    return f"<h3>Body</h3><table><tbody>{rows}</tbody></table>{more}" if rows else ""


def _type(schema: Mapping[str, Any]) -> str:
    kinds = schema.get("anyOf")
    if kinds:
        return " or ".join(map(_type, kinds))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    return (
        f"array of {_type(schema['items'])}" if kind == "array" and "items" in schema else str(kind)
    )


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
