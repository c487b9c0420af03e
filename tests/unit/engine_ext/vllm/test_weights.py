"""Which weights a request is computed with: keys for other engines, a salt for vLLM's own cache."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_ext.common.prefix_hashes import ContentKey
from engine_ext.vllm.weights import Weights, keys_of, salt_of


class Lora(msgspec.Struct):
    """As vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "a"
    lora_int_id: int = 1
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@dataclass
class Request:
    """As vLLM's: its hashes here are what they depend on."""

    lora_request: Lora | None = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None
    block_hashes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(self.cache_salt)


class Engine:
    def __init__(self) -> None:
        self.weights = Weights(str)

    def load(self, path: Path, number: int = 1, is_read: bool = True) -> bool:
        lora = Lora(str(path), lora_int_id=number)
        seen = self.weights.look(lora)
        return self.weights.load(lora, seen if is_read else None)

    def request(self, path: Path | None = None, number: int = 1, **more: Any) -> Request:
        lora = None if path is None else Lora(str(path), lora_int_id=number)
        request = Request(lora, **more)
        self.weights.label(request)
        return request


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    write(directory, "old")
    return directory


def write(directory: Path, content: str) -> None:
    (directory / "adapter_config.json").write_text("{}")
    rewrite(directory / "adapter_model.safetensors", content)


def rewrite(file: Path, content: str) -> None:
    """At another time, as far as the file system's clock tells times apart."""
    before = file.stat().st_ctime_ns if file.exists() else None
    while before is not None and file.stat().st_ctime_ns == before:
        file.write_text(content)
    file.write_text(content)


def shares(one: Request, other: Request) -> bool:
    return keys_of(one) is not None and keys_of(one) == keys_of(other)


def test_weights_that_never_changed_are_not_marked(engine: Engine, path: Path) -> None:
    assert keys_of(engine.request()) == []
    engine.load(path)
    request = engine.request(path, cache_salt="x")
    (key,) = keys_of(request) or [ContentKey("none", ())]
    assert (key.kind, key.identity[:2]) == ("lora", ("a", str(path)))
    assert (request.cache_salt, salt_of(request), request.block_hashes) == ("x", "x", ["x"])


def test_equal_files_are_shared_among_engines_and_other_files_are_not(
    engine: Engine, path: Path
) -> None:
    engine.load(path)
    first = engine.request(path)
    restarted = Engine()
    (path / "README.md").write_text("nothing that vLLM reads")
    restarted.load(path, 7)
    assert shares(first, restarted.request(path, 7))
    write(path, "new")
    reloaded = Engine()
    reloaded.load(path)
    fresh = reloaded.request(path)
    assert keys_of(fresh) is not None
    assert not shares(first, fresh)


@pytest.mark.parametrize("number", [1, 2], ids=["in place", "unloaded and loaded"])
def test_an_adapter_that_is_loaded_again_is_another(
    engine: Engine, path: Path, number: int
) -> None:
    assert not engine.load(path)
    before = engine.request(path)
    kept = keys_of(before)
    assert not engine.load(path, number), "the same files"
    assert keys_of(engine.request(path, number)) == kept
    write(path, "new")
    assert engine.load(path, number)
    after = engine.request(path, number, cache_salt="x")
    assert keys_of(after) not in (None, kept)
    assert salt_of(after) == "x"
    assert after.cache_salt != "x"
    assert after.block_hashes == [after.cache_salt]
    assert engine.request(path, number, cache_salt="x").block_hashes == after.block_hashes
    assert keys_of(engine.request()) == [], "the model itself is the same"


def test_files_that_change_unseen_are_of_no_known_content(engine: Engine, path: Path) -> None:
    """vLLM reads them again when it has thrown the adapter out of its memory."""
    engine.load(path)
    running = engine.request(path)
    write(path, "new")
    late = engine.request(path)
    assert (keys_of(running), keys_of(late)) == (None, None)
    assert late.block_hashes != engine.request(path).block_hashes, "each on its own"
    assert engine.load(path)
    assert keys_of(engine.request(path)) is not None


def test_files_that_change_while_they_are_loaded_are_of_no_known_content(
    engine: Engine, path: Path
) -> None:
    lora = Lora(str(path))
    seen = engine.weights.look(lora)
    write(path, "new")
    engine.weights.load(lora, seen)
    assert keys_of(engine.request(path)) is None


def test_an_adapter_that_failed_to_load_is_of_no_known_content(engine: Engine, path: Path) -> None:
    engine.load(path)
    before = engine.request(path)
    assert engine.load(path, is_read=False)
    assert keys_of(engine.request(path)) is None
    assert keys_of(before) is not None, "it ran with what was loaded"


def test_a_revision_of_the_hubs_cache_is_known_while_it_is_the_current_one(
    engine: Engine, tmp_path: Path
) -> None:
    repository = tmp_path / "models--org--a"
    snapshot, refs = repository / "snapshots" / "abc", repository / "refs"
    for directory in (snapshot, refs):
        directory.mkdir(parents=True)
    write(snapshot, "old")
    (refs / "main").write_text("abc")
    engine.load(snapshot)
    assert keys_of(engine.request(snapshot)) is not None
    (refs / "main").write_text("abcd")
    assert keys_of(engine.request(snapshot)) is None


def test_an_adapter_that_nobody_ordered_is_known_from_its_first_request(
    engine: Engine, path: Path
) -> None:
    ordered = Engine()
    ordered.load(path)
    assert shares(engine.request(path), ordered.request(path))


def test_an_id_that_stands_for_another_adapter_is_of_no_known_content(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    """vLLM computes with what it has under the id, whatever path the request names."""
    engine.load(path)
    other = tmp_path / "other"
    other.mkdir()
    write(other, "other")
    assert keys_of(engine.request(other)) is None


def test_a_request_that_is_to_load_its_adapter_again_is_of_no_known_content(
    engine: Engine, path: Path
) -> None:
    """Unless `add_lora` did so before: vLLM 0.32 leaves the flag set."""
    lora = Lora(str(path), load_inplace=True)
    for keeps_flag in (True, False):
        request = Request(lora)
        engine.weights.label(request)
        assert request.lora_request is not None
        assert request.lora_request.load_inplace is keeps_flag
        assert (keys_of(request) is None) is keeps_flag
        engine.load(path)


def named(engine: Engine) -> None:
    engine.weights.change(keeps_adapters=True)
    engine.weights.name("step 7")


def unnamed(engine: Engine) -> None:
    engine.weights.change(keeps_adapters=True)


@pytest.mark.parametrize(("change", "is_shared"), [(named, True), (unnamed, False)])
def test_changed_weights_of_the_model_are_shared_under_their_name_only(
    engine: Engine, path: Path, change: Callable[[Engine], None], is_shared: bool
) -> None:
    other = Engine()
    for each in (engine, other):
        each.load(path)
        before = each.request(), each.request(path)
        change(each)
        after = each.request(), each.request(path)
        for old, new in zip(before, after, strict=True):
            assert not shares(old, new)
            assert old.block_hashes != new.block_hashes
    for of_model in (None, path):
        assert shares(engine.request(of_model), engine.request(of_model))
        assert shares(engine.request(of_model), other.request(of_model)) is is_shared


def test_a_name_that_is_used_again_finds_no_kv_of_before_in_vllms_cache(engine: Engine) -> None:
    named(engine)
    before = engine.request()
    named(engine)
    assert engine.request().block_hashes != before.block_hashes


def test_what_may_have_changed_adapters_makes_them_unknown(engine: Engine, path: Path) -> None:
    engine.load(path)
    engine.weights.change(keeps_adapters=False)
    assert keys_of(engine.request(path)) is None
    assert keys_of(engine.request()) is not None


def test_a_request_whose_weights_change_leaves_nothing(engine: Engine) -> None:
    request = engine.request(cache_salt="x")
    engine.weights.disown(request)
    assert keys_of(request) is None
    assert request.block_hashes != engine.request(cache_salt="x").block_hashes


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_comes_without_a_proof_is_for_weights_that_never_changed(
    engine: Engine, is_changed: bool
) -> None:
    """Of a stock engine: nobody can tell with which weights it computed."""
    if is_changed:
        named(engine)
    stock = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    assert (keys_of(engine.request(kv_transfer_params=stock)) is None) is is_changed
    proven = engine.request(kv_transfer_params={**stock, "prefix_proof": {}})
    local = engine.request(kv_transfer_params={"do_remote_decode": True})
    assert None not in (keys_of(proven), keys_of(local))


@pytest.mark.parametrize("is_pushed", [False, True])
def test_no_write_is_awaited_for_weights_that_no_other_engine_has(is_pushed: bool) -> None:
    """A reader sees by the proof that nothing matches; who awaits a write would wait in vain."""
    engine = Engine()
    engine.weights = Weights(str, is_pushed)
    asked = {"do_remote_prefill": True}
    for change, is_awaited in ((None, True), (unnamed, not is_pushed), (named, True)):
        if change is not None:
            change(engine)
        request = engine.request(kv_transfer_params=asked)
        assert (keys_of(request) is not None) is is_awaited
        assert keys_of(engine.request(kv_transfer_params={"do_remote_decode": True})) is not None


def test_outside_of_an_engine_an_adapter_is_its_name_and_path() -> None:
    request = Request(Lora("/a"), cache_salt="x")
    assert keys_of(request) == [ContentKey("lora", ("a", "/a"))]
    assert salt_of(request) == "x"


def test_an_adapter_whose_files_are_nowhere_is_of_no_known_content(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "snapshots" / "empty").mkdir(parents=True)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("empty")
    for number, path in enumerate((tmp_path / "nowhere", tmp_path / "snapshots" / "empty")):
        engine.load(path, number)
        assert keys_of(engine.request(path, number)) is None


def test_a_resolver_that_fails_costs_reuse_and_nothing_else(path: Path) -> None:
    def fail(path: str) -> str:
        raise OSError("no network")

    weights = Weights(fail)
    lora = Lora(str(path))
    weights.load(lora, weights.look(lora))
    request = Request(lora)
    weights.label(request)
    assert keys_of(request) is None


def test_files_with_the_times_of_before_are_others(engine: Engine, path: Path) -> None:
    """As rsync and cp -p leave them."""
    engine.load(path)
    model = path / "adapter_model.safetensors"
    seen = model.stat()
    rewrite(model, "new")
    os.utime(model, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert keys_of(engine.request(path)) is None
