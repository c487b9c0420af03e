"""Weights that change while engines run: KV that was computed before is not used afterwards.

Adapters are loaded in place, unloaded and loaded again, on one engine before the other; the model's
own weights are loaded again through vLLM's `/collective_rpc`. The right answer is that of an
adapter of the same files under a name that was never used before, or of one engine that computes
everything itself.
"""

import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from engine_ext.reference.tiny_model import TinyModel, write_tiny_model
from tests.integration.legs import Turn, decode, prefill, prefill_body, take_turn
from tests.integration.oracle import Answer, Prompt, complete, differences, tokens_of
from tests.integration.processes import Server, metric, wait_for
from tests.vllm.adapters import write_adapter
from tests.vllm.measures import FETCHED, counted, freed
from tests.vllm.servers import OURS, PUSH, SCHEDULER, Kind
from tests.vllm.test_push import where

OPTIONS = (*SCHEDULER, "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
OLD, NEW = 0, 1
"""Seeds of an adapter's files."""


# Both cache prefixes: vLLM's own cache must not answer with the old weights either.
PAIR = tuple(Kind(f"reload-{role}", OURS, OPTIONS, environment=RUNTIME) for role in "pd")
PUSHING = tuple(Kind(f"reload-push-{role}", PUSH, OPTIONS, environment=RUNTIME) for role in "pd")


class Adapter:
    """One name and path on both engines, whose files change."""

    def __init__(self, pair: list[Server], folder: Path, name: str) -> None:
        self.pair, self.path, self.name = pair, folder / "adapter", name
        self._folder, self._fresh = folder, count()
        write_adapter(self.path, OLD)
        for server in pair:
            self.load(server)

    def write(self, seed: int) -> None:
        """Over the old files."""
        written = write_adapter(self._folder / f"written-{next(self._fresh)}", seed)
        for file in written.iterdir():
            shutil.copyfile(file, self.path / file.name)

    def load(self, server: Server, in_place: bool = False, path: Path | None = None) -> None:
        body = {"lora_name": self.name, "lora_path": str(path or self.path)}
        said = server.post("/v1/load_lora_adapter", body | {"load_inplace": in_place})
        assert said.status_code == 200, said.text

    def load_again(self, server: Server) -> None:
        said = server.post("/v1/unload_lora_adapter", {"lora_name": self.name})
        assert said.status_code == 200, said.text
        self.load(server)

    def right(self, server: Server, prompt: Prompt, seed: int) -> Answer:
        """Of the same files under a new name."""
        name = f"{self.name}-right-{next(self._fresh)}"
        path = write_adapter(self._folder / name, seed)
        body = {"lora_name": name, "lora_path": str(path)}
        assert server.post("/v1/load_lora_adapter", body).status_code == 200
        return complete(server, prompt, model=name)

    def take_turn(self, prompt: Prompt) -> Turn:
        """Both legs; the decode engine keeps the turn's KV."""
        params = prefill(self.pair[0], prompt, model=self.name)
        return decode(self.pair[1], prompt, params | {"retain": True}, model=self.name)


@pytest.fixture
def adapter(pair: list[Server], tmp_path: Path, request: pytest.FixtureRequest) -> Adapter:
    return Adapter(pair, tmp_path, f"adapter-{abs(hash(request.node.name))}")


def in_place(adapter: Adapter, server: Server) -> None:
    adapter.load(server, in_place=True)


def in_place_and_reset(adapter: Adapter, server: Server) -> None:
    """Once, as an operator does who expects the reset to succeed."""
    adapter.load(server, in_place=True)
    assert server.post("/reset_prefix_cache", {}).status_code == 200


def unloaded_and_loaded(adapter: Adapter, server: Server) -> None:
    adapter.load_again(server)


CHANGES = (in_place, in_place_and_reset, unloaded_and_loaded)


@pytest.mark.parametrize("change", CHANGES)
def test_a_lease_and_a_turn_of_the_old_adapter_are_not_read(
    pair: list[Server], adapter: Adapter, change: Callable[[Adapter, Server], None]
) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(300, 9800)
    right = adapter.right(prefiller, prompt, NEW)
    assert adapter.right(prefiller, prompt, OLD).tokens[0] != right.tokens[0]
    turn = adapter.take_turn(prompt)
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 9801)]
    leased = prefill(prefiller, prompt, model=adapter.name)
    adapter.write(NEW)
    for server in pair:
        change(adapter, server)
    fetched = [metric(server, FETCHED) for server in pair]
    got = decode(decoder, prompt, leased, model=adapter.name).answer
    assert differences([right], [got]) == []
    params = prefill(prefiller, longer, turn.params, model=adapter.name)
    assert [metric(server, FETCHED) for server in pair] == fetched
    got = decode(decoder, longer, params, model=adapter.name).answer
    assert differences([adapter.right(prefiller, longer, NEW)], [got]) == []
    assert metric(decoder, FETCHED) > fetched[1], "the new adapter's KV is moved"
    for server in pair:
        assert differences([right], [complete(server, prompt, model=adapter.name)]) == []


def test_what_was_computed_before_is_given_up(pair: list[Server], adapter: Adapter) -> None:
    """Long before its time: a lease is of 30 seconds, a turn of minutes. Others' leases stay."""
    prefiller, decoder = pair
    adapter.take_turn(tokens_of(300, 9810))
    prefill(prefiller, tokens_of(200, 9811), model=adapter.name)
    other = tokens_of(200, 9812)
    kept = prefill(prefiller, other)
    assert counted(decoder, "leases_active") == 1
    adapter.write(NEW)
    for server in pair:
        in_place(adapter, server)
    wait_for(partial(freed, decoder), "the turn is given up", 15)
    wait_for(lambda: counted(prefiller, "leases_active") == 1, "the lease is given up", 15)
    fetched = metric(decoder, FETCHED)
    got = decode(decoder, other, kept).answer
    assert metric(decoder, FETCHED) - fetched == len(other)
    assert differences([complete(prefiller, other)], [got]) == []


@pytest.mark.parametrize("first", [0, 1], ids=["prefill engine", "decode engine"])
def test_an_engine_reads_nothing_of_another_version(
    pair: list[Server], adapter: Adapter, first: int
) -> None:
    """A rolling reload: what one engine answers is all of one version, which is its own."""
    prefiller, decoder = pair
    prompt = tokens_of(300, 9820)
    of_decoder = NEW if first == 1 else OLD
    right = adapter.right(prefiller, prompt, of_decoder)
    adapter.write(NEW)
    in_place(adapter, pair[first])
    params = prefill(prefiller, prompt, model=adapter.name)
    got = decode(decoder, prompt, params, model=adapter.name).answer
    assert differences([right], [got]) == []


def test_equal_files_that_are_loaded_again_change_nothing(
    pair: list[Server], adapter: Adapter
) -> None:
    prefiller, decoder = pair
    prompt = tokens_of(300, 9830)
    turn = adapter.take_turn(prompt)
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 9831)]
    adapter.write(OLD)
    for server in pair:
        in_place(adapter, server)
    fetched = [metric(server, FETCHED) for server in pair]
    params = prefill(prefiller, longer, turn.params, model=adapter.name)
    got = decode(decoder, longer, params, model=adapter.name).answer
    assert differences([adapter.right(prefiller, longer, OLD)], [got]) == []
    assert metric(decoder, FETCHED) > fetched[1]


def reload_model(server: Server, path: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    assert server.post("/collective_rpc", body).status_code == 200


def computed_alone(server: Server, prompt: Prompt) -> Answer:
    """Nothing is cached under a salt that was never used before."""
    return complete(server, prompt, cache_salt=str(uuid.uuid4()))


def test_other_weights_of_the_model_share_nothing_until_they_have_a_name(
    pair: list[Server], tmp_path: Path
) -> None:
    prefiller, decoder = pair
    other = write_tiny_model(tmp_path / "other", TinyModel(seed=1))
    prompt = tokens_of(300, 9840)
    turn = take_turn(prefiller, decoder, prompt)
    longer = [*prompt, *turn.answer.tokens, *tokens_of(40, 9841)]
    leased = prefill(prefiller, prompt)
    old = computed_alone(prefiller, prompt)
    for server in pair:
        reload_model(server, other)
    fetched = [metric(server, FETCHED) for server in pair]
    right = computed_alone(prefiller, prompt)
    assert right.tokens[0] != old.tokens[0]
    assert differences([right], [decode(decoder, prompt, leased).answer]) == []
    params = prefill(prefiller, longer, turn.params)
    got = decode(decoder, longer, params).answer
    assert differences([computed_alone(prefiller, longer)], [got]) == []
    assert [metric(server, FETCHED) for server in pair] == fetched
    for server in pair:
        assert differences([right], [complete(server, prompt)]) == []
        body = {"new_version": "seed-1"}
        assert server.post("/update_weight_version", body).status_code == 200
    named = tokens_of(300, 9842)
    got = decode(decoder, named, prefill(prefiller, named)).answer
    assert differences([computed_alone(prefiller, named)], [got]) == []
    assert metric(decoder, FETCHED) - fetched[1] == len(named)


def test_a_decoder_reads_nothing_that_was_computed_with_other_weights(
    pair: list[Server], tmp_path: Path
) -> None:
    """One engine is reloaded before the other, in either order."""
    prefiller, decoder = pair
    other = write_tiny_model(tmp_path / "third", TinyModel(seed=2))
    for number, (changed, unchanged) in enumerate(((prefiller, decoder), (decoder, prefiller))):
        prompt = tokens_of(300, 9850 + number)
        leased = prefill(prefiller, prompt)
        reload_model(changed, other)
        later = prefill(prefiller, prompt)
        right = computed_alone(decoder, prompt)
        got = decode(decoder, prompt, later).answer
        assert differences([right], [got]) == []
        if changed is decoder:
            assert differences([right], [decode(decoder, prompt, leased).answer]) == []
        reload_model(unchanged, other)


def pushed(servers: list[Server], prompt: Prompt, model: str) -> Answer:
    """Both legs at once."""
    prefiller, decoder = servers
    request_id = str(uuid.uuid4())
    told = {"do_remote_prefill": True, "remote_request_id": request_id, **where(prefiller)}
    body = {**prefill_body(prompt), "model": model}
    with ThreadPoolExecutor(1) as legs:
        p_leg = legs.submit(prefiller.post, "/v1/completions", body, request_id)
        turn = decode(decoder, prompt, told, request_id=request_id, model=model)
        assert p_leg.result(timeout=60).status_code == 200
    return turn.answer


@pytest.mark.nightly
def test_pushed_prompts_are_of_the_decode_engines_own_weights(
    pushing: list[Server], tmp_path: Path
) -> None:
    prefiller, decoder = pushing
    adapter = Adapter(pushing, tmp_path, "pushed")
    prompt = tokens_of(300, 9860)
    for seed in (OLD, NEW):
        right = adapter.right(prefiller, prompt, seed)
        if seed == NEW:
            adapter.write(NEW)
            for server in pushing:
                in_place(adapter, server)
        fetched = metric(decoder, FETCHED)
        got = pushed(pushing, prompt, adapter.name)
        assert differences([right], [got]) == []
        assert metric(decoder, FETCHED) - fetched == len(prompt)
    other = write_tiny_model(tmp_path / "other", TinyModel(seed=1))
    for server in pushing:
        reload_model(server, other)
    got = pushed(pushing, prompt, "tiny")
    assert differences([computed_alone(decoder, prompt)], [got]) == []
