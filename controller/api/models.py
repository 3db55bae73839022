"""`/v1/models`, `/tokenize`, `/detokenize`, `/tokenizer_info`: what is served and how it reads
text.

Owns no generation.
"""

from __future__ import annotations

from typing import Any

import anyio.to_thread
from fastapi import APIRouter

from controller.api.context import ApiContext
from controller.api.errors import invalid
from controller.api.guards import StrictJsonRoute
from controller.api.prompts import check_token_ids, encode, render_messages
from controller.api.responses import (
    DetokenizeAnswer,
    ErrorAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizerInfo,
)
from controller.api.schemas import DetokenizeBody, TokenizeBody

_BAD_BODY: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer},
    404: {"model": ErrorAnswer},
}


def models_router(context: ApiContext) -> APIRouter:
    """Return the routes about the model and its tokenizer."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["model"])

    def card() -> ModelCard:
        model = context.service.model
        return ModelCard(
            id=model.name,
            object="model",
            created=model.created_at,
            owned_by="paceline",
            root=model.source,
            max_model_len=model.max_model_len,
        )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """List the served model."""
        return ModelList(object="list", data=[card()])

    @router.get("/v1/models/{model_id:path}", responses={404: {"model": ErrorAnswer}})
    async def get_model(model_id: str) -> ModelCard:
        """Describe the served model by its name, which may hold slashes."""
        context.check_model(model_id)
        return card()

    @router.post("/tokenize", responses=_BAD_BODY)
    async def tokenize(body: TokenizeBody) -> TokenizeAnswer:
        """Return the token ids of a text, or of messages as the chat template renders them."""
        context.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            ids = await render_messages(body.messages, context)
        else:
            special = body.add_special_tokens is not False
            (ids,) = await encode([body.prompt or ""], context, add_special_tokens=special)
        limit = context.service.model.max_model_len
        return TokenizeAnswer(count=len(ids), max_model_len=limit, tokens=ids)

    @router.post("/detokenize", responses=_BAD_BODY)
    async def detokenize(body: DetokenizeBody) -> DetokenizeAnswer:
        """Return the text of token ids, special tokens included."""
        context.check_model(body.model)
        tokenizer = context.service.tokenizer
        check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")

        def run() -> str:
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        text = await anyio.to_thread.run_sync(run, limiter=context.tokenizer_limiter)
        return DetokenizeAnswer(prompt=text)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """Return the numbers that a client needs to make its own prompts."""
        model = context.service.model
        return TokenizerInfo(
            vocab_size=context.service.tokenizer.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            has_chat_template=model.has_chat_template,
            max_model_len=model.max_model_len,
        )

    return router
