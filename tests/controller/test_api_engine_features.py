"""The engine's features through the HTTP door: choices, the prefix cache, prompt scores, swapping.

A tiny random model in float32 with blocks of 8 tokens, so that short prompts fill several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from controller.runtime.wiring import Runtime
from tests.controller.service_double import call, run_async, sse
from tests.controller.test_api_engine import COMPLETIONS, door_of, tiny_runtime

pytestmark = pytest.mark.device

BLOCK = 8
# Looks at what another thread is about to write: more than it can take.
MANY = 20_000


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with tiny_runtime(tmp_path_factory.mktemp("tiny"), block_size=BLOCK) as made:
        yield made


@pytest.fixture(scope="module")
def app(runtime: Runtime) -> FastAPI:
    return door_of(runtime)


def complete(app: FastAPI, **body: Any) -> Any:
    answer = call(app, "POST", COMPLETIONS, body={"temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(body: Any) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def cached(body: Any) -> int:
    number = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(number, int)
    return number


def letters(app: FastAPI) -> dict[str, float]:
    """A bias under which a random model says letters: text that can be tokenised again."""
    ids = ids_of(app, "abcdefghijklmnopqrstuvwxyz")
    return {str(token): 90.0 for token in ids}


def ids_of(app: FastAPI, text: str) -> list[int]:
    ids = call(app, "POST", "/tokenize", body={"prompt": text}).json()["tokens"]
    assert isinstance(ids, list)
    return ids


def counters(app: FastAPI) -> dict[str, float]:
    families = text_string_to_metric_families(call(app, "GET", "/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_prompt_is_cached_for_whoever_begins_alike_and_changes_no_answer(app: FastAPI) -> None:
    prompt = "a prompt of several blocks, thirty-odd"
    first = complete(app, prompt=prompt, max_tokens=10, logprobs=3)
    second = complete(app, prompt=prompt, max_tokens=10, logprobs=3)
    assert cached(first) == 0
    # The last token is always computed, and blocks are shared whole.
    assert cached(second) == (len(prompt) - 1) // BLOCK * BLOCK
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    scores = [body["choices"][0]["logprobs"]["token_logprobs"] for body in (first, second)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    longer = complete(app, prompt=prompt[: 2 * BLOCK] + "another end of it", max_tokens=1)
    assert cached(longer) == 2 * BLOCK


def test_the_next_turn_finds_the_answer_too(app: FastAPI) -> None:
    prompt = "the first turn of a talk "
    first = complete(app, prompt=prompt, max_tokens=24, logit_bias=letters(app))
    said = first["choices"][0]["text"]
    assert len(said) == 24
    second = complete(app, prompt=prompt + said, max_tokens=1)
    # The last token of an answer is never read, so nothing is known of what it would have done.
    assert cached(second) == (len(prompt) + len(said) - 1) // BLOCK * BLOCK


def test_a_salt_keeps_caches_apart(app: FastAPI) -> None:
    prompt = "what only one tenant may have cached"
    assert cached(complete(app, prompt=prompt, max_tokens=1, cache_salt="one")) == 0
    assert cached(complete(app, prompt=prompt, max_tokens=1, cache_salt="two")) == 0
    assert cached(complete(app, prompt=prompt, max_tokens=1)) == 0
    assert cached(complete(app, prompt=prompt, max_tokens=1, cache_salt="one")) > 0


def test_choices_are_those_of_requests_of_their_own(app: FastAPI) -> None:
    asked = {"prompt": "choose among several ends", "max_tokens": 12, "temperature": 1.2}
    together = complete(app, n=4, seed=41, **asked)
    alone = [complete(app, seed=41 + i, **asked)["choices"][0]["text"] for i in range(4)]
    assert texts(together) == alone
    assert len(set(alone)) > 1
    assert together["usage"]["prompt_tokens"] == len(asked["prompt"])  # type: ignore[arg-type]
    assert together["usage"]["completion_tokens"] == 48


def test_a_prompt_with_choices_is_computed_once(app: FastAPI, runtime: Runtime) -> None:
    prompt = "0123456789" * 8
    before = {row["step_no"] for row in steps(runtime)}
    body = complete(app, prompt=prompt, n=5, max_tokens=6, temperature=1.0)
    assert cached(body) == 0
    assert len(body["choices"]) == 5
    rows = [row for row in steps(runtime) if row["step_no"] not in before]
    # Four times the rest of the last block: shared KV is not computed again.
    rest = len(prompt) - (len(prompt) - 1) // BLOCK * BLOCK
    assert sum(row["prefill_tokens"] for row in rows) == len(prompt) + 4 * rest


def steps(runtime: Runtime) -> list[dict[str, Any]]:
    """Every step so far, as soon as the writer has them all."""
    number = runtime.tally.num_steps
    for _ in range(MANY):
        rows = list(runtime.reader.steps(limit=1000).rows)
        if len(rows) >= number:
            return rows
    raise AssertionError(f"{number} steps, {len(rows)} rows")


def test_streamed_choices_are_the_whole_ones(app: FastAPI) -> None:
    body = {
        "prompt": ["the same either way, whole", "or sent in pieces as they come"], "n": 2,
        "max_tokens": 9, "temperature": 1.1, "seed": -3, "ignore_eos": True, "echo": True,
    }  # fmt: skip
    whole = complete(app, **body)
    streamed = call(app, "POST", COMPLETIONS, body={**body, "stream": True})
    pieces = [""] * 4
    for chunk in list(sse(streamed.text))[:-1]:
        (choice,) = chunk["choices"]
        pieces[choice["index"]] += choice["text"]
    assert pieces == texts(whole)
    assert pieces[0].startswith(str(body["prompt"][0]))  # type: ignore[index]


def test_the_scores_of_a_prompt_are_those_that_its_tokens_get_when_they_are_generated(
    app: FastAPI,
) -> None:
    prompt = "scored as said"
    answer = complete(app, prompt=prompt, max_tokens=12, logprobs=2, logit_bias=letters(app))
    (generated,) = answer["choices"]
    said = generated["logprobs"]
    (choice,) = complete(
        app, prompt=prompt + generated["text"], max_tokens=0, echo=True, logprobs=2
    )["choices"]
    scored = choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == prompt + generated["text"]
    assert len(scored["token_logprobs"]) == len(prompt) + 12
    assert scored["token_logprobs"][0] is None
    assert scored["tokens"][len(prompt) :] == said["tokens"]
    assert scored["token_logprobs"][len(prompt) :] == pytest.approx(
        said["token_logprobs"], abs=1e-4
    )
    for one, other in zip(scored["top_logprobs"][len(prompt) :], said["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_scores_need_no_cache_and_fill_it(app: FastAPI, max_tokens: int) -> None:
    prompt = f"score me, whatever was cached before, {max_tokens}"
    complete(app, prompt=prompt, max_tokens=1)
    first = complete(app, prompt=prompt, max_tokens=max_tokens, prompt_logprobs=3)
    assert cached(first) == 0
    (choice,) = first["choices"]
    assert len(choice["prompt_logprobs"]) == len(prompt)
    assert choice["prompt_logprobs"][0] is None
    for entry, token in zip(choice["prompt_logprobs"][1:], ids_of(app, prompt)[1:], strict=True):
        own = entry[str(token)]
        assert own["rank"] >= 1
        assert 3 <= len(entry) <= 4
        likelier = [other for other in entry.values() if other["logprob"] > own["logprob"]]
        assert len(likelier) == min(own["rank"] - 1, 3)
    assert cached(complete(app, prompt=prompt, max_tokens=1)) > 0


def test_scores_are_aligned_with_a_neighbour_beside_and_in_several_choices(app: FastAPI) -> None:
    prompts = ["aligned with neighbours, first", "second, of another length altogether"]
    alone = [
        complete(app, prompt=prompt, max_tokens=0, prompt_logprobs=0)["choices"][0]
        for prompt in prompts
    ]
    together = complete(app, prompt=prompts, max_tokens=3, prompt_logprobs=0, n=2)["choices"]
    for number, choice in enumerate(together):
        expected = alone[number // 2]["prompt_logprobs"]
        found = choice["prompt_logprobs"]
        assert [entry and list(entry) for entry in found] == [e and list(e) for e in expected]
        for one, other in zip(found[1:], expected[1:], strict=True):
            (a,), (b,) = one.values(), other.values()
            assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)


def test_what_was_cached_is_counted_and_remembered(app: FastAPI, runtime: Runtime) -> None:
    prompt = "counted once when it first starts, then told"
    complete(app, prompt=prompt, max_tokens=1)
    before = counters(app)
    body = complete(app, prompt=prompt, max_tokens=2)
    hits = cached(body)
    assert hits > 0
    # The answer may overtake the metrics of its own last step, by less than many scrapes take.
    for _ in range(MANY):
        after = counters(app)
        if after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"] + 2:
            break
    queries = "vllm:prefix_cache_queries_total"
    assert after[queries] - before[queries] == len(prompt)
    found = "vllm:prefix_cache_hits_total"
    assert after[found] - before[found] == hits
    assert after["paceline_kv_blocks_cached"] > 0
    for _ in range(MANY):
        rows = runtime.reader.requests(limit=1).rows
        if rows[0]["num_output_tokens"] == 2:
            break
    assert rows[0]["num_cached_tokens"] == hits


def test_leaving_in_the_middle_of_several_choices_frees_every_block(
    app: FastAPI, runtime: Runtime
) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "go on and on, all of you", "n": 4, "max_tokens": 200,
                    "ignore_eos": True}  # fmt: skip
            asking = asyncio.ensure_future(client.post(COMPLETIONS, json=body))
            await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            # Endings are applied before arrivals are planned: after this answer nothing is left.
            await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})

    run_async(run())
    assert runtime.service.num_unfinished == 0
    assert any(counters(app)["vllm:kv_cache_usage_perc"] == 0 for _ in range(MANY))
