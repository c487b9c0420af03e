"""Other names for models, and what a client reads that asks for a wrong model or path."""

import httpx
import pytest

from router.auth.api_keys import digest_of
from router.settings import SettingsError, load
from scripts.mock_engine import MockEngine
from tests.unit.router.conftest import StartRouter
from tests.unit.router.engine_scripts import answering
from tests.unit.router.harness import Router

ALIASES = ("claude-*-haiku*=m", "claude-*=n", "gpt-4o=m", "*=m")


async def start_known(
    start_router: StartRouter, *engines: MockEngine, **settings: object
) -> Router:
    for engine in engines:
        engine.models = ["m", "n"]
    router = await start_router(**settings)
    await router.knows_its_engines()
    return router


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("claude-3-5-haiku-20241022", "m"),
        ("claude-haiku-4-5", "n"),
        ("claude-opus-4-5", "n"),
        ("claude-", "n"),
        ("gpt-4o", "m"),
        ("anything\nat all", "m"),
        ("m", "m"),
        ("n", "n"),
    ],
)
async def test_engines_are_asked_for_the_model_that_the_first_matching_pattern_names(
    start_router: StartRouter, p: MockEngine, d: MockEngine, asked: str, served: str
) -> None:
    router = await start_known(start_router, p, d, model_alias=ALIASES)
    answer = await router.complete(model=asked)
    assert answer.status_code == 200
    assert p.last.json["model"] == d.last.json["model"] == served
    labels = {"endpoint": "/v1/completions", "flow": "pull", "status": "200", "outcome": "ok"}
    assert router.metric("requests_total", **labels) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_aliases_hold_for_every_endpoint(
    start_router: StartRouter, p: MockEngine, d: MockEngine, path: str, body: dict[str, object]
) -> None:
    router = await start_known(start_router, p, d, model_alias=("claude-*=n",))
    await router.client.post(path, json={"model": "claude-x", **body})
    assert d.last.json["model"] == "n"


async def test_alias_in_a_form_is_replaced(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_known(start_router, p, d, model_alias=("whisper-*=n",))
    d.usual = answering(200, {"text": "hello"})
    file = ("a.wav", b"RIFF\r\nmodel=whisper-1")
    answer = await router.client.post(
        "/v1/audio/transcriptions", data={"model": "whisper-1"}, files={"file": file}
    )
    assert answer.json() == {"text": "hello"}
    assert b'name="model"\r\n\r\nn\r\n--' in d.last.body
    assert b"RIFF\r\nmodel=whisper-1\r\n--" in d.last.body


async def test_models_list_aliases(start_router: StartRouter, p: MockEngine, d: MockEngine) -> None:
    router = await start_known(
        start_router, p, d, model_alias=("claude-*=n", "gpt-4o=m", "lost=none", "m=n")
    )
    listed = (await router.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["m", "n", "claude-*", "gpt-4o"]
    assert {**listed[2], "id": "n"} == listed[1]
    one = await router.client.get("/v1/models/claude-opus-4-5")
    assert one.json() == {**listed[1], "id": "claude-opus-4-5"}


async def test_unknown_model_is_answered_with_the_served_ones(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    router = await start_known(start_router, p, d, model_alias=("lost=none", "gpt-4o=m"))
    for model in ("gpt-5", "lost"):
        expected = f"The model `{model}` does not exist. Models that are served: gpt-4o, m, n."
        answers = [
            await router.complete(model=model),
            await router.client.get(f"/v1/models/{model}"),
            await router.client.post(
                "/v1/messages",
                json={
                    "model": model,
                    "max_tokens": 5,
                    "messages": [{"role": "user", "content": "hi"}],
                },
            ),
        ]
        for answer in answers:
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == expected
    long = (await router.complete(model="x" * 100_000)).json()["error"]["message"]
    assert len(long) < 1000


async def test_many_served_models_are_cut_short(
    start_router: StartRouter, p: MockEngine, d: MockEngine
) -> None:
    p.models = d.models = [f"m{number:03}" for number in range(100)]
    router = await start_router()
    await router.knows_its_engines()
    message = (await router.complete(model="gpt-5")).json()["error"]["message"]
    assert message.endswith("m018, m019, and 80 more.")


async def test_a_key_sees_only_its_own_models(
    start_router: StartRouter, p: MockEngine, d: MockEngine, tmp_path: object
) -> None:
    file = tmp_path / "keys.yaml"  # type: ignore[operator]
    file.write_text(f"keys:\n- {{name: k, sha256: {digest_of(b'k').hex()}, models: [n, gone]}}\n")
    aliases = ("claude-*=n", "gpt-*=m")
    router = await start_known(start_router, p, d, api_keys_file=file, model_alias=aliases)
    router.client.headers["authorization"] = "Bearer k"

    async def message(model: str) -> str:
        answer = await router.complete(model=model)
        assert answer.status_code == 404
        return str(answer.json()["error"]["message"])

    assert (await router.complete(model="claude-x")).status_code == 200
    refused = "The model `{}` does not exist or you do not have access to it."
    allowed = " Models that this API key may use: gone, n."
    assert await message("gpt-x") == refused.format("gpt-x") + allowed
    assert await message("m") == refused.format("m") + allowed
    unserved = "The model `gone` does not exist. Models that are served: claude-*, n."
    assert await message("gone") == unserved
    listed = (await router.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["n", "claude-*"]


@pytest.mark.parametrize("given", ["claude-*", "=m", "claude-*=", ["a=b", 5]])
def test_alias_without_a_name_or_a_model_is_refused(given: object) -> None:
    with pytest.raises(SettingsError, match="not as in claude"):
        load({"model_alias": given, "engines_file": "engines.yaml"})


def test_aliases_are_given_as_words_list_or_mapping() -> None:
    for given in ("a*=b c=d=e", ["a*=b", "c=d=e"], {"a*": "b", "c": "d=e"}):
        settings = load({"model_alias": given, "engines_file": "engines.yaml"})
        assert settings.model_alias == ("a*=b", "c=d=e")


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions: give the client a base URL that ends"),
        ("POST", "/responses", "/v1/responses: give the client a base URL that ends in /v1."),
        ("GET", "/models", "/v1/models: give the client a base URL that ends in /v1."),
        ("POST", "/v1/v1/messages", "/v1/messages: give the client a base URL that does not end"),
        ("POST", "//v1/completions", "/v1/completions: give the client a base URL without a slash"),
        ("POST", "/v1//v1/messages", "/v1/messages: give the client a base URL that does not end"),
        ("POST", "/v1//responses", "/v1/responses: give the client a base URL without a slash"),
        ("POST", "//responses", "/v1/responses: give the client a base URL that ends in /v1."),
        ("GET", "//v1/models", "/v1/models: give the client a base URL without a slash at its"),
        ("POST", "//v1/nothing", "Not Found"),
        ("POST", "/nothing", "POST /nothing: Not Found"),
        ("GET", "/v1/v1/nothing", "GET /v1/v1/nothing: Not Found"),
    ],
)
async def test_wrong_base_url_is_explained(
    router: Router, method: str, path: str, advice: str
) -> None:
    url = router.url + path  # httpx takes a path with two slashes for a host
    answer: httpx.Response = await router.client.request(method, url, json={"model": "m"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert advice in error["message"]
    assert ("base URL" in error["message"]) == ("base URL" in advice)
