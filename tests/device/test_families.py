"""Every family gives transformers' tokens, whatever the chunks and whoever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.device.model import load_model
from engine.request import FinishReason
from tests.device.families import CORE_FAMILIES, FAMILIES, NUM_NEW, generate, load_reference

pytestmark = pytest.mark.device

CHUNKS = [1, 2, 3, 7, 16, 17, 64, None]
# The core families run with every length, and under more schedules, in test_exactness.
OTHERS = sorted(set(FAMILIES) - set(CORE_FAMILIES))
LENGTHS = (1, 17, 70)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", OTHERS)
def test_alone(
    name: str,
    tiny_family: Callable[[str], Any],
    continuations: Callable[[str], Any],
    make_engine: Any,
    make_request: Any,
    chunk: int | None,
) -> None:
    for length in LENGTHS:
        expected = continuations(name)[length]
        engine = make_engine(tiny_family(name).served, chunk)
        request = make_request(f"r{length}", expected.prompt, NUM_NEW)
        engine.run([request])
        assert request.output_token_ids == expected.tokens, f"prompt of {length} tokens"
        assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", OTHERS)
def test_mixed(
    name: str,
    tiny_family: Callable[[str], Any],
    continuations: Callable[[str], Any],
    make_engine: Any,
    make_request: Any,
    chunk: int | None,
) -> None:
    expected = continuations(name)
    engine = make_engine(tiny_family(name).served, chunk)
    requests = [
        make_request(f"r{length}", item.prompt, NUM_NEW) for length, item in expected.items()
    ]
    engine.run(requests, gap_steps=1)
    for request, item in zip(requests, expected.values(), strict=True):
        assert request.output_token_ids == item.tokens, request.request_id
    # Decodes really shared forwards with chunks of other prompts.
    assert any(len({work.kind for work in r.plan.work}) == 2 for r in engine.recorder.reports)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_log_probabilities_are_the_references(
    name: str,
    tiny_family: Callable[[str], Any],
    continuations: Callable[[str], Any],
    make_engine: Any,
    make_request: Any,
) -> None:
    # Tokens alone would not see what keeps the order of the logits: a cap on the final ones, say.
    expected = continuations(name)
    engine = make_engine(tiny_family(name).served, 7)
    requests = [
        make_request(str(length), expected[length].prompt, NUM_NEW, num_logprobs=3)
        for length in LENGTHS
    ]
    engine.run(requests, gap_steps=1)
    emitted = [token for report in engine.recorder.reports for token in report.tokens]
    assert len(emitted) == len(LENGTHS) * NUM_NEW
    for token in emitted:
        logits = expected[int(token.request_id)].logits[token.index].double()
        reference = torch.log_softmax(logits, dim=-1)
        # Both sides round to float32 inside their norms, and in attention the reference does.
        near = 1e-5 * float(logits.abs().max())
        assert token.logprob == pytest.approx(float(reference[token.token_id]), abs=near)
        for top in token.top_logprobs:
            assert top.logprob == pytest.approx(float(reference[top.token_id]), abs=near)


@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_experts_in_float32_do_not_see_the_batch(
    name: str,
    tiny_family: Callable[[str], Any],
    make_engine: Any,
    make_request: Any,
    make_prompt: Any,
    chunk: int | None,
) -> None:
    # float64 runs experts one by one; what is served in practice sorts all tokens of a step by
    # expert and multiplies each group at once.
    folder = tiny_family(name).folder
    served = load_model(str(folder), "float32", "cpu")
    assert served._model.config._experts_implementation == "grouped_mm"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = [make_request(f"r{n}", make_prompt(n, n), NUM_NEW) for n in (3, 20, 45)]
    make_engine(served, chunk).run(requests, gap_steps=1)
    for request in requests:
        expected = generate(reference, list(request.prompt_token_ids))
        assert expected.num_ties == 0
        assert request.output_token_ids == expected.tokens


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, family in FAMILIES.items() for change in family.ablations],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_is_peculiar_to_the_family_shows_in_its_tokens(
    name: str,
    change: dict[str, Any],
    tiny_family: Callable[[str], Any],
    continuations: Callable[[str], Any],
) -> None:
    expected = continuations(name)[70]
    without = load_reference(tiny_family(name).folder, **change)
    assert generate(without, expected.prompt).tokens != expected.tokens


def test_the_cap_on_final_logits_is_active(continuations: Callable[[str], Any]) -> None:
    # It keeps the order, so no token shows it; but the largest logits must be in its bend.
    largest = max(float(item.logits.max()) for item in continuations("gemma2").values())
    cap = FAMILIES["gemma2"].settings["final_logit_softcapping"]
    assert 0.5 * cap < largest < 0.99 * cap


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_probe_tells_what_each_layer_asks_of_a_backend(
    name: str, tiny_family: Callable[[str], Any]
) -> None:
    family = FAMILIES[name]
    layers = tiny_family(name).served.layers
    assert tuple(layer.sliding_window for layer in layers) == family.windows
    for field, value in family.first_layer.items():
        assert getattr(layers[0], field) == value, field
    assert all((layer.softcap is None) == (name != "gemma2") for layer in layers)
