"""The index of endpoints (`/`) and their documentation (`/docs`); works without other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

router = APIRouter(tags=["Operations"])
PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>
:root{{color-scheme:light dark}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
code{{font-family:ui-monospace,monospace}}
table{{border-collapse:collapse}}
th,td{{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0}}
section{{border-top:1px solid;margin-top:1.5rem}}
</style></head><body><main><h1>{title}</h1>{body}
<p><a href="/docs">Endpoints in detail</a>, <a href="/openapi.json">the same for machines</a>,
<a href="/metrics">metrics</a>. Version {version}.</p></main></body></html>
"""


class Operation(NamedTuple):
    """One method of one path. `content` is its OpenAPI object."""

    method: str
    path: str
    summary: str
    content: Mapping[str, Any]


@router.get("/", summary="Index of the endpoints: JSON, or HTML for browsers")
async def index(request: Request) -> Response:
    found = [one for one in _operations(request.app.openapi()) if one.path != "/"]
    # Browsers ask for HTML by name; curl and API clients accept anything, or JSON.
    if "text/html" in request.headers.get("accept", "").lower():
        head = "<thead>" + _row(("Method", "Path", "What"), 'th scope="col"') + "</thead>"
        rows = "".join(_row((one.method, _link(one), escape(one.summary))) for one in found)
        return _page("disagg-router", f"<table>{head}<tbody>{rows}</tbody></table>")
    content = {
        "name": "disagg-router",
        "version": version("disagg-router"),
        "endpoints": {f"{one.method} {one.path}": one.summary for one in found},
        "docs": "/docs",
        "openapi": "/openapi.json",
    }
    return JSONResponse(content)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    sections = map(_section, _operations(request.app.openapi()))
    return _page("disagg-router: its endpoints", "".join(sections))


def _operations(schema: Mapping[str, Any]) -> Iterator[Operation]:
    for path, methods in schema.get("paths", {}).items():
        for method, content in methods.items():
            yield Operation(method.upper(), path, content.get("summary", ""), content)


def _section(one: Operation) -> str:
    answers = "".join(
        _row((escape(str(status)), escape(str(answer.get("description", "")))))
        for status, answer in one.content.get("responses", {}).items()
    )
    return (
        f"<section><h2>{one.method} {_code(one.path)}</h2><p>{escape(one.summary)}</p>"
        f"{_fields(one)}<h3>Answers</h3><table><tbody>{answers}</tbody></table></section>"
    )


def _fields(one: Operation) -> str:
    """Return a table of the fields of a JSON body, empty if the operation has none."""
    body = one.content.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = body.get("schema", {})
    required = schema.get("required", ())
    rows = "".join(
        _row((_code(name), escape(_type(field)), "required" if name in required else ""))
        for name, field in schema.get("properties", {}).items()
    )
    more = "<p>Other fields are forwarded to the engines.</p>"
    return f"<h3>Body</h3><table><tbody>{rows}</tbody></table>{more}" if rows else ""


def _type(schema: Mapping[str, Any]) -> str:
    if schema.get("anyOf"):
        return " or ".join(map(_type, schema["anyOf"]))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    return str(kind)


def _page(title: str, body: str) -> HTMLResponse:
    return HTMLResponse(
        PAGE.format(title=title, body=body, version=escape(version("disagg-router")))
    )


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag[:2]}>" for cell in cells) + "</tr>"


def _link(one: Operation) -> str:
    is_link = one.method == "GET" and "{" not in one.path
    return f'<a href="{escape(one.path)}">{_code(one.path)}</a>' if is_link else _code(one.path)


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
