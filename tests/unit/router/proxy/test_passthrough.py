"""Endpoints other than generation, whose requests are passed to one engine."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import digest_of
from router.openai.errors import BadRequestError
from router.proxy.passthrough import find_model_in_form
from router.telemetry.logs import LINES
from scripts.mock_engine import MockEngine, Peer, Received
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import Router, eventually, running_router, settings_for
from tests.unit.router.mock_engine import running_engine

PATHS = (
    "/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/tokenize",
    "/detokenize", "/pooling", "/classify",
)  # fmt: skip
LONG = b"w" * 300
AUDIO = "/v1/audio/transcriptions"


def model_of_form(form: bytes, boundary: bytes) -> str | None:
    span = find_model_in_form(form, boundary)
    return None if span is None else form[slice(*span)].decode("utf-8", "replace")


async def odd(_: Received, peer: Peer) -> None:
    await peer.answer(b'{"data" : [1]}', headers={"x-of-engine": "yes"})


@pytest.mark.parametrize("path", PATHS)
async def test_request_goes_to_a_decoder_and_the_client_gets_its_answer(
    router: Router, p: MockEngine, d: MockEngine, path: str
) -> None:
    d.scripts = [odd]
    asked = {"model": "m", "input": ["a", "b"], "kv_transfer_params": {"remote_host": "evil"}}
    answer = await router.client.post(path, json=asked)
    assert (answer.status_code, answer.content) == (200, b'{"data" : [1]}')
    assert answer.headers["x-of-engine"] == "yes"
    assert not p.requests
    assert (d.last.path, d.last.json) == (path, {"model": "m", "input": ["a", "b"]})
    labels = {"endpoint": path, "flow": "passed", "status": "200", "outcome": "ok"}
    assert router.metric("requests_total", **labels) == 1
    assert router.metric("decode_only_total", reason="passed") == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"detail":"Not Found"}',  # FastAPI
        b'{"error":{"message":"Not Found","type":"NotFoundError","param":null,"code":404}}',  # vLLM
        b'{"error":{"message":"Not Found: POST PATH","type":"NotFoundError","code":404}}',  # ours
        b"404 page not found",
        b"",
    ],
)
@pytest.mark.parametrize("path", ["/v1/rerank", AUDIO, "/v1/messages/count_tokens"])
async def test_engine_that_lacks_the_endpoint_is_named(
    router: Router, d: MockEngine, path: str, body: bytes
) -> None:
    async def unknown(request: Received, peer: Peer) -> None:
        answered = body.replace(b"PATH", request.path.encode())
        await peer.answer(answered, 404, {"etag": "a"})

    d.usual = unknown
    given: dict[str, Any] = {"json": {"model": "m", "messages": [{"role": "user", "content": "a"}]}}
    if path == AUDIO:
        given = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"model": "m"}}
    answer = await router.client.post(path, **given)
    assert answer.status_code == 404
    at = "/tokenize" if path.endswith("tokens") else path
    text = f"decode engine 127.0.0.1:{d.port} has no endpoint {at}"
    assert answer.json()["error"]["message"] == text
    assert "etag" not in answer.headers
    assert router.engine(d).is_available


async def test_404_of_an_engine_that_gives_a_reason_is_passed_on(
    router: Router, d: MockEngine
) -> None:
    body = {"error": {"message": "no file with this id", "type": "NotFoundError", "code": 404}}
    d.usual = answering(404, body)
    answer = await router.client.post("/v1/rerank", json={"model": "m"})
    assert (answer.status_code, answer.json()) == (404, body)


@pytest.mark.parametrize("status", [400, 422, 500, 501, 503, 204])
async def test_client_gets_an_engines_error_and_the_engine_stays_healthy(
    start_router: StartRouter, d: MockEngine, status: int
) -> None:
    router = await start_router(health_interval=30)
    d.scripts = [answering(status, b"" if status == 204 else b"cannot")] * 12
    for _ in range(12):
        answer = await router.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert answer.status_code == status
    assert len(d.requests) == 12
    assert router.engine(d).is_available
    assert (await router.complete()).status_code == 200


async def test_model_that_only_prefillers_serve_goes_to_a_prefiller(
    start_router: StartRouter, p: MockEngine
) -> None:
    p.models = ["m", "embedder"]
    router = await start_router()
    await router.knows_its_engines()
    p.scripts = [odd]
    answer = await router.client.post("/v1/embeddings", json={"model": "embedder", "input": "a"})
    assert answer.status_code == 200
    assert p.last.path == "/v1/embeddings"


async def test_request_is_retried_after_a_decoder_died(p: MockEngine, d: MockEngine) -> None:
    async with (
        running_engine(d.usual) as dying,
        running_router(settings_for(p=[p], d=[dying, d], health_interval=30)) as router,
    ):
        await eventually(lambda: all(e.is_available for e in router.gateway.fleet.engines))
        await dying.stop()
        d.scripts = [odd] * 4
        for _ in range(4):
            answer = await router.client.post("/tokenize", json={"model": "m", "prompt": "a"})
            assert answer.status_code == 200


@pytest.mark.parametrize("body", [b"[1]", b"{", b""])
async def test_body_that_is_not_a_json_object_reaches_no_engine(
    router: Router, d: MockEngine, body: bytes
) -> None:
    answer = await router.client.post("/v1/embeddings", content=body)
    assert answer.status_code == 400
    assert not d.requests


async def test_form_is_passed_unchanged(router: Router, p: MockEngine, d: MockEngine) -> None:
    d.scripts = [odd]
    files = {"file": ("speech.wav", b"\x00RIFF\r\n\r\n--x\xff" * 1000, "audio/wav")}
    answer = await router.client.post(AUDIO, files=files, data={"model": "m", "language": "de"})
    assert answer.status_code == 200
    assert not p.requests
    sent = answer.request
    assert d.last.body == sent.read()
    assert d.last.header("content-type") == sent.headers["content-type"]
    labels = {"endpoint": AUDIO, "flow": "passed", "status": "200", "outcome": "ok"}
    assert router.metric("requests_total", **labels) == 1


@pytest.mark.parametrize(("kind", "status"), [("text/plain", 200), ("application/json", 502)])
async def test_empty_transcript_is_passed(
    router: Router, d: MockEngine, kind: str, status: int
) -> None:
    async def hears_nothing(request: Received, peer: Peer) -> None:
        await peer.answer(b"", headers={"content-type": kind})

    d.usual = hears_nothing
    files = {"file": ("a.wav", b"RIFF", "audio/wav")}
    data = {"model": "m", "response_format": "text"}
    answer = await router.client.post(AUDIO, files=files, data=data)
    assert answer.status_code == status
    assert router.engine(d).breaker.failures == (status != 200)


async def test_form_with_an_unknown_model_is_404(router: Router, d: MockEngine) -> None:
    files = {"file": ("a.wav", b"x")}
    answer = await router.client.post(AUDIO, files=files, data={"model": "nobody's"})
    assert answer.status_code == 404
    assert "nobody's" in answer.json()["error"]["message"]
    assert not d.requests


@pytest.mark.parametrize(
    ("kind", "status"),
    [("application/json", 415), ("multipart/form-data", 400), ("text/plain; boundary=x", 415)],
)
async def test_body_that_is_not_a_form_is_rejected(router: Router, kind: str, status: int) -> None:
    answer = await router.client.post(AUDIO, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("form", "model"),
    [
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--', "whisper"),
        (b'--b\r\ncontent-disposition: form-data; name=model\r\n\r\nw\r\n--b--', "w"),
        (b'--b\r\nX: y\r\nContent-Disposition:form-data;name="model"; x=1\r\n\r\nw\r\n--b--', "w"),
        (b'--b\r\nContent-Disposition: form-data; name="model_x"\r\n\r\nw\r\n--b--', None),
        (b'--b\r\nContent-Disposition: form-data; filename="model"\r\n\r\nw\r\n--b--', None),
        (b'--c\r\nContent-Disposition: form-data; name="model"\r\n\r\nw\r\n--c--', None),
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b' % LONG, None),
        (b"", None),
        (b"--b" * 10_000, None),
    ],
)  # fmt: skip
def test_model_of_a_form_is_found(form: bytes, model: str | None) -> None:
    assert model_of_form(form, b"b") == model


def field(disposition: bytes, value: bytes = b"other") -> bytes:
    return b"--b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (disposition, value)


MODEL = field(b'name="model"', b"m")
LONG_HEAD = b"--b\r\nX: %b\r\nContent-Disposition: form-data; name=model\r\n\r\nother\r\n"


@pytest.mark.parametrize(
    "more",
    [
        field(b'name="model"'),
        field(b"name*=utf-8''model"),
        field(b'name="x"; name="model"'),
        field(b'name="mod\\el"'),
        field(b'name="model'),
        field(b'name = "model"'),
        field(b'x;\r\n name="model"'),
        field(b'filename="a"\nContent-Disposition: form-data; name="model"'),
        LONG_HEAD % (b"y" * 5000),
        field(b"name=x", b"\r\n--bc\r\n") + field(b"name=model"),
        b"--b \r\nContent-Disposition: form-data; name=model\r\n\r\nother\r\n",
        b"--b\r\n\r\nother\r\n",
        b"--b\r\nContent-Disposition : form-data; name=model\r\n\r\nother\r\n",
        field(b"name=x") * 999 + field(b"name=model"),
    ],
)
def test_ambiguous_form_is_rejected(more: bytes) -> None:
    """Otherwise the router could check another model than the engine serves."""
    with pytest.raises(BadRequestError, match="the form is ambiguous"):
        model_of_form(MODEL + more + b"--b--\r\n", b"b")


def test_form_of_too_many_fields_is_rejected() -> None:
    with pytest.raises(BadRequestError, match="more than 1000 fields"):
        model_of_form(MODEL + field(b"name=x") * 1000 + b"--b--\r\n", b"b")


async def test_form_of_many_fields_reaches_the_engine_without_internal_ones(
    router: Router, d: MockEngine
) -> None:
    d.usual = odd
    words, internal = field(b'name="words[]"'), field(b'name="kv_transfer_params"', b"{}")
    form = MODEL + (words + internal) * 499 + words + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await router.client.post(AUDIO, content=form, headers=headers)
    assert answer.status_code == 200, answer.text
    assert d.last.body == MODEL + words * 500 + b"--b--\r\n"


def test_form_without_an_end_is_rejected() -> None:
    with pytest.raises(BadRequestError, match="closing boundary"):
        model_of_form(MODEL[:-2], b"b")


@pytest.mark.parametrize(
    "more",
    [
        field(b'name="file"; filename="a \\"b\\".wav"', b"RIFF--b\r\n--"),
        field(b'name="file"; filename="a;b.wav"; filename*=UTF-8\'\'%e2%82%ac.wav'),
        field(b'name="timestamp_granularities[]"') * 999,
        field(b'name="empty"', b""),
        b"--b--\r\n" + field(b'name="model"'),
    ],
)
def test_forms_of_usual_clients_are_accepted(more: bytes) -> None:
    assert model_of_form(MODEL + more + b"--b--\r\n", b"b") == "m"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("multipart/form-data; boundary=----WebKitFormBoundaryA", 200),
        ("multipart/form-data; boundary=----WebKitFormBoundaryA; boundary=b", 400),
        ("multipart/form-data; boundary=----WebKitFormBoundaryA; boundary*=utf-8''b", 400),
    ],
)
async def test_form_with_several_boundaries_is_rejected(
    router: Router, d: MockEngine, kind: str, status: int
) -> None:
    d.usual = odd
    form = MODEL.replace(b"--b", b"------WebKitFormBoundaryA") + b"------WebKitFormBoundaryA--\r\n"
    answer = await router.client.post(AUDIO, content=form, headers={"content-type": kind})
    assert answer.status_code == status
    assert len(d.requests) == (status == 200)


# LoRA adapters.

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = {"lora_name": "pirate", "lora_path": "/adapters/pirate"}


async def test_adapter_is_loaded_at_all_engines_and_served_at_once(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(lora_updates=True)
    await router.knows_its_engines()
    answer = await router.client.post(LOAD, json=ADAPTER)
    assert answer.status_code == 200
    for engine in (p, d):
        assert (engine.last.path, engine.last.json) == (LOAD, ADAPTER)
        assert router.engine(engine).adapters == {"pirate"}
    snapshot = router.gateway.fleet
    await eventually(lambda: "pirate" in snapshot.snapshot.by_model)
    assert (await router.client.post(UNLOAD, json={"lora_name": "pirate"})).status_code == 200
    await eventually(lambda: "pirate" not in snapshot.snapshot.by_model)


async def test_first_failure_of_an_adapter_load_is_returned(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_router(lora_updates=True)
    d.scripts = [answering(404, {"error": {"message": "no such adapter"}})]
    answer = await router.client.post(LOAD, json=ADAPTER)
    assert answer.status_code == 404
    assert answer.json() == {"error": {"message": "no such adapter"}}
    assert len(p.requests) == 1


async def test_adapter_change_has_an_access_log_line(
    start_router: StartRouter, d: MockEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router = await start_router(lora_updates=True)
    given = {"x-request-id": "one"}
    answer = await router.client.post(LOAD, json=ADAPTER, headers=given)
    assert answer.headers["x-request-id"] == "one"
    d.scripts = [answering(404, {"error": {"message": "no such adapter"}})]
    forged = {"lora_name": "pirate\nINFO forged", "lora_path": "/x"}
    assert (await router.client.post(LOAD, json=forged)).status_code == 404
    assert (await router.client.post(UNLOAD, json={})).status_code == 400
    router.gateway.records.flush()
    lines = [
        (told["endpoint"], told["status"], told["outcome"], told["flow"])
        for record in caplog.records
        for line in getattr(record, LINES, ())
        if (told := line.content())["flow"] == "adapters"
    ]
    assert lines == [
        (LOAD, 200, "ok", "adapters"),
        (LOAD, 404, "refused", "adapters"),
        (UNLOAD, 400, "refused", "adapters"),
    ]
    assert "\nINFO forged" not in caplog.text


async def test_form_with_two_models_does_not_evade_the_models_of_a_key(
    start_router: StartRouter, p: MockEngine, d: MockEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    entry = {"name": "one", "sha256": digest_of(b"k").hex(), "models": ["m"]}
    path.write_text(json.dumps({"keys": [entry]}))
    router = await start_router(api_keys_file=path)
    p.usual = d.usual = odd
    shown = {"authorization": "Bearer k", "content-type": "multipart/form-data; boundary=b"}
    for more, status in ((b"", 200), (field(b'name="model"'), 400)):
        form = MODEL + more + b"--b--\r\n"
        answer = await router.client.post(AUDIO, content=form, headers=shown)
        assert answer.status_code == status
    assert len(p.requests) + len(d.requests) == 1


async def test_key_cannot_change_adapters_of_other_models(
    start_router: StartRouter, p: MockEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    entry = {"name": "one", "sha256": digest_of(b"k").hex(), "models": ["m", "pirate"]}
    path.write_text(json.dumps({"keys": [entry]}))
    router = await start_router(lora_updates=True, api_keys_file=path)
    shown = {"authorization": "Bearer k"}
    for name, status in (("pirate", 200), ("other", 404)):
        for endpoint in (LOAD, UNLOAD):
            body = ADAPTER | {"lora_name": name}
            answer = await router.client.post(endpoint, json=body, headers=shown)
            assert answer.status_code == status
    assert {request.json["lora_name"] for request in p.requests} == {"pirate"}


async def test_adapter_changes_count_towards_the_limits_of_a_key(
    start_router: StartRouter, p: MockEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    entry = {"name": "one", "sha256": digest_of(b"k").hex(), "requests_per_minute": 2}
    path.write_text(json.dumps({"keys": [entry]}))
    router = await start_router(lora_updates=True, api_keys_file=path)
    shown = {"authorization": "Bearer k"}
    answers = [await router.client.post(LOAD, json=ADAPTER, headers=shown) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert "retry-after" in answers[2].headers
    assert router.gateway.authenticator is not None
    assert router.gateway.authenticator.running("one") == 0
    assert len(p.requests) == 2


async def test_adapter_changes_are_disabled_by_default(
    router: Router, p: MockEngine, d: MockEngine
) -> None:
    answer = await router.client.post(LOAD, json=ADAPTER)
    assert answer.status_code == 403
    assert "--lora-updates" in answer.json()["error"]["message"]
    assert not p.requests
    assert not d.requests


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"lora_name": 7}, 400), ({"lora_name": "a" * 70_000}, 413)],
)
async def test_invalid_adapter_request_reaches_no_engine(
    start_router: StartRouter, d: MockEngine, body: dict[str, object], status: int
) -> None:
    router = await start_router(lora_updates=True)
    answer = await router.client.post(LOAD, content=json.dumps(body))
    assert answer.status_code == status
    assert not d.requests


# One model.


async def test_single_model_is_returned_by_its_endpoint(router: Router) -> None:
    await router.knows_its_engines()
    assert (await router.client.get("/v1/models/m")).json()["id"] == "m"
    answer = await router.client.get("/v1/models/org/none")
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
