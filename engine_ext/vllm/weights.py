"""Which weights this engine computes with, as far as they can change while it runs.

KV is only of use to requests that are computed with the same weights. Two things need to know which
weights those were:

* Other engines compare the keys of a prefix proof (`keys`). An adapter is known by a digest of its
  files, so engines that have loaded equal files share KV. The model's own weights are known by the
  name that the operator gave them after the last change (vLLM's `weight_version`). Without a name
  they are known to this engine alone. Weights that have never changed need no key.
* vLLM's own prefix cache knows an adapter by its name and path, and the model not at all. After a
  change each request gets a cache salt (`_salt`) that says which weights it is computed with, so
  that blocks of other weights are not found. Until then nothing is salted.

A request is labelled when it arrives. A change while it waits or runs takes the label away for
good: its KV may be a mixture, so nothing of it is offered or loaded.

vLLM loads an adapter again on its own when it has evicted it from memory. So an
adapter counts as known only while its files on disk are those that were loaded: each use looks at
their sizes and times. Files that were changed cost the reuse of KV until the adapter is
loaded again.

Imports no vLLM.
"""

import hashlib
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine_ext.common.prefix_hashes import ContentKey

logger = logging.getLogger(__name__)

LABEL = "disagg_weights"
"""Attribute of a vLLM request: a `Label`, or None if its weights are not known."""

PREFIX = "adapter_"
"""vLLM reads `adapter_config.json` and one of `adapter_model.*`."""

UNKNOWN = (
    "which content was loaded is not known: its KV is not shared with other engines, and not "
    "cached, until it is loaded again"
)

DIGEST_LENGTH = 32
"""In hexadecimal digits."""

Files = tuple[tuple[str, int, int, int], ...]
"""Name, size, and the times at which content and inode were changed last, in order of names."""


class Adapter(NamedTuple):
    """A LoRA adapter as it was loaded."""

    name: str
    path: str
    directory: str
    files: Files | None = None
    digest: str | None = None
    """None: it is not known which content was loaded."""
    is_ordered: bool = True
    """By `add_lora`; otherwise vLLM loads it with the first step of a request."""

    def key(self) -> ContentKey | None:
        """None: what vLLM computes with is not known, or may be something else by now."""
        if self.digest is None or files_in(self.directory) != self.files:
            return None
        return ContentKey("lora", (self.name, self.path, self.digest))


@dataclass(frozen=True, slots=True)
class Label:
    """The weights that a request is computed with."""

    adapter: Adapter | None
    model: str | None
    """Name of the model's weights; None where they have never changed."""
    cache_salt: str | None
    """The client's."""
    is_changed: bool
    """This engine has had other weights before."""
    awaits_push: bool = True
    """False: no other engine can have computed with these weights, so none is asked to write."""


def keys_of(request: Any) -> list[ContentKey] | None:
    """Return the keys of a vLLM request's weights. None: these are not known."""
    if not hasattr(request, LABEL):  # It is in no engine.
        lora = request.lora_request
        return [] if lora is None else [ContentKey("lora", (lora.lora_name, lora.lora_path))]
    label = _label_of(request)
    params = request.kv_transfer_params
    if label is None or (label.is_changed and _is_unproven(params)):
        return None
    if not label.awaits_push and isinstance(params, dict) and params.get("do_remote_prefill"):
        return None
    keys: list[ContentKey] = []
    if label.adapter is not None:
        key = label.adapter.key()
        if key is None:
            return None
        keys.append(key)
    if label.model is not None:
        keys.append(ContentKey("weights", (label.model,)))
    return keys


def salt_of(request: Any) -> str | None:
    """Return the client's own cache salt."""
    label = _label_of(request)
    salt: str | None = request.cache_salt if label is None else label.cache_salt
    return salt


def _label_of(request: Any) -> Label | None:
    label: Label | None = getattr(request, LABEL, None)
    return label


def _is_unproven(params: Any) -> bool:
    """Return True if the params name blocks of another engine without a proof, as a stock engine
    does: it is not known with which weights these were computed."""
    if not isinstance(params, dict):
        return False
    return bool(params.get("remote_block_ids")) and params.get("prefix_proof") is None


class Weights:
    """One per engine; used by the thread that runs the engine's loop."""

    def __init__(self, resolve: Callable[[str], str], is_pushed: bool = False) -> None:
        """`resolve`: the directory that vLLM reads for an adapter's path. `is_pushed`: prefill
        engines write to this one, so what cannot match must not be awaited; a reader sees for
        itself."""
        self._resolve = resolve
        self._is_pushed = is_pushed
        self._epoch = ""
        """Another one for each change of the model's own weights."""
        self._version: str | None = None
        """Name of the model's weights, given since the last change."""
        self._adapters: dict[int, Adapter] = {}
        """By vLLM's id."""
        self._latest: dict[str, Adapter] = {}
        """By name."""
        self._first: dict[tuple[str, str], str] = {}
        """By name and path: the digest whose KV needs no salt."""

    def change(self, keeps_adapters: bool) -> None:
        """Note that the model's own weights have changed, or may have. `keeps_adapters`: only
        they."""
        self._epoch, self._version = _nonce(), None
        if not keeps_adapters:
            for number, adapter in self._adapters.items():
                self._adapters[number] = adapter._replace(digest=None)

    def name(self, version: str) -> None:
        """Note the operator's name for the model's weights, which must be unique in the fleet."""
        self._version = version

    def look(self, lora: Any) -> Adapter:
        """Return an adapter with its files as they are before vLLM loads them."""
        try:
            directory = self._resolve(lora.lora_path)
        except Exception:
            logger.exception("LoRA adapter %s: its files were not found", lora.lora_name)
            return _unknown(lora)
        return Adapter(lora.lora_name, lora.lora_path, directory, files_in(directory))

    def load(self, lora: Any, seen: Adapter | None, is_ordered: bool = True) -> bool:
        """Note that vLLM has loaded an adapter. `seen`: what `look` returned, or None if the load
        failed, perhaps on some ranks only. Return True if there may be KV of other weights under
        this adapter's name."""
        seen = seen or _unknown(lora)
        digest = _digest(seen, lora.is_3d_lora_weight)
        adapter = seen._replace(digest=digest, is_ordered=is_ordered)
        last = self._latest.get(adapter.name)
        self._adapters[lora.lora_int_id] = self._latest[adapter.name] = adapter
        if digest is None:
            logger.warning("LoRA adapter %s at %s: %s", adapter.name, adapter.path, UNKNOWN)
        else:
            self._first.setdefault((adapter.name, adapter.path), digest)
        if last is None:
            return False
        return digest is None or (last.path, last.digest) != (adapter.path, digest)

    def label(self, request: Any) -> None:
        """Label a request that arrives."""
        setattr(request, LABEL, None)  # What fails from here on leaves it so.
        marks = [self._epoch] if self._epoch else []
        adapter = None if request.lora_request is None else self._adapter_of(request)
        if adapter is not None and (mark := self._mark_of(adapter)):
            marks.append(mark)
        model = self._version or self._epoch or None
        is_private = bool(self._epoch) and self._version is None
        awaits_push = not (is_private and self._is_pushed)
        label = Label(adapter, model, request.cache_salt, bool(marks), awaits_push)
        setattr(request, LABEL, label)
        if marks:
            _salt(request, label, " ".join(marks))

    def disown(self, request: Any) -> None:
        """Take the label from a request that waits or runs while its weights change."""
        label = _label_of(request)
        setattr(request, LABEL, None)
        if label is not None:
            _salt(request, label, _nonce())

    def _adapter_of(self, request: Any) -> Adapter:
        """vLLM computes with what it has loaded under the request's adapter id. It reads the
        request's own path only where it has nothing under that id, or `load_inplace` is set."""
        lora = request.lora_request
        number = lora.lora_int_id
        if number not in self._adapters:
            self.load(lora, self.look(lora), is_ordered=False)
        adapter = self._adapters[number]
        is_same = (adapter.name, adapter.path) == (lora.lora_name, lora.lora_path)
        if lora.load_inplace and is_same and adapter.is_ordered:
            # The HTTP server of vLLM 0.32 leaves the flag of `add_lora` in each request from then
            # on, so that vLLM would read the files again at each step.
            request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
        elif lora.load_inplace:
            self._adapters[number] = _unknown(lora)
        return adapter if is_same and self._adapters[number] is adapter else _unknown(lora)

    def _mark_of(self, adapter: Adapter) -> str:
        if adapter.key() is None:
            return _nonce()
        is_first = self._first.get((adapter.name, adapter.path)) == adapter.digest
        return "" if is_first else str(adapter.digest)


def _unknown(lora: Any) -> Adapter:
    return Adapter(lora.lora_name, lora.lora_path, "", is_ordered=False)


def files_in(directory: str) -> Files | None:
    """Return an adapter's files as they are now; None if none can be read."""
    try:
        with os.scandir(directory) as entries:
            files = [
                _seen(entry.name, entry.stat())
                for entry in entries
                if entry.name.startswith(PREFIX)
            ]
    except OSError:
        return None
    return (*sorted(files), *_revision_of(Path(directory))) if files else None


def _revision_of(directory: Path) -> Files:
    """In a cache of Hugging Face's hub (`snapshots/COMMIT`), return the file that names the current
    commit: vLLM reads it each time it loads."""
    if directory.parent.name != "snapshots":
        return ()
    try:
        return (_seen("refs/main", (directory.parent.parent / "refs" / "main").stat()),)
    except OSError:
        return ()


def _seen(name: str, file: os.stat_result) -> tuple[str, int, int, int]:
    """Return what changes when a file is written. Its inode number would not do: some network file
    systems renumber."""
    return name, file.st_size, file.st_mtime_ns, file.st_ctime_ns


def _digest(adapter: Adapter, is_3d: bool) -> str | None:
    """Return the digest of all files that vLLM has read. None: one cannot be read, or has changed
    since `look`."""
    if adapter.files is None:
        return None
    digest = hashlib.sha256(str(is_3d).encode())
    try:
        for name in (name for name, *_ in adapter.files if name.startswith(PREFIX)):
            with (Path(adapter.directory) / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f" {name!r} {content}".encode())
    except OSError:
        return None
    is_whole = files_in(adapter.directory) == adapter.files
    return digest.hexdigest()[:DIGEST_LENGTH] if is_whole else None


def _salt(request: Any, label: Label, mark: str) -> None:
    """Separate the request from blocks of other weights in vLLM's prefix cache, in both
    directions."""
    request.cache_salt = f"{label.cache_salt or ''}\0{mark}"
    request.block_hashes.clear()
    request.update_block_hashes()


def _nonce() -> str:
    return uuid.uuid4().hex
