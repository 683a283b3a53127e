"""Text generation: prefill and decode of a batch of requests over a paged cache, with an optional draft model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.device import INTERP, default_device, find_generator_name
from tessera.core.errors import ArgumentError, DTypeError, OutOfBoundsError, ShapeError, user_location
from tessera.core.types import DType, as_dtype, f32
from tessera.frontend.jit.tracing import jit
from tessera.ir.frozen_tree import FrozenDict
from tessera.ir.tensor import Tensor
from tessera.llm import sampling as samplers
from tessera.llm.config import DecoderConfig
from tessera.llm.decoder import Batch, PagedCache, compute_logits, run_layers, take_last
from tessera.llm.pages import PagePool
from tessera.llm.requests import find_stop, list_prompts, list_samplings, list_stops, refuse_arguments
from tessera.llm.sampling import GREEDY, Sampling
from tessera.llm.tokenizer import Tokenizer
from tessera.llm.weights import check_parts, to_tensors
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.shape import reshape

PAGE_SIZE = 64
LONGEST_CHUNK = 256  # tokens of a prompt that one step takes
LONGEST_DEVICE_CHUNK = 8192  # on a GPU, whose products want many rows
SHORTEST_CHUNK = 16
REPLACEMENT = "\ufffd"  # what an incomplete character is decoded as


@dataclass
class Completion:
    """What a request gave: the new tokens, their text, and why it ended: "stop" (an end token) or "length"."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = "length"


class LanguageModel:
    """A decoder with its weights on a target: computes logits, and generates text.

    `load` makes one from a file. `weights` is the pytree of `tessera.llm.weights`, `target` as in `ts.jit`;
    `cache_dtype` is the type of keys and values in the cache.
    """

    def __init__(
        self, config: DecoderConfig, weights: Any, tokenizer: Tokenizer | None = None, target: str | None = None,
        cache_dtype: DType = f32, page_size: int = PAGE_SIZE,
    ) -> None:  # fmt: skip
        if not as_dtype(cache_dtype).is_float:
            raise DTypeError("the cache of keys and values holds floats", location=user_location(),
                             received=str(cache_dtype))  # fmt: skip
        check_parts(config, weights)
        if len(weights["layers"]) != config.layers:
            raise ArgumentError("the weights have another number of layers (parameter layers)",
                                location=user_location(), expected=config.layers,
                                received=len(weights["layers"]))  # fmt: skip
        self.config, self.tokenizer = config, tokenizer
        self.target, self.cache_dtype, self.page_size = target or default_device(), cache_dtype, page_size
        self._resident = find_generator_name(self.target) not in (INTERP, "llvm")
        self.weights = FrozenDict(to_tensors(weights, self.target if self._resident else None))
        options: dict[str, Any] = {"target": self.target, "donate": ("keys", "values"), "dynamic": False}
        self._step = jit(self._compute_step, static_argnames=("every", "fresh"), **options)
        self._greedy = jit(self._compute_greedy, static_argnames=("every", "fresh"), **options)
        self._draw = jit(samplers.draw_tokens, static_argnames=("cut",), target=self.target, dynamic=False)

    def _compute_step(
        self, weights: Any, tokens: Any, table: Any, past: Any, count: Any, keys: Any, values: Any, every: bool = False,
        fresh: bool = False,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Logits [B, V] after the last counted token of each request, or of `every` one [B, S, V]; and the cache."""
        tokens = tokens if tokens.ndim == 2 else reshape(tokens, shape=(-1, 1))
        batch = Batch(tokens, table, past, count, fresh)
        x, cache = run_layers(self.config, weights, batch, PagedCache(keys, values))
        logits = compute_logits(weights, x if every else take_last(x, count))
        if every:
            logits = reshape(logits, shape=(*tokens.shape, self.config.vocabulary))
        return logits, cache.keys, cache.values

    def _compute_greedy(
        self, weights: Any, tokens: Any, table: Any, past: Any, count: Any, keys: Any, values: Any, every: bool = False,
        fresh: bool = False,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """As `_compute_step`, with the most probable tokens in place of logits."""
        logits, keys, values = self._compute_step(weights, tokens, table, past, count, keys, values, every, fresh)
        return samplers.choose_greedily(logits), keys, values

    def new_session(self, requests: int, longest: int) -> Session:
        """A cache for requests of up to `longest` positions each.

        Raises:
            ArgumentError: that is more than the model's context.
        """
        if longest > self.config.context:
            raise ArgumentError(
                "the requests are longer than the model's context", location=user_location(),
                expected=f"up to {self.config.context} tokens with those to generate", received=longest,
            )  # fmt: skip
        return Session(self, requests, longest)

    def check_tokens(self, tokens: Any, name: str) -> np.ndarray:
        """Tokens as int32.

        Raises:
            ArgumentError: there are none.
            OutOfBoundsError: one is not in the vocabulary.
        """
        try:
            held = np.asarray(tokens)
        except ValueError:  # lists of different lengths
            held = np.zeros((0, 0))
        if held.ndim == 1 and not held.size:
            raise ArgumentError(f"{name} is empty", location=user_location(), expected="one token or more")
        if held.ndim != 1 or not held.size or held.dtype.kind not in "iu":
            raise ArgumentError(f"{name} is no list of tokens", location=user_location(),
                                expected="one token or more, as integers", received=repr(tokens)[:80])  # fmt: skip
        wrong = np.flatnonzero((held < 0) | (held >= self.config.vocabulary))
        if wrong.size:
            raise OutOfBoundsError(
                f"token {int(wrong[0])} of {name} is not in the vocabulary (parameter embedding)",
                location=user_location(), expected=f"0 to {self.config.vocabulary - 1}",
                received=int(held[wrong[0]]),
            )  # fmt: skip
        return held.astype(np.int32)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The logits after each token of a text: [tokens, vocabulary] of f32."""
        held = self.check_tokens(tokens, "tokens")
        session = self.new_session(1, len(held))
        return reshape(session.run_step(held[None], np.array([len(held)]), every=True), shape=(len(held), -1))

    def generate(
        self, prompts: Any, max_tokens: int = 128, sampling: Sampling | Sequence[Sampling] = GREEDY,
        draft: LanguageModel | None = None, proposals: int = 4, stop: str | Sequence[str] = (), **others: Any,
    ) -> Any:  # fmt: skip
        """Continue each prompt, a text or a list of tokens: a `Completion`, or a list of them for a list of prompts.

        A request ends with an end token, when its text contains a `stop` string, or after `max_tokens`. The text is cut
        before the stop string; `tokens` has those of the stop string too. `draft` is a smaller model of the same
        vocabulary that proposes tokens, `proposals` at a time, which this one checks in one step: the result is the
        same, sooner (Leviathan et al. 2023).

        Raises:
            ArgumentError: a prompt is empty, or longer than the context; an argument is unknown.
            OutOfBoundsError: a token is not in the vocabulary.
        """
        refuse_arguments("generate", others)
        listed, single = list_prompts(prompts)
        completions = [Completion() for _ in listed]
        for request, token in self.stream(listed, max_tokens, sampling, draft, proposals, stop):
            if token in self.config.end_tokens:
                completions[request].reason = "stop"
            else:
                completions[request].tokens.append(token)
        if self.tokenizer is not None:
            for each in completions:
                each.text = self.tokenizer.decode(each.tokens)
                end = find_stop(each.text, list_stops(stop))
                if end >= 0:
                    each.text, each.reason = each.text[:end], "stop"
        return completions[0] if single else completions

    def stream(
        self, prompts: Any, max_tokens: int = 128, sampling: Sampling | Sequence[Sampling] = GREEDY,
        draft: LanguageModel | None = None, proposals: int = 4, stop: str | Sequence[str] = (), **others: Any,
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """The pairs (request, token) of `generate` as they come, end tokens included."""
        from tessera.llm.decoding import decode_alone, decode_with_draft

        refuse_arguments("stream", others)
        held = [self._encode(p, f"prompt {i}") for i, p in enumerate(list_prompts(prompts)[0])]
        if not isinstance(max_tokens, (int, np.integer)) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ArgumentError(f"max_tokens is {max_tokens!r}", location=user_location(), expected="1 or more")
        chosen, stops = list_samplings(sampling, len(held)), list_stops(stop)
        if stops:
            self._require_tokenizer()
        if draft is not None and not isinstance(draft, LanguageModel):
            raise ArgumentError("the draft is no language model", location=user_location(),
                                received=type(draft).__name__)  # fmt: skip
        if draft is None:
            return decode_alone(self, held, int(max_tokens), chosen, stops)
        return decode_with_draft(self, draft, held, int(max_tokens), chosen, proposals, stops)

    def chat(
        self, messages: Any, max_tokens: int = 256, sampling: Sampling = GREEDY, draft: LanguageModel | None = None,
        **others: Any,
    ) -> Iterator[str]:  # fmt: skip
        """The pieces of the answer to a message, or to a conversation of dicts with "role" and "content".

        Raises:
            ArgumentError: the model has no tokenizer or no chat template.
        """
        refuse_arguments("chat", others)
        prompt = self._require_tokenizer().format_chat(messages)
        return self._decode_pieces(self.stream([prompt], max_tokens, sampling, draft))

    def _decode_pieces(self, stream: Iterator[tuple[int, int]]) -> Iterator[str]:
        """The text of a stream of tokens, in pieces of whole characters."""
        tokens: list[int] = []
        shown, text = 0, ""
        for _, token in stream:
            if token not in self.config.end_tokens:
                tokens.append(token)
            text = self._require_tokenizer().decode(tokens)
            if not text.endswith(REPLACEMENT) and len(text) > shown:
                yield text[shown:]
                shown = len(text)
        if len(text) > shown:
            yield text[shown:]

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ArgumentError("the model has no tokenizer", location=user_location(),
                                suggestion="pass token numbers, or load with tokenizer=...")  # fmt: skip
        return self.tokenizer

    def _encode(self, prompt: Any, name: str) -> np.ndarray:
        if isinstance(prompt, str):
            prompt = self._require_tokenizer().encode(prompt)
        return self.check_tokens(prompt, name)

    @cached_property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(_count_weights(w) for w in self.weights.values())


class Session:
    """A cache in use: keys and values of a batch of requests, and how many positions of each are filled."""

    def __init__(self, model: LanguageModel, requests: int, longest: int) -> None:
        self.model, size = model, model.page_size
        per_request = 1 << max(-(-longest // size) - 1, 0).bit_length()  # few sizes, so that few programs are compiled
        self.pool = PagePool(requests * per_request, size, requests, longest)
        self.past = np.zeros(requests, np.int32)
        self._width = per_request
        self._placed: dict[str, tuple[bytes, Any]] = {}  # small arguments that seldom change, on the device
        self.keys, self.values = make_cache(model, requests * per_request)

    def run_step(self, tokens: Any, count: np.ndarray, every: bool = False, greedy: bool = False) -> Tensor:
        """One step: the first count[b] of tokens [B, S] follow what request b has; logits, or the greedy tokens.

        Tokens [B] are one for each request. They may be a tensor, the result of a step before: it is not read here.

        Raises:
            ArgumentError: a request would write the cache past its end.
            OutOfBoundsError: a token is not in the vocabulary.
            ShapeError: tokens and counts do not fit the requests.
        """
        known, count = not isinstance(tokens, Tensor), np.asarray(count)
        tokens = np.asarray(tokens) if known else tokens
        width = tokens.shape[1] if tokens.ndim == 2 else 1
        fits = tokens.ndim in (1, 2) and count.shape == self.past.shape == tokens.shape[:1]
        if not fits or count.min(initial=0) < 0 or count.max(initial=0) > width:
            raise ShapeError(
                "the tokens of a step do not fit the requests", location=user_location(),
                expected=f"tokens [{len(self.past)}, S] or [{len(self.past)}], and for each request a count of up to S",
                received=f"{tokens.shape}, counts {count.tolist()}",
            )  # fmt: skip
        if known:
            self.model.check_tokens(tokens.reshape(-1), "the step")
            tokens = tokens.astype(np.int32)
        for request, n in enumerate(count):
            self.pool.reserve(request, int(self.past[request] + n))
        table = np.zeros((len(count), self._width), np.int32)
        table[:, : self.pool.table.shape[1]] = self.pool.table
        model = self.model
        run = model._greedy if greedy else model._step
        fresh = model._resident and width > 1 and not self.past.any()
        count = count.astype(np.int32)
        out, self.keys, self.values = run(
            model.weights, tokens, self._place("table", table), self.past.astype(np.int32),
            self._place("count", count), self.keys, self.values, every=every, fresh=fresh,
        )  # fmt: skip
        self.past = self.past + count
        return out

    def _place(self, name: str, array: np.ndarray) -> Any:
        """An argument on the model's device; one with the elements of the call before is not copied again."""
        if not self.model._resident:
            return array
        content = array.tobytes()
        known = self._placed.get(name)
        if known is None or known[0] != content:
            known = self._placed[name] = content, Tensor(array).to(self.model.target)
        return known[1]

    def prefill(self, prompts: Sequence[np.ndarray], greedy: bool = False) -> np.ndarray:
        """Write the prompts to the cache, in chunks; for each request the logits (or greedy token) after its last."""
        ends = np.array([len(p) for p in prompts])
        results: list[Any] = [None] * len(prompts)
        most = LONGEST_DEVICE_CHUNK if self.model._resident else LONGEST_CHUNK
        for start in range(0, int(ends.max()), most):
            count = np.clip(ends - start, 0, most)
            tokens = np.zeros((len(prompts), _choose_chunk(int(count.max()))), np.int32)
            for i, p in enumerate(prompts):
                tokens[i, : count[i]] = p[start : start + most]
            out = self.run_step(tokens, count, greedy=greedy).numpy()
            for i in map(int, np.flatnonzero((count > 0) & (start + count == ends))):
                results[i] = out[i]
        return np.stack(results)


def make_cache(model: LanguageModel, pages: int) -> tuple[list[Tensor], list[Tensor]]:
    """Empty pages of the keys and of the values: for each layer [pages, heads, page size, head size]."""
    config = model.config
    shape = (pages, config.kv_heads, model.page_size, config.head_size)
    device = model.target if model._resident else None
    keys, values = ([_make_pages(shape, model.cache_dtype, device) for _ in range(config.layers)] for _ in range(2))
    return keys, values


def _count_weights(weights: Any) -> int:
    if isinstance(weights, dict):
        return sum(_count_weights(w) for w in weights.values())
    if isinstance(weights, list):
        return sum(_count_weights(w) for w in weights)
    return int(np.prod(weights.shape))


def _make_pages(shape: tuple[int, ...], dtype: DType, device: str | None) -> Tensor:
    made = zeros(shape, dtype=dtype)
    return made.to(device) if device else made


def _choose_chunk(length: int) -> int:
    """The length of a step that holds so many tokens: a power of two, so that few programs are compiled."""
    return max(SHORTEST_CHUNK, 1 << (length - 1).bit_length())
