"""The HTTP door over the real engine: a tiny random model, its tokenizer, the planner, the
database.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from controller.api.app import create_app
from controller.config import Settings
from controller.runtime.wiring import Runtime, build_runtime
from tests.controller.service_double import Wire, call, run_async, sse, usage_of

pytestmark = pytest.mark.device

COMPLETIONS = "/v1/completions"
CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tiny_model(folder: Path) -> None:
    """Random weights and a byte-level tokenizer whose vocabulary is smaller than the head."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<eos>", "<bos>", *alphabet]
    fast = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        bos_token_id=1, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def tiny_runtime(folder: Path, **changes: Any) -> Iterator[Runtime]:
    """A started server over the tiny model in `folder`, without its door."""
    save_tiny_model(folder)
    settings = Settings(
        model=str(folder),
        served_model_name="tiny",
        dtype="float32",
        device="cpu",
        db=f"sqlite:///{folder / 'telemetry.db'}",
        kv_cache_memory_bytes=1 << 20,
        max_model_len=CONTEXT,
        is_warmup_enabled=False,
        **changes,
    )
    made = build_runtime(settings, lambda done, total, what: None)
    yield made
    made.close()


def door_of(runtime: Runtime) -> FastAPI:
    return create_app(
        runtime.service,
        slo_classes=runtime.settings.slo_classes,
        metrics=runtime.metrics,
        telemetry_reader=runtime.reader,
    )


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with tiny_runtime(tmp_path_factory.mktemp("tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def app(runtime: Runtime) -> FastAPI:
    return door_of(runtime)


def gauge(app: FastAPI, name: str) -> float:
    text = call(app, "GET", "/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    raise AssertionError(f"no {name} in the scrape")


def complete(app: FastAPI, **body: Any) -> Any:
    answer = call(app, "POST", COMPLETIONS, body={"prompt": "hello", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_streamed_and_whole_answers_are_the_same_greedy_text(app: FastAPI) -> None:
    whole = complete(app, max_tokens=40, ignore_eos=True)
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    streamed = call(app, "POST", COMPLETIONS, body={**body, "stream": True})
    chunks = list(sse(streamed.text))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert whole["usage"] == usage_of(5, 40)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert sum(bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks) == 1


def test_neighbours_do_not_change_an_answer(app: FastAPI) -> None:
    prompts = ["hello", "a quite different prompt", "x" * 100]
    alone = [
        complete(app, prompt=prompt, max_tokens=12)["choices"][0]["text"] for prompt in prompts
    ]
    together = complete(app, prompt=prompts, max_tokens=12)["choices"]
    assert [choice["text"] for choice in together] == alone


def test_token_ids_and_their_text_are_the_same_prompt(app: FastAPI) -> None:
    ids = call(app, "POST", "/tokenize", body={"prompt": "hello"}).json()["tokens"]
    assert complete(app, prompt=ids)["choices"] == complete(app, prompt="hello")["choices"]
    assert call(app, "POST", "/detokenize", body={"tokens": ids}).json() == {"prompt": "hello"}


def test_a_stop_string_ends_the_request_in_the_engine(app: FastAPI, runtime: Runtime) -> None:
    text = complete(app, max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    stopped = complete(app, max_tokens=60, ignore_eos=True, stop=stop)
    assert stopped["choices"][0]["text"] == text[: text.find(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 60
    assert runtime.service.num_unfinished == 0


def test_logprobs_are_those_of_a_distribution(app: FastAPI) -> None:
    answer = complete(app, max_tokens=3, logprobs=5, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 3
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen <= 0
        assert chosen == pytest.approx(max(top.values()))


def test_a_seed_fixes_a_sampled_answer(app: FastAPI) -> None:
    asked = {"temperature": 1.5, "seed": 11, "max_tokens": 20, "ignore_eos": True}
    first, second = complete(app, **asked), complete(app, **asked)
    assert first["choices"] == second["choices"]
    other = complete(app, **{**asked, "seed": 12})
    assert other["choices"] != first["choices"]


def test_a_bias_can_force_and_forbid(app: FastAPI) -> None:
    token = call(app, "POST", "/tokenize", body={"prompt": "z"}).json()["tokens"][0]
    assert complete(app, logit_bias={str(token): 100}, max_tokens=4)["choices"][0]["text"] == "zzzz"


def test_the_official_client_chats(app: FastAPI) -> None:
    async def run() -> None:
        transport = httpx2.ASGITransport(app=app)
        async with (
            httpx2.AsyncClient(transport=transport) as http_client,
            openai.AsyncOpenAI(
                api_key="none", base_url="http://test/v1", http_client=http_client
            ) as client,
        ):
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = await client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=10,
                extra_body={"slo": {"ttft_ms": 60_000, "tpot_ms": 60_000}, "ignore_eos": True},
            )  # fmt: skip
            pieces = await client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=10, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])
            assert text == whole.choices[0].message.content
            assert whole.model_extra is not None
            assert whole.model_extra["slo"]["ttft_met"] is True
            assert whole.model_extra["slo"]["tpot_met"] is True
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == len("user: hi\nassistant:")

    run_async(run())


def test_a_target_that_no_server_could_meet_is_shed_with_a_prediction(app: FastAPI) -> None:
    body = {"prompt": "x" * 200, "slo": {"ttft_ms": 0.001}}
    answer = call(app, "POST", COMPLETIONS, body=body)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error["code"] == "ttft_unreachable"
    assert error["predicted_ttft_ms"] > 0.001
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-llm-d-request-dropped-reason"] == "ttft_unreachable"


def test_a_prompt_beyond_the_context_is_refused_and_the_longest_is_served(app: FastAPI) -> None:
    answer = call(app, "POST", COMPLETIONS, body={"prompt": [5] * CONTEXT})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    longest = complete(app, prompt=[5] * (CONTEXT - 1), max_tokens=50)
    assert longest["usage"]["completion_tokens"] == 1


def test_ids_are_checked_against_the_heads_width_not_the_tokenizers(app: FastAPI) -> None:
    assert complete(app, prompt=[299], max_tokens=1)["usage"]["completion_tokens"] == 1
    answer = call(app, "POST", COMPLETIONS, body={"prompt": [300]})
    assert answer.json()["error"]["code"] == "invalid_token_id"


@pytest.mark.parametrize("is_stream", [False, True])
def test_disconnecting_frees_the_blocks(app: FastAPI, runtime: Runtime, is_stream: bool) -> None:
    async def run() -> None:
        body = {"prompt": "go on", "max_tokens": 250, "ignore_eos": True, "stream": is_stream}
        wire = Wire(COMPLETIONS, body)
        exchange = asyncio.ensure_future(app(wire.scope, wire.receive, wire.send))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if is_stream:
                await wire.has_sent.wait()
            else:
                # The neighbour's answer proves that the loop has taken the one before it.
                await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
            wire.hung_up.set()
            await exchange
            # Endings are applied before arrivals are planned: after this answer nothing is left.
            await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})

    run_async(run())
    assert runtime.service.num_unfinished == 0
    # The answer may overtake the metrics of its own last step, by less than many scrapes take.
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running"):
        assert any(gauge(app, name) == 0 for _ in range(200))


def test_bad_input_in_the_middle_of_traffic_loses_nothing(app: FastAPI) -> None:
    expected = complete(app, max_tokens=30, ignore_eos=True)["choices"][0]["text"]

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "hello", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
            bad = [{"prompt": ""}, {"prompt": [999]}, {"prompt": "x", "temperature": "hot"},
                   {"prompt": "x", "slo": {"ttft_ms": -1}}]  # fmt: skip
            answers = await asyncio.gather(
                *(client.post(COMPLETIONS, json=each) for each in [body, *bad, body])
            )
        assert [answer.status_code for answer in answers] == [200, 400, 400, 400, 400, 200]
        for answer in (answers[0], answers[-1]):
            assert answer.json()["choices"][0]["text"] == expected

    run_async(run())
    assert call(app, "GET", "/health").status_code == 200
    assert call(app, "GET", "/ready").status_code == 200


def test_the_database_can_be_asked_over_the_same_door(app: FastAPI) -> None:
    for path in ("/telemetry/summary", "/telemetry/steps", "/telemetry/requests"):
        assert call(app, "GET", path).status_code == 200
    answer = call(app, "GET", "/telemetry/steps?limit=many")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


def test_a_body_of_nan_is_refused_on_the_wire(app: FastAPI) -> None:
    content = json.dumps({"prompt": "x", "top_p": float("nan")}).encode()
    headers = {"content-type": "application/json"}
    answer = call(app, "POST", COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_p"
