"""Names and types of settings, and how a group of settings declares its fields.

A list may be given as a list, as JSON, or as words with commas or spaces between them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")
PREFIX = "DISAGG_ROUTER_"
# The command `drain` reads this variable; the router itself does not.
ADMIN_URL = "DISAGG_ROUTER_ADMIN_URL"
MIB = 1024 * 1024
MAX_SECONDS = 366 * 86400.0
MIN_HEARTBEAT_S = 0.1
MAX_GROUP_WEIGHT = 1e6
# Stands before an engine's host or DNS name if the engine is reached over TLS.
TLS_SCHEME = "https://"
ENGINE_SCHEME = re.compile(r"http(s)?://", re.IGNORECASE)
STORE_URL = re.compile(r"memory|off|rediss?(\+cluster|\+sentinel)?://.+")
FIELD_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
LINE_PATTERN = re.compile(r"[^\s*].{0,199}")
ID_NAME = re.compile(r"([Hh]eader:)?[A-Za-z0-9_-]{1,128}")
GROUP_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]{0,30}://[a-z0-9._\[\]:-]{1,259}")
LABEL_SELECTOR = re.compile(r"[A-Za-z0-9!(][A-Za-z0-9_./,=!() -]{0,1023}")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
MODEL_ALIAS = re.compile(r"[^=]+=.+", re.DOTALL)
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")


class SettingsError(Exception):
    """Settings that cannot be used; `problems` has one line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class BrokenFileError(SettingsError):
    """A file that the router watches while it runs cannot be used at present."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


class SettingsGroup(BaseModel):
    """Settings that `--help` shows under one title. `Settings` inherits from all groups.

    The first line of a group's docstring is its title. A line "NAME: ..." begins the help text of
    the setting NAME. (pydantic would read docstrings of fields from the source files, which takes
    longer than all other work at import.)
    """

    model_config = ConfigDict(defer_build=True)  # only `Settings` validates

    def conflicts(self) -> Iterator[str]:
        """Yield one line for each reason why settings of this group do not fit together."""
        yield from ()


class Address(NamedTuple):
    """An HTTP server's host and port. A host that is an IPv6 address has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def canonical(host: str) -> str:
    """Return the one spelling of `host` by which engines from several sources are compared.

    Raises ValueError for text with a colon that is not an IPv6 address.
    """
    return str(_ipv6(host)) if ":" in host else host.lower()


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`. Names other than localhost are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536


def _ipv6(text: str) -> ipaddress.IPv6Address:
    """Raises ValueError. The library accepts any text as a zone, even quotes and line breaks."""
    address = ipaddress.IPv6Address(text)
    if address.scope_id is not None and not HOST_NAME.fullmatch(address.scope_id):
        raise ValueError(f"{text!r} has no interface's name behind its address")
    return address


def _is_address(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _parse_list(value: object) -> list[object]:
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                return list(json.loads(value))
            except ValueError:
                pass  # "[::1]" is a host, not a list
        if "@" in value:
            return [value]  # a URL with a password, which is refused and hidden as a whole
        return list(value.replace(",", " ").split())
    if isinstance(value, list | tuple):
        return [item for part in value for item in _parse_list(part)]
    return [value]


def _parse_patterns(value: object) -> list[object]:
    """A pattern may contain spaces and commas, so only JSON and lists have several."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = list(json.loads(value))
        except ValueError:
            raise ValueError("not a JSON list") from None
    given = value if isinstance(value, list | tuple) else [value]
    if len(given) == 1 and isinstance(given[0], str) and given[0].lstrip().startswith("["):
        return _parse_patterns(given[0])
    return [pattern for pattern in given if pattern != ""]


def _parse_host(text: str) -> str:
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not (_is_address(_ipv6, host) if ":" in host else HOST_NAME.fullmatch(host)):
        raise ValueError("must be a host: a name, an IPv4 or an IPv6 address")
    return host


def split_port(text: str) -> tuple[str, int | None]:
    """Split "HOST:PORT" or "[IPv6]:PORT"; the port is None if there is none."""
    host, mark, port = text.rpartition(":")
    if mark and is_port(port) and (":" not in host or (host[0] == "[" and host[-1] == "]")):
        return host, int(port)
    return text, None


def _parse_engine_host(text: str) -> str:
    scheme, plain = _split_scheme(text)
    host, port = split_port(plain)
    with contextlib.suppress(ValueError):
        host = _parse_host(host)
        return scheme + (host if port is None else str(Address(host, port)))
    raise ValueError(
        "must be HOST or HOST:PORT, also after http:// or https://; HOST is a name or an address, "
        "PORT is from 1 to 65535"
    )


def _parse_engine_url(text: str) -> str:
    if split_port(_split_scheme(text)[1])[1] is None:
        raise ValueError("must be http://HOST:PORT, https://HOST:PORT or HOST:PORT")
    return _parse_engine_host(text)


def _split_scheme(text: str) -> tuple[str, str]:
    """Return TLS_SCHEME or nothing, and the text between the scheme and a last slash."""
    if not (found := ENGINE_SCHEME.match(text)):
        return "", text
    return TLS_SCHEME if found[1] else "", text[found.end() :].removesuffix("/")


def _check_dns_name(text: str) -> str:
    plain = text.removeprefix(TLS_SCHEME)
    name, _, port = plain.rpartition(":")
    if plain.startswith("_"):
        if HOST_NAME.fullmatch(plain):
            return text
    elif HOST_NAME.fullmatch(name) and is_port(port):
        if not _is_address(ipaddress.IPv4Address, name):
            return text
        raise ValueError("an address needs no DNS: give it to the -hosts and -ports")
    raise ValueError("not a DNS name: name:port for A and AAAA, _http._tcp.name for SRV")


def _require(rule: re.Pattern[str] | Callable[[Any], object], complaint: str) -> AfterValidator:
    """Return the validator of a value that matches a pattern, or for which a function is true."""
    is_valid: Callable[[Any], object] = rule.fullmatch if isinstance(rule, re.Pattern) else rule

    def check(value: T) -> T:
        if not is_valid(value):
            raise ValueError(complaint)
        return value

    return AfterValidator(check)


def _parse_pairs(value: object) -> object:
    """Parse a list of NAME=VALUE; a YAML file may also have a mapping."""
    if isinstance(value, dict):
        value = [f"{name}={each}" for name, each in value.items()]
    return _parse_list(value)


def _parse_weight(value: object) -> object:
    text = str(value)
    group, _, number = text.partition("=")
    try:
        weight = float(number) if number.isascii() and "_" not in number else -1.0
    except ValueError:
        weight = -1.0
    if not GROUP_NAME.fullmatch(group) or not 0 <= weight <= MAX_GROUP_WEIGHT:
        raise ValueError(f"not as in blue=9: a group, and a number from 0 to {MAX_GROUP_WEIGHT:g}")
    return text


# A text in an annotation stands for a value of the type in `--help`.
AsList = BeforeValidator(_parse_list)
Lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
Host = Annotated[str, AfterValidator(_parse_host), "HOST"]
EngineHost = Annotated[str, AfterValidator(_parse_engine_host), "HOST"]
Hosts = Annotated[tuple[EngineHost, ...], AsList]
EngineUrl = Annotated[str, AfterValidator(_parse_engine_url), "URL"]
EngineUrls = Annotated[tuple[EngineUrl, ...], AsList]
Port = Annotated[int, Field(ge=1, le=65535), "PORT"]
Ports = Annotated[tuple[Port, ...], AsList]
ListenPort = Annotated[int, Field(ge=0, le=65535), "PORT"]
PodPort = Annotated[
    str,
    BeforeValidator(str),
    _require(lambda text: is_port(text) or PORT_NAME.fullmatch(text), "neither a port nor a name"),
    "PORT",
]
DnsName = Annotated[str, AfterValidator(_check_dns_name), "NAME"]
DnsNames = Annotated[tuple[DnsName, ...], AsList]
# In lower case, as browsers send it.
Origin = Annotated[
    str,
    Lower,
    _require(ORIGIN, "not an origin, as in https://chat.example or http://localhost:3000"),
    "ORIGIN",
]
Origins = Annotated[tuple[Origin, ...], AsList]
Name = Annotated[str, _require(FIELD_NAME, "not the name of a header or of a field"), "NAME"]
Names = Annotated[tuple[Name, ...], AsList]
LinePattern = Annotated[
    str,
    _require(LINE_PATTERN, "not a pattern of 1 to 200 characters that begins without *"),
    "PATTERN",
]
LinePatterns = Annotated[
    tuple[LinePattern, ...], BeforeValidator(_parse_patterns), Field(max_length=32)
]
IdName = Annotated[str, _require(ID_NAME, "not the name of a header or of a field"), "NAME"]
IdNames = Annotated[tuple[IdName, ...], AsList]
Selector = Annotated[
    str,
    _require(LABEL_SELECTOR, "not a label selector, as in llm-d.ai/role=prefill,app=vllm"),
    "SELECTOR",
]
Namespace = Annotated[str, _require(NAMESPACE, "not the name of a namespace"), "NAME"]
Store = Annotated[
    str,
    _require(
        STORE_URL,
        "not a store: memory, off, or redis://, rediss://, redis+cluster://, redis+sentinel://",
    ),
    "STORE",
]
LimitsStore = Annotated[
    Store,
    _require(lambda text: text != "off", "limits are counted somewhere: memory, or a Redis URL"),
]
Share = Annotated[float, Field(ge=0, le=1), "SHARE"]
Factor = Annotated[float, Field(ge=1), "FACTOR"]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS), "SECONDS"]
Delay = Annotated[float, Field(ge=0, le=MAX_SECONDS), "SECONDS"]
Heartbeat = Annotated[
    Delay,
    _require(
        lambda seconds: not 0 < seconds < MIN_HEARTBEAT_S,
        f"at least {MIN_HEARTBEAT_S:g} s, or 0 for none",
    ),
]
Count = Annotated[int, Field(ge=0)]
TokenCount = Annotated[int, Field(ge=0), "TOKENS"]
PositiveCount = Annotated[int, Field(ge=1)]
Weight = Annotated[str, BeforeValidator(_parse_weight), "GROUP=WEIGHT"]
Weights = Annotated[tuple[Weight, ...], BeforeValidator(_parse_pairs)]
ModelAliasText = Annotated[
    str,
    BeforeValidator(str),
    _require(MODEL_ALIAS, "not as in claude-*=NAME: a pattern, and the name of a model"),
    "PATTERN=NAME",
]
ModelAliasTexts = Annotated[tuple[ModelAliasText, ...], BeforeValidator(_parse_pairs)]
KvProtocol = Annotated[
    Literal["auto", "nixl", "mooncake", "moriio", "sglang", "trtllm", "store"], Lower
]
Policy = Annotated[
    Literal["round_robin", "least_loaded", "power_of_two", "session", "prefix"], Lower
]
