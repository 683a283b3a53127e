"""Requests of a call of `generate` or `stream`: its prompts, samplings and stop strings, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.llm.sampling import Sampling

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed")
# What is said of arguments that `generate` of transformers, llama.cpp or an HTTP service has.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens=...", "max_length": "max_tokens=...", "stop_strings": "stop=...",
    "assistant_model": "draft=...", "do_sample": "sampling=ts.llm.Sampling(temperature=...)",
    **{name: f"sampling=ts.llm.Sampling({name}=...)" for name in SAMPLING_FIELDS},
}  # fmt: skip


def refuse_arguments(function: str, others: Mapping[str, Any]) -> None:
    """Refuse named arguments that a function does not have, and say what they are called here.

    Raises:
        ArgumentError: there is one.
    """
    for name in others:
        known = OTHER_NAMES.get(name)
        raise ArgumentError(
            f"{function} has no argument {name}", location=user_location(), received=f"{name}={others[name]!r}"[:80],
            suggestion=f"write {known}" if known else f"help(ts.llm.LanguageModel.{function}) lists them",
        )  # fmt: skip


def list_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single one: a string, or a list of tokens.

    Raises:
        ArgumentError: they are neither text nor tokens.
    """
    if not isinstance(prompts, (str, list, tuple, np.ndarray)):
        raise ArgumentError("the prompts are neither text nor tokens", location=user_location(),
                            expected="a string, a list of tokens, or a list of these",
                            received=type(prompts).__name__)  # fmt: skip
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
    return ([prompts] if single else list(prompts)), single


def list_samplings(sampling: Any, count: int) -> list[Sampling]:
    """A sampling for each of so many requests.

    Raises:
        ArgumentError: there is another number of them, or one is no `Sampling`.
    """
    listed = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling] * count
    for each in listed:
        if not isinstance(each, Sampling):
            raise ArgumentError(
                "the sampling is no Sampling", location=user_location(), received=repr(each)[:80],
                expected="ts.llm.Sampling(temperature=..., top_k=..., top_p=..., seed=...), or one for each prompt",
            )  # fmt: skip
    if len(listed) != count:
        raise ArgumentError("there is not one sampling for each prompt", location=user_location(),
                            expected=count, received=len(listed))  # fmt: skip
    return listed


def list_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings.

    Raises:
        ArgumentError: one is empty, or no string.
    """
    listed = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else (stop,)
    for each in listed:
        if not isinstance(each, str) or not each:
            raise ArgumentError(f"{each!r} is no stop string", location=user_location(),
                                expected="a string that is not empty, or a list of them")  # fmt: skip
    return listed


def find_stop(text: str, stops: Sequence[str]) -> int:
    """Where the first stop string begins in a text; -1 without one."""
    return min((at for at in map(text.find, stops) if at >= 0), default=-1)
