"""How a router that runs is told which engines there are: in a file, or by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from tests.conftest import find_free_ports
from tests.integration.processes import wait_for

TOKEN = "0123456789abcdef"
MUCH = 60.0


class Teller(Protocol):
    """`flags` are what the router is started with; it knows no engine then."""

    @property
    def flags(self) -> list[str]: ...

    def add(self, urls: list[str], role: str, group: str, weight: float) -> None: ...

    def weigh(self, group: str, weight: float) -> None:
        """Those of a group that is there."""

    def remove(self, urls: list[str]) -> None: ...


class FileTeller:
    """Whatever it is told, the file is replaced as a whole."""

    def __init__(self, file: Path) -> None:
        self.flags = ["--engines-file", str(file)]
        self._file = file
        self._entries: dict[str, dict[str, Any]] = {}
        self._write()

    def add(self, urls: list[str], role: str, group: str, weight: float) -> None:
        common = {"role": role, "group": group, "weight": weight}
        self._entries |= {url: {"url": url, **common} for url in urls}
        self._write()

    def weigh(self, group: str, weight: float) -> None:
        for entry in self._entries.values():
            if entry["group"] == group:
                entry["weight"] = weight
        self._write()

    def remove(self, urls: list[str]) -> None:
        for url in urls:
            del self._entries[url]
        self._write()

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump({"engines": list(self._entries.values())}))
        fresh.replace(self._file)


class AdminTeller:
    """As an operator does it: a weight is the group's, and who goes is drained first."""

    def __init__(self, file: Path) -> None:
        [port] = find_free_ports(1)
        token = file.with_name("token")
        token.write_text(TOKEN)
        self.flags = ["--admin-port", str(port), "--admin-token-file", str(token)]
        self._url = f"http://127.0.0.1:{port}/admin"

    def add(self, urls: list[str], role: str, group: str, weight: float) -> None:
        for url in urls:
            entry = {"url": url, "role": role, "group": group, "weight": weight}
            assert self._ask("POST", "engines", entry)["sources"] == ["admin"]

    def weigh(self, group: str, weight: float) -> None:
        assert self._ask("PUT", f"groups/{group}", {"weight": weight})["weight"] == weight

    def remove(self, urls: list[str]) -> None:
        paths = [f"engines/{url.removeprefix('http://')}" for url in urls]
        for path in paths:
            assert self._ask("POST", f"{path}/drain")["intent"] == "draining"
        for path in paths:
            wait_for(lambda path=path: self._ask("GET", path)["drained"], f"{path} drains", MUCH)  # type: ignore[misc]
            self._ask("DELETE", path)

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx.request(
            method, f"{self._url}/{path}", json=body, headers=headers, timeout=20, trust_env=False
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        told: dict[str, Any] = answer.json() if answer.content else {}
        return told


TELLERS: dict[str, Callable[[Path], Teller]] = {"file": FileTeller, "admin": AdminTeller}
