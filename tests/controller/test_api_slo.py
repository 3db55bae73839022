"""Targets: every channel, their order, and what is not a target."""

from __future__ import annotations

from typing import Any

import pytest

from controller.api.app import create_app
from controller.api.headers import OBJECTIVE_HEADER
from controller.policy.slo import Slo
from controller.runtime.metrics import Metrics
from tests.controller.service_double import ScriptedService, call, slo_classes

PATH = "/v1/completions"
CHANNELS = ("x-paceline-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")


def ask(service: ScriptedService, headers: Any = (), **body: Any) -> Any:
    app = create_app(service, slo_classes=slo_classes())
    return call(app, "POST", PATH, body={"prompt": "x", **body}, headers=headers)


def test_the_strongest_channel_wins_and_every_kind_is_its_own() -> None:
    service = ScriptedService()
    headers = {name: str(100 * (n + 1)) for n, name in enumerate(CHANNELS)}
    ask(service, {**headers, "x-llm-d-slo-tpot-ms": "40"}, slo={"ttft_ms": 50, "e2e_ms": None})
    assert service.request.slo == Slo(ttft_s=0.05, tpot_s=0.04)
    for position, name in enumerate(CHANNELS):
        service = ScriptedService()
        ask(service, {other: headers[other] for other in CHANNELS[position:]})
        assert service.request.slo.ttft_s == float(headers[name]) / 1000


@pytest.mark.parametrize("kind", ["ttft", "tpot", "e2e"])
@pytest.mark.parametrize("prefix", ["x-paceline-slo", "x-slo"])
def test_every_kind_has_a_header(kind: str, prefix: str) -> None:
    service = ScriptedService()
    ask(service, {f"{prefix}-{kind}-ms": "1.5e2"})
    assert service.request.slo == Slo(**{f"{kind}_s": 0.15})


@pytest.mark.parametrize(
    "value",
    ["NaN", "nan", "Infinity", "-inf", "-5", "0", "0.0", "1e8", "1e999", "", " ", "fast", "5ms",
     "1_000", "0x10", "1,2", "٣"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["x-slo-tpot-ms", "x-llm-d-slo-ttft-ms"])
def test_a_header_that_is_no_target_is_named(name: str, value: str) -> None:
    service = ScriptedService()
    answer = ask(service, [(name, value.encode().decode("latin-1"))])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_slo", name)
    assert name in error["message"]
    assert service.streams == []


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1, 0, True, "500", [5], {}, 1e8, 10**400]
)
def test_a_body_target_that_is_no_target_is_named(value: Any) -> None:
    service = ScriptedService()
    answer = ask(service, slo={"tpot_ms": value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_slo", "slo.tpot_ms")
    assert service.streams == []


@pytest.mark.parametrize(
    ("slo", "param"), [([], "slo"), ("fast", "slo"), ({"ttft": 5}, "slo.ttft")]
)
def test_a_body_slo_of_another_shape_is_named(slo: Any, param: str) -> None:
    answer = ask(ScriptedService(), slo=slo)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        "invalid_slo",
        param,
    )


def test_duplicates_may_agree_but_not_differ() -> None:
    name = "x-slo-ttft-ms"
    service = ScriptedService()
    assert ask(service, [(name, "500"), (name, "5e2, 500.0")]).status_code == 200
    assert service.request.slo.ttft_s == 0.5
    answer = ask(ScriptedService(), [(name, "500"), (name, "501")])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_a_weak_channel_is_checked_although_a_strong_one_wins() -> None:
    answer = ask(ScriptedService(), {"x-llm-d-slo-ttft-ms": "soon"}, slo={"ttft_ms": 100})
    assert answer.status_code == 400


def test_the_largest_and_a_tiny_target_are_targets() -> None:
    service = ScriptedService()
    ask(service, {"x-slo-ttft-ms": "10000000", "x-slo-tpot-ms": "0.001"})
    assert service.request.slo == Slo(ttft_s=1e4, tpot_s=1e-6)


def test_classes_come_from_the_tier_or_the_objective() -> None:
    for headers, body, expected in (
        ({}, {}, None),
        ({}, {"service_tier": "priority"}, "priority"),
        ({}, {"service_tier": "auto"}, None),
        ({"x-llm-d-inference-objective": "flex"}, {}, "flex"),
        ({"x-llm-d-inference-objective": "flex"}, {"service_tier": "priority"}, "priority"),
    ):
        service = ScriptedService()
        assert ask(service, headers, **body).status_code == 200
        assert service.request.slo_class == expected


def test_an_unknown_class_is_named_with_those_that_exist() -> None:
    for headers, body, param in (
        ({}, {"service_tier": "scale"}, "service_tier"),
        ({"x-llm-d-inference-objective": "x"}, {}, "x-llm-d-inference-objective"),
        *(
            ({"x-llm-d-inference-objective": "x"}, {"service_tier": tier}, OBJECTIVE_HEADER)
            for tier in ("auto", "default", "priority")
        ),
    ):
        answer = ask(ScriptedService(), headers, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_slo", param)
        assert "default, flex, priority" in error["message"]


def test_the_tenant_is_the_gateways_before_the_bodys() -> None:
    service = ScriptedService()
    ask(service, {"x-llm-d-inference-fairness-id": "gold"}, user="someone")
    assert service.request.tenant == "gold"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tenant_that_no_policy_counts_by_is_named_as_ignored(is_stream: bool) -> None:
    header = "x-llm-d-inference-fairness-id"
    for headers, body, names in (
        ({}, {}, None),
        ({}, {"user": "someone"}, "user"),
        ({header: "gold"}, {"metadata": {}}, f"metadata, {header}"),
        ({header: "gold"}, {"user": "someone"}, f"user, {header}"),
    ):
        answer = ask(ScriptedService(), headers, stream=is_stream, **body)
        assert answer.status_code == 200
        assert answer.headers.get("x-paceline-ignored-parameters") == names


def test_lenient_mode_ignores_and_counts() -> None:
    service = ScriptedService()
    metrics = Metrics("tiny", block_size=16, num_blocks=10)
    app = create_app(service, slo_classes=slo_classes(), lenient_slo=True, metrics=metrics)
    body = {"prompt": "x", "slo": {"ttft_ms": "x", "e2e_ms": 9000}, "service_tier": "gone"}
    answer = call(app, "POST", PATH, body=body, headers={"x-slo-tpot-ms": "nan"})
    assert answer.status_code == 200
    assert service.request.slo == Slo(e2e_s=9.0)
    assert service.request.slo_class is None
    assert "paceline_slo_ignored_total 3.0" in call(app, "GET", "/metrics").text


def test_a_clients_id_is_a_label_only_when_it_can_be_one() -> None:
    service = ScriptedService()
    answer = ask(service, {"x-request-id": "x" * 200})
    assert answer.headers["x-request-id"] == "run-1"
    assert "x-client-request-id" not in answer.headers


def test_objectives_may_not_differ_either() -> None:
    name = "x-llm-d-inference-objective"
    answer = ask(ScriptedService(), [(name, "flex"), (name, "priority")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
