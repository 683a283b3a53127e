"""OpenAI-compatible routes: completions and chat completions of language models, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tessera.core.errors import DeviceUnavailable, ResourceError, TesseraError
from tessera.serving.completion_requests import CompletionCall, read_completion
from tessera.serving.generation_engine import QueueFullError
from tessera.serving.json_bodies import ProtocolError, escape, parse_json
from tessera.serving.language_models import ServedLanguageModel
from tessera.serving.requests import uuid
from tessera.serving.service_metrics import ServiceMetrics

MAX_CHARACTERS = 64  # of a token, on average
OBJECTS = {"completions": "text_completion", "chat": "chat.completion"}


@dataclass
class _Choice:
    """One continuation: its prompt, its number in the response, and what it gave."""

    number: int
    tokens: list[int]
    variant: int
    text: str = ""
    given: int = 0
    reason: str | None = None


@dataclass
class _Answer:
    """A response in work."""

    call: CompletionCall
    kind: str
    model: ServedLanguageModel
    choices: list[_Choice]
    most: int
    id: str = field(default_factory=uuid)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, chunk: bool = False) -> dict[str, Any]:
        """The fields that every object of the response has."""
        name = OBJECTS[self.kind] + (".chunk" if chunk and self.kind == "chat" else "")
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model.name}

    def usage(self) -> dict[str, int]:
        """The tokens of the prompts, each counted once, and of the continuations."""
        prompts = sum(len(c.tokens) for c in self.choices if c.variant == 0)
        given = sum(c.given for c in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": given, "total_tokens": prompts + given}

    def show(self, choice: _Choice) -> dict[str, Any]:
        """A choice as an element of the whole response."""
        shared = {"index": choice.number, "logprobs": None, "finish_reason": choice.reason}
        if self.kind == "chat":
            return {**shared, "message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {**shared, "text": choice.text}

    def show_piece(self, choice: _Choice, piece: str, first: bool) -> dict[str, Any]:
        """A piece of a choice as an element of a chunk."""
        shared = {"index": choice.number, "logprobs": None, "finish_reason": choice.reason}
        if self.kind == "chat":
            return {**shared, "delta": {**({"role": "assistant"} if first else {}), "content": piece}}
        return {**shared, "text": piece}


class CompletionRoutes:
    """The endpoints `/v1/completions` and `/v1/chat/completions` for language models by name."""

    def __init__(self, models: dict[str, ServedLanguageModel], max_json: int, metrics: ServiceMetrics) -> None:
        self.models, self.max_json, self.metrics = models, max_json, metrics

    async def complete(self, request: Request) -> Response:
        """Answer `/v1/completions`."""
        return await self._answer(request, "completions")

    async def chat(self, request: Request) -> Response:
        """Answer `/v1/chat/completions`."""
        return await self._answer(request, "chat")

    async def _answer(self, request: Request, kind: str) -> Response:
        body = await request.body()
        if len(body) > self.max_json:
            raise ProtocolError(413, f"the JSON of the request has {len(body)} bytes: expected up to {self.max_json}")
        call = read_completion(parse_json(body), kind)
        model = self.models.get(call.model)
        if model is None:
            raise ProtocolError(404, f"there is no model {call.model[:80]!r}: expected {', '.join(self.models)}",
                                parameter="model")  # fmt: skip
        answer = await asyncio.to_thread(self._prepare, call, kind, model)
        if call.stream:
            return StreamingResponse(self._stream(answer), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})  # fmt: skip
        await _run_while_connected(self._collect(answer), request)
        shown = [answer.show(c) for c in answer.choices]
        return JSONResponse({**answer.head(), "choices": shown, "usage": answer.usage()})

    def _prepare(self, call: CompletionCall, kind: str, model: ServedLanguageModel) -> _Answer:
        """The choices of a call; each is checked before the first token is sent."""
        longest = model.engine.scheduler.longest
        if kind == "chat":
            prompts = [_report_errors(model.tokenizer.format_chat, p) for p in call.prompts]
        else:
            prompts = call.prompts
        # No token of a language has so many characters: what is longer is refused before it is encoded.
        if sum(len(p) for p in prompts) > MAX_CHARACTERS * longest * len(prompts):
            raise ProtocolError(400, "the prompt is longer than the context", parameter="prompt")
        prompts = [self._tokenize(p, model) for p in prompts]
        most = call.max_tokens or max(1, longest - max(map(len, prompts)))
        choices = [_Choice(i * call.choices + j, tokens, j)
                   for i, tokens in enumerate(prompts) for j in range(call.choices)]  # fmt: skip
        for c in choices:
            _report_errors(model.engine.check, c.tokens, most, call.sample(c.variant))
        if model.engine.open + len(choices) > model.engine.max_queue + model.engine.scheduler.slots:
            raise _refuse_queue()
        return _Answer(call, kind, model, choices, most)

    @staticmethod
    def _tokenize(prompt: Any, model: ServedLanguageModel) -> list[int]:
        if isinstance(prompt, str):
            if escape(prompt) != prompt:
                raise ProtocolError(400, "the prompt holds half a surrogate pair", parameter="prompt")
            prompt = _report_errors(model.tokenizer.encode, prompt)
        if not prompt:
            raise ProtocolError(400, "the prompt is empty", parameter="prompt")
        return list(prompt)

    async def _pieces(self, answer: _Answer) -> AsyncIterator[tuple[_Choice, str]]:
        """The pieces of all choices as they come."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(answer, c, queue)) for c in answer.choices]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item is None
                if item is not None:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, answer: _Answer, choice: _Choice, queue: asyncio.Queue[Any]) -> None:
        model, start = answer.model, time.perf_counter()
        stream = model.generate(choice.tokens, answer.most, answer.call.sample(choice.variant), answer.call.stops)
        try:
            async for piece, count, reason in stream:
                if not choice.given:
                    self.metrics.first_token.labels(model.name).observe(time.perf_counter() - start)
                choice.given += count
                choice.text += piece
                choice.reason = reason or None
                self.metrics.tokens.labels(model.name, "generated").inc(count)
                queue.put_nowait((choice, piece))
            self.metrics.tokens.labels(model.name, "prompt").inc(len(choice.tokens))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _collect(self, answer: _Answer) -> None:
        try:
            async for _ in self._pieces(answer):
                pass
        except TesseraError as error:
            raise to_protocol_error(error) from None

    async def _stream(self, answer: _Answer) -> AsyncIterator[bytes]:
        started: set[int] = set()
        try:
            async for choice, piece in self._pieces(answer):
                if piece or choice.reason or choice.number not in started:
                    shown = answer.show_piece(choice, piece, choice.number not in started)
                    started.add(choice.number)
                    yield _event({**answer.head(chunk=True), "choices": [shown]})
            if answer.call.usage:
                yield _event({**answer.head(chunk=True), "choices": [], "usage": answer.usage()})
        except TesseraError as error:
            yield _event({"error": {"message": error.message, "type": "server_error", "param": None, "code": None}})
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _refuse_queue() -> ProtocolError:
    return ProtocolError(429, "the queue of the model is full", {"Retry-After": "1"})


def to_protocol_error(error: TesseraError) -> ProtocolError:
    """The response for an error: what the client can change is 400, a full queue 429, and else 500."""
    if isinstance(error, QueueFullError):
        return _refuse_queue()
    name = type(error).__name__
    if name in ("ArgumentError", "ShapeError", "DTypeError", "OutOfBoundsError"):
        details = [f"{t} {getattr(error, t)}" for t in ("expected", "received") if getattr(error, t) is not None]
        return ProtocolError(400, error.message + (f": {', '.join(details)}" if details else ""))
    if isinstance(error, (ResourceError, DeviceUnavailable)):
        return ProtocolError(503, error.message, {"Retry-After": "1"})
    return ProtocolError(500, "the model failed")


def _report_errors(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except TesseraError as error:
        raise to_protocol_error(error) from None


async def _run_while_connected(work: Any, request: Request) -> None:
    """Run a coroutine until it ends; where the client goes first, it is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ProtocolError(499, "the client is gone")
        task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
