"""What can be served exactly, judged by a configuration alone: before a byte of weights is read.

Owns the refusals and their reasons. What only shows when the model runs (attention sinks, layers
that attend elsewhere) is found by the probe in `model`.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# One token of a prompt and one of an answer.
_SHORTEST_CONTEXT = 2
_SERVABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class ModelLoadError(ValueError):
    """The model cannot be served; the message names what is wrong and what to do."""


def check_config(config: Any) -> None:
    """Raise ModelLoadError with the reason if no engine of ours could serve this architecture."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{kind}: encoder-decoder models cannot be served")
    text = config.get_text_config()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        is_multimodal = text is not config or hasattr(config, "vision_config")
        what = "a multimodal model whose text part" if is_multimodal else "a model that"
        raise ModelLoadError(f"{kind}: {what} transformers does not run as a causal language model")
    if getattr(model_class, "_is_stateful", False):
        raise ModelLoadError(
            f"{kind}: state-space, recurrent and hybrid models keep a state that is not keys and"
            " values; they cannot be served"
        )
    # `vision` attends in both directions among the tokens of an image, and none is ever sent.
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelLoadError(f"{kind}: bidirectional attention cannot be served")
    odd = set(getattr(text, "layer_types", None) or ()) - _SERVABLE_LAYER_TYPES
    if odd:
        raise ModelLoadError(f"{kind}: layers of type {', '.join(sorted(odd))} cannot be served")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"{kind}: {model_class.__name__} does not support transformers' attention interface"
        )
    num_positions = getattr(text, "max_position_embeddings", None)
    if num_positions is None:
        raise ModelLoadError(f"{kind}: no max_position_embeddings in the configuration")
    longest = longest_context(config) if isinstance(num_positions, int) else None
    if longest is None or longest < _SHORTEST_CONTEXT:
        raise ModelLoadError(
            f"{kind}: the configuration's longest context (max_position_embeddings) is"
            f" {longest if longest is not None else repr(num_positions)}: it must hold a token of"
            " a prompt and one of an answer"
        )


def longest_context(config: Any) -> int:
    """Return how many tokens of context are served exactly.

    That is the configuration's maximum, or what the model was trained on where rotary scaling
    beyond it depends on the batch.
    """
    text = config.get_text_config()
    longest = int(text.max_position_embeddings)
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type")
        if kind == "longrope":
            # `dynamic` needs no such bound: it starts to scale beyond the configuration's maximum.
            trained = parameters.get("original_max_position_embeddings")
            trained = trained or getattr(text, "original_max_position_embeddings", None)
            longest = min(longest, int(trained or longest))
    return longest


def is_context_cut(config: Any) -> bool:
    """Whether `longest_context` is shorter than what the configuration says."""
    return longest_context(config) < int(config.get_text_config().max_position_embeddings)


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters, one set or one for each type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
