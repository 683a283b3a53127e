"""Completion requests: the bodies of OpenAI's `/v1/completions` and `/v1/chat/completions`, checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tessera.core.errors import TesseraError
from tessera.llm.sampling import Sampling
from tessera.serving.json_bodies import ProtocolError

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_TOKENS = 1 << 20
# Fields that change nothing in the result.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields that would change it, with the value that does not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": ({}, None), "suffix": (None, ""),
    "best_of": (1, None), "logprobs": (None, False), "top_logprobs": (None, 0), "tools": (None, []),
    "tool_choice": (None, "none", "auto"), "response_format": (None, {"type": "text"}), "echo": (False, None),
    "modalities": (None, ["text"]), "parallel_tool_calls": (None, True), "functions": (None, []),
    "function_call": (None, "none"), "n": (), "reasoning_effort": (None,), "audio": (None,), "prediction": (None,),
}  # fmt: skip
SHARED = ("model", "stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "n")
FIELDS = {
    "completions": (*SHARED, "prompt"), "chat": (*SHARED, "messages", "max_completion_tokens"),
}  # fmt: skip
Check = Callable[[Any], bool]


@dataclass(frozen=True)
class CompletionCall:
    """A checked body: the prompts (texts, or lists of tokens), and how each is continued."""

    model: str
    prompts: list[Any]
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    choices: int
    stream: bool
    usage: bool

    def sample(self, choice: int) -> Sampling:
        """The sampling of one of several choices: each has its own seed."""
        return replace(self.sampling, seed=(self.sampling.seed + choice) % 2**63) if choice else self.sampling


def read_completion(body: Any, kind: str) -> CompletionCall:
    """A body of `/v1/completions` (kind "completions") or `/v1/chat/completions` ("chat").

    Raises:
        ProtocolError: a field is missing, unknown, or has another type or range; 400, and names the field.
    """
    if not isinstance(body, dict):
        raise ProtocolError(400, "the request is no JSON object")
    _check_fields(body, FIELDS[kind])
    options = _take(body, "stream_options", lambda v: isinstance(v, dict), "an object") or {}
    usage = options.get("include_usage", False)
    if not isinstance(usage, bool) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise ProtocolError(400, "stream_options has include_usage alone", parameter="stream_options")
    most = _take(body, "max_completion_tokens", _is_count(1, MAX_TOKENS), "a positive integer")
    most = _take(body, "max_tokens", _is_count(1, MAX_TOKENS), "a positive integer") if most is None else most
    return CompletionCall(
        model=_require(body, "model", lambda v: isinstance(v, str), "a text"),
        prompts=_read_prompts(body) if kind == "completions" else [_read_messages(body)],
        max_tokens=16 if most is None and kind == "completions" else most,
        sampling=_read_sampling(body), stops=_read_stops(body),
        choices=_take(body, "n", _is_count(1, MAX_CHOICES), f"1 to {MAX_CHOICES}") or 1,
        stream=bool(_take(body, "stream", lambda v: isinstance(v, bool), "true or false")), usage=usage,
    )  # fmt: skip


def _check_fields(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in body.items():
        if name in known or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise ProtocolError(400, f"the field {name[:80]} is unknown", parameter=name[:80])
        if not any(
            type(value) is type(v) and value == v for v in (*NEUTRAL[name], 0.0 if 0 in NEUTRAL[name] else None)
        ):
            raise ProtocolError(400, f"the field {name} is not supported with this value", parameter=name)


def _take(body: Mapping[str, Any], name: str, fits: Check, expected: str) -> Any:
    value = body.get(name)
    if value is not None and not fits(value):
        raise ProtocolError(400, f"{name} is {repr(value)[:60]}: expected {expected}", parameter=name)
    return value


def _require(body: Mapping[str, Any], name: str, fits: Check, expected: str) -> Any:
    if body.get(name) is None:
        raise ProtocolError(400, f"the request has no {name}: expected {expected}", parameter=name)
    return _take(body, name, fits, expected)


def _is_count(least: int, most: int) -> Check:
    return lambda v: type(v) is int and least <= v <= most


def _is_number(least: float, most: float) -> Check:
    return lambda v: type(v) in (int, float) and least <= v <= most


def _read_sampling(body: Mapping[str, Any]) -> Sampling:
    temperature = _take(body, "temperature", _is_number(0, 2), "0 to 2")
    top_p = _take(body, "top_p", _is_number(0, 1), "0 to 1")
    top_k = _take(body, "top_k", _is_count(0, 2**31 - 1), "0 or more")
    seed = _take(body, "seed", _is_count(-(2**63), 2**63 - 1), "an integer of 64 bits")
    seed = random.SystemRandom().randrange(2**62) if seed is None else seed
    temperature = 1.0 if temperature is None else float(temperature)
    if top_p == 0:  # the most probable token alone, as OpenAI's service has it
        return Sampling()
    try:
        return Sampling(temperature, top_k or 0, 1.0 if top_p is None else float(top_p), seed)
    except TesseraError as error:
        raise ProtocolError(400, error.message) from None


def _read_stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    def fits(value: Any) -> bool:
        listed = value if isinstance(value, list) else [value]
        return len(listed) <= MAX_STOPS and all(isinstance(s, str) and 0 < len(s) <= 1000 for s in listed)

    found = _take(body, "stop", fits, f"a text, or up to {MAX_STOPS} of them")
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


def _read_prompts(body: Mapping[str, Any]) -> list[Any]:
    def fits(value: Any) -> bool:
        if isinstance(value, str) or _is_tokens(value):
            return True
        listed = isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS
        return listed and all(isinstance(p, str) or _is_tokens(p) for p in value)

    found = _require(body, "prompt", fits, f"a text, a list of tokens, or up to {MAX_PROMPTS} of these")
    return [found] if isinstance(found, str) or _is_tokens(found) else found


def _read_messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    found = _require(body, "messages", lambda v: isinstance(v, list) and bool(v), "a list of messages")
    return [_read_message(m, i) for i, m in enumerate(found)]


def _read_message(message: Any, number: int) -> dict[str, str]:
    place = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ProtocolError(400, f"{place} has no role", parameter=place)
    if message["role"] not in ("system", "developer", "user", "assistant"):
        raise ProtocolError(400, f"{place} has the unknown role {message['role'][:40]!r}", parameter=place)
    content = message.get("content")
    if isinstance(content, list):  # parts, of which text is supported
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise ProtocolError(400, f"{place} has parts that are no text", parameter=place)
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise ProtocolError(400, f"{place} has no content of text", parameter=place)
    return {"role": "system" if message["role"] == "developer" else message["role"], "content": content}
