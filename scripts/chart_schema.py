"""The schema of the chart's `settings`: the router's own, less those that the chart sets itself.

So a misspelt setting, or a number where a word belongs, is refused by Helm and not by a pod.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from router.settings import RENAMED, SECRET_NAMES, Settings

SCHEMA = Path(__file__).parents[1] / "charts/disagg-router/values.schema.json"
CHARTS_OWN = re.compile(
    r"config|port|liveness_port|shutdown_(delay|timeout)|kubernetes_(?!scheme).*"
    r"|admin_(port|token.*)|ui(_.*)?|api_keys_file|tls_(certfile|keyfile)|metrics_(port|host)"
)
"""What other values say: ports, the end of a pod, discovery, keys, TLS, admin, the page."""
WITHOUT_REDIS = {"enum": ["memory", "off"]}  # of conversation-store; with Redis, redis.url says it
KEPT = ("type", "enum", "pattern", "items", "minimum", "maximum", "exclusiveMinimum")


def with_settings(text: str) -> str:
    """The schema with its part about settings made anew."""
    schema = json.loads(text)
    schema["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


def settings_schema() -> dict[str, Any]:
    properties = Settings.model_json_schema()["properties"]
    properties["conversation_store"] = WITHOUT_REDIS
    properties |= {name: properties[current] for name, current in RENAMED.items()}
    return {
        "type": "object",
        "description": "The router's settings, under their flags' names (docs/settings.md).",
        "additionalProperties": False,
        "properties": {
            name.replace("_", "-"): _for_yaml(schema)
            for name, schema in properties.items()
            if not _is_charts_own(name)
        },
    }


def _is_charts_own(name: str) -> bool:
    is_secret = name != "conversation_store" and name.removesuffix("_file") in SECRET_NAMES
    return is_secret or CHARTS_OWN.fullmatch(name) is not None


def _for_yaml(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what only pydantic reads; a list may also be words in one string, as in a flag."""
    ways = [_kept(way) for way in schema.get("anyOf", [schema]) if way.get("type") != "null"]
    if ways[0].get("type") == "array":
        ways.append({"type": "string"})
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _kept(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in KEPT if key in schema}
