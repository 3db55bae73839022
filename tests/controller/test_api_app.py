"""The application around the generation routes: guards, health, models, metrics, OpenAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from controller.api.app import create_app
from controller.policy.slo import Slo, SloClass
from controller.runtime.generation import GenerationRequest, ServiceHealth
from controller.runtime.metrics import Metrics
from tests.controller.service_double import ScriptedService, ScriptedStream, call

COMPLETIONS = "/v1/completions"


def test_unknown_routes_and_methods_are_openai_errors() -> None:
    app = create_app(ScriptedService())
    for method, path, status, code in (
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/telemetry/summary", 404, "not_found"),
    ):
        answer = call(app, method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert path in answer.json()["error"]["message"]


def test_the_key_guards_every_registered_route_but_three() -> None:
    metrics = Metrics("tiny", block_size=16, num_blocks=1)
    app = create_app(ScriptedService(), api_key="secret", metrics=metrics)
    paths = set(app.openapi()["paths"]) | {"/docs", "/openapi.json", "/nothing"}
    assert len(paths) > 12
    for path in paths:
        for method in ("GET", "POST"):
            status = call(app, method, path).status_code
            assert (status == 401) == (path not in {"/health", "/ready", "/ping"}), path


@pytest.mark.parametrize(
    "path",
    ["/health/", "//health", "/health/../v1/models", "/HEALTH", "/v1/models?x=/health",
     "/health%2f..%2fv1%2fmodels", "/ping;x", "/v1/models#/health"],
)  # fmt: skip
def test_no_spelling_of_a_path_gets_around_the_key(path: str) -> None:
    app = create_app(ScriptedService(), api_key="secret")
    assert call(app, "GET", path).status_code == 401


def test_a_host_header_cannot_move_a_path() -> None:
    app = create_app(ScriptedService(), api_key="secret")
    answer = call(app, "GET", "/v1/models", headers={"host": "x/health?"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("authorization", "Bearer secret")], 200),
        ([("authorization", "bearer secret")], 200),
        ([("authorization", "Bearer  secret")], 200),
        ([("authorization", "Bearer Secret")], 401),
        ([("authorization", "Bearer secret2")], 401),
        ([("authorization", "Basic secret")], 401),
        ([("authorization", "secret")], 401),
        ([("authorization", "Bearer")], 401),
        ([("authorization", "Bearer é")], 401),
        ([("authorization", "Bearer x"), ("authorization", "Bearer secret")], 401),
    ],
)
def test_the_key_must_be_the_key(headers: list[tuple[str, str]], status: int) -> None:
    app = create_app(ScriptedService(), api_key="secret")
    assert call(app, "GET", "/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_a_mistake_not_an_open_door(key: str) -> None:
    with pytest.raises(ValueError, match="api_key"):
        create_app(ScriptedService(), api_key=key)


def test_the_default_class_must_exist() -> None:
    with pytest.raises(ValueError, match="default_class"):
        create_app(ScriptedService(), default_class="gold")


def test_a_body_over_the_limit_is_a_413_declared_or_not() -> None:
    service = ScriptedService()
    app = create_app(service, max_body_bytes=100)
    answer = call(app, "POST", COMPLETIONS, body={"prompt": "x" * 100})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b'{"prompt": "'

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": "application/json"}
            return await client.post(COMPLETIONS, content=pieces(), headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert service.streams == []


def test_health_and_readiness_are_the_services() -> None:
    service = ScriptedService()
    app = create_app(service)
    for state, health, ready in (
        (ServiceHealth(True, True), 200, 200),
        (ServiceHealth(True, False, "loading"), 200, 503),
        (ServiceHealth(True, False, "draining"), 200, 503),
        (ServiceHealth(False, False, "no step has ended for 130 s"), 503, 503),
    ):
        service.state = state
        assert call(app, "GET", "/health").status_code == health
        assert call(app, "GET", "/ping").status_code == health
        answer = call(app, "GET", "/ready")
        assert answer.status_code == ready
        assert answer.json().get("reason", "") == state.reason


@pytest.mark.parametrize(
    ("state", "code", "retry_after"),
    [
        (ServiceHealth(True, False, "loading"), "not_ready", "2"),
        (ServiceHealth(True, False, "draining"), "draining", "2"),
        (ServiceHealth(False, False, "the engine stopped"), "dead", None),
    ],
)
def test_generation_is_a_503_with_a_reason_unless_ready(
    state: ServiceHealth, code: str, retry_after: str | None
) -> None:
    service = ScriptedService()
    service.state = state
    for stream in (False, True):
        body = {"prompt": "x", "stream": stream}
        answer = call(create_app(service), "POST", COMPLETIONS, body=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"] == state.reason
        assert answer.headers["x-llm-d-request-dropped-reason"] == code
        assert answer.headers.get("retry-after") == retry_after
        assert ("retry-after-ms" in answer.headers) is (retry_after is not None)
    assert service.streams == []


def test_a_bug_is_a_500_that_tells_nothing_of_it() -> None:
    class Broken(ScriptedService):
        def submit(self, request: GenerationRequest) -> ScriptedStream:
            raise RuntimeError("a secret detail")

    answer = call(create_app(Broken()), "POST", COMPLETIONS, body={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


def test_models() -> None:
    app = create_app(ScriptedService())
    card = call(app, "GET", "/v1/models/tiny/model").json()
    assert card["id"] == "tiny/model"
    assert card["max_model_len"] == 200
    assert call(app, "GET", "/v1/models").json() == {"object": "list", "data": [card]}
    answer = call(app, "GET", "/v1/models/other")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back() -> None:
    app = create_app(ScriptedService())
    answer = call(app, "POST", "/tokenize", body={"prompt": "hé"}).json()
    assert answer == {"count": 4, "max_model_len": 200, "tokens": [257, 104, 195, 169]}
    body = {"prompt": "hé", "add_special_tokens": False}
    assert call(app, "POST", "/tokenize", body=body).json()["tokens"] == [104, 195, 169]
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert call(app, "POST", "/tokenize", body=body).json()["count"] == 19
    answer = call(app, "POST", "/detokenize", body={"tokens": [257, 104, 195, 169]}).json()
    assert answer == {"prompt": "<bos>hé"}
    info = call(app, "GET", "/tokenizer_info").json()
    assert info["vocab_size"] == 260
    for path, bad, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {"tokens": [5, 260]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ):
        answer = call(app, "POST", path, body=bad)
        assert answer.status_code in {400, 404}
        assert answer.json()["error"]["param"] == param


def test_a_model_without_a_template_says_where_to_go() -> None:
    service = ScriptedService()
    service.model = replace(service.model, has_chat_template=False)
    body = {"messages": [{"role": "user", "content": "x"}]}
    answer = call(create_app(service), "POST", "/v1/chat/completions", body=body)
    assert answer.status_code == 400
    assert "/v1/completions" in answer.json()["error"]["message"]


def test_version_and_load() -> None:
    app = create_app(ScriptedService())
    assert call(app, "GET", "/version").json()["version"]
    assert call(app, "GET", "/load").json() == {"server_load": 0}


def resolve(document: dict[str, Any], node: Any) -> None:
    """Every reference of an OpenAPI page leads somewhere."""
    if isinstance(node, dict):
        if "$ref" in node:
            target: Any = document
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part]
        for value in node.values():
            resolve(document, value)
    elif isinstance(node, list):
        for value in node:
            resolve(document, value)


def test_the_openapi_page_knows_bodies_answers_and_chunks() -> None:
    app = create_app(ScriptedService(), slo_classes={"default": SloClass("default", Slo())})
    page = call(app, "GET", "/openapi.json").json()
    resolve(page, page)
    operation = page["paths"]["/v1/chat/completions"]["post"]
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith("/ChatAnswer")
    assert content["text/event-stream"]["schema"]["$ref"].endswith("/ChatChunk")
    body = page["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "slo", "stop", "logit_bias", "ignore_eos"} <= body.keys()
    assert "ttft_ms" in body["slo"]["anyOf"][0]["properties"]
    for item in page["paths"].values():
        for answers in item.values():
            # What is wrong with a request is a 400 here.
            assert "422" not in answers["responses"]
