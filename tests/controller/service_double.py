"""A scripted service behind the same protocol as the real one, and ways to talk to an app.

Nothing here waits for time to pass: a script yields events, and a gate holds them back until a test
opens it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.generation import (
    AdmissionEvent,
    FinishedEvent,
    GenerationEvent,
    GenerationRequest,
    PromptEvent,
    ServedModel,
    ServiceHealth,
    TokenEvent,
)
from engine.clock import VirtualClock
from engine.request import FinishReason
from engine.step import Admission, AdmissionAction, PromptToken, TokenLogprob

EOS = 256
VOCAB_SIZE = 260


class ByteTokenizer:
    """One token per byte; 256 ends a text, 257 begins one."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([257] if add_special_tokens else []), *text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = {256: "<eos>", 257: "<bos>", 258: "<pad>", 259: "<unused>"}
        data = b"".join(
            (b"" if skip_special_tokens else special[i].encode()) if i > 255 else bytes([i])
            for i in token_ids
        )
        return data.decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None
    ) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise ValueError("the last message must be the user's")
        lines = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
        return self.encode(f"{lines}assistant:")


def top_of(num_tokens: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(t, -1.0 - t / 1000) for t in range(65, 65 + num_tokens))


Script = Callable[["ScriptedStream"], AsyncIterator[GenerationEvent]]


@dataclass
class ScriptedStream:
    """A stream that plays a script; `ended_with` keeps every call of `finish`."""

    request_id: str
    request: GenerationRequest
    script: Script
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ended_with: list[FinishReason] = field(default_factory=list)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_cached_tokens: int = 0

    def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        return self.script(self)

    def finish(self, reason: FinishReason) -> None:
        self.ended_with.append(reason)
        self.has_ended.set()

    def admitted(self, **kwargs: Any) -> AdmissionEvent:
        predicted_s = kwargs.pop("predicted_ttft_s", 0.25)
        return AdmissionEvent(
            Admission(
                self.request_id,
                AdmissionAction.ADMIT,
                "admitted",
                predicted_ttft_s=predicted_s,
                **kwargs,
            )
        )

    def computed(self) -> PromptEvent:
        """The prompt is done: token at position i has logprob -i and rank i, if asked for."""
        asked = self.request.sampling.num_prompt_logprobs
        ids = self.request.prompt_token_ids
        scores = (
            ()
            if asked is None
            else tuple(PromptToken(ids[i], -float(i), i, top_of(asked)) for i in range(1, len(ids)))
        )
        return PromptEvent(self.num_cached_tokens, scores)

    def rejected(self, reason: str, **kwargs: Any) -> FinishedEvent:
        admission = Admission(self.request_id, AdmissionAction.REJECT, reason, **kwargs)
        return self.finished(FinishReason.REJECTED, 0, admission=admission)

    def finished(self, reason: FinishReason, num_tokens: int, **kwargs: Any) -> FinishedEvent:
        request = self.request
        slo_class = SloClass(request.slo_class or "default")
        times: dict[str, Any] = {}
        if num_tokens:
            times = {"queue_s": 0.125, "ttft_s": 0.5, "tpot_s": 0.05, "is_ttft_met": True}
        return FinishedEvent(
            reason,
            len(request.prompt_token_ids),
            num_tokens,
            Promise(request.slo, slo_class, request.arrived_at),
            **{"num_cached_tokens": self.num_cached_tokens, **times, **kwargs},
        )


def tokens_of(text: str | Sequence[int]) -> list[int]:
    return list(text.encode()) if isinstance(text, str) else list(text)


def says(text: str | Sequence[int], *, ends_with_eos: bool = True) -> Script:
    """A script that is admitted, says `text` within `max_tokens` and honours the stop ids."""

    async def script(stream: ScriptedStream) -> AsyncIterator[GenerationEvent]:
        yield stream.admitted()
        ids = tokens_of(text) + ([EOS] if ends_with_eos else [])
        request = stream.request
        yield stream.computed()
        for index, token in enumerate(ids[: request.max_tokens]):
            if FinishReason.STOP in stream.ended_with:
                yield stream.finished(FinishReason.STOP, index)
                return
            asked = request.sampling.num_logprobs
            logprob = None if asked is None else -0.5 - index
            yield TokenEvent(token, index, 10.0 + index, logprob, top_of(asked or 0))
            if token in request.sampling.stop_token_ids:
                yield stream.finished(FinishReason.STOP, index + 1)
                return
        yield stream.finished(FinishReason.LENGTH, min(len(ids), request.max_tokens))

    return script


def refuses(reason: str, **kwargs: Any) -> Script:
    async def script(stream: ScriptedStream) -> AsyncIterator[GenerationEvent]:
        yield stream.rejected(reason, **kwargs)

    return script


def fails_after(num_tokens: int, failure: str = "the step failed") -> Script:
    async def script(stream: ScriptedStream) -> AsyncIterator[GenerationEvent]:
        yield stream.admitted()
        yield stream.computed()
        for index in range(num_tokens):
            yield TokenEvent(97, index, 10.0 + index)
        yield stream.finished(FinishReason.ERROR, num_tokens, failure=failure)

    return script


def hangs_after(num_tokens: int) -> Script:
    """A script that says `num_tokens` and then waits for its gate for ever."""

    async def script(stream: ScriptedStream) -> AsyncIterator[GenerationEvent]:
        yield stream.admitted()
        yield stream.computed()
        for index in range(num_tokens):
            yield TokenEvent(97, index, 10.0 + index)
        await stream.gate.wait()
        yield stream.finished(FinishReason.STOP, num_tokens)

    return script


class ScriptedService:
    """An `InferenceService` whose streams play scripts in order, the last one again and again."""

    def __init__(
        self,
        *scripts: Script,
        max_model_len: int = 200,
        num_pool_tokens: int = 1000,
        prefix_block_size: int | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        self.scripts = list(scripts) or [says("hello")]
        self.clock = VirtualClock(100.0)
        self.streams: list[ScriptedStream] = []
        self.submitted = asyncio.Event()
        self.state = ServiceHealth(True, True)
        self.tokenizer = ByteTokenizer()
        self.model = ServedModel(
            "tiny/model",
            "/models/tiny",
            1_700_000_000,
            max_model_len,
            num_pool_tokens,
            (EOS,),
            True,
            prefix_block_size,
        )
        self.num_cached_tokens = num_cached_tokens

    def now(self) -> float:
        return self.clock.now()

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        number = len(self.streams)
        script = self.scripts[min(number, len(self.scripts) - 1)]
        stream = ScriptedStream(
            f"run-{number + 1}", request, script, num_cached_tokens=self.num_cached_tokens
        )
        self.streams.append(stream)
        self.submitted.set()
        return stream

    def health(self) -> ServiceHealth:
        return self.state

    @property
    def request(self) -> GenerationRequest:
        """The only request that was submitted."""
        assert len(self.streams) == 1
        return self.streams[0].request


def call(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    body: Any = None,
    content: bytes | None = None,
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
) -> httpx.Response:
    """Send one request in process and return the whole answer."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
            sent = content
            if body is not None:
                sent = json.dumps(body).encode()
                if not any(name.lower() == "content-type" for name, _ in pairs):
                    pairs.append(("content-type", "application/json"))
            raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
            return await client.request(method, path, content=sent, headers=raw)

    return asyncio.run(run())


def usage_of(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, Any]:
    """The usage object of an answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def sse(text: str) -> Iterator[Any]:
    """Yield the payloads of server-sent events; `[DONE]` as a string."""
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


class Wire:
    """One HTTP exchange at the ASGI level, for tests that hang up in the middle."""

    def __init__(self, path: str, body: Any) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._body = json.dumps(body).encode()
        self._is_read = False
        self.hung_up = asyncio.Event()
        self.sent: list[Message] = []
        self.has_sent = asyncio.Event()

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.has_sent.set()

    @property
    def status(self) -> int | None:
        starts = [each for each in self.sent if each["type"] == "http.response.start"]
        assert len(starts) <= 1
        return starts[0]["status"] if starts else None

    @property
    def text(self) -> str:
        return b"".join(each.get("body", b"") for each in self.sent).decode()


def run_async(work: Awaitable[None]) -> None:
    """Run a test's coroutine; a hang fails it."""

    async def bounded() -> None:
        await asyncio.wait_for(work, 20)

    asyncio.run(bounded())


def slo_classes() -> dict[str, SloClass]:
    return {
        "default": SloClass("default"),
        "priority": SloClass("priority", Slo(ttft_s=0.5, tpot_s=0.05), weight=4.0),
        "flex": SloClass("flex"),
    }
