"""Buffer updates: a warning where a traced function replaces buffers of a module and does not return them (Flax)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tessera.core.errors import LostUpdateWarning, user_location
from tessera.core.pytree import flatten

_TOLD: dict[Any, Any] = {}  # Python's registry of warnings: each line of a user is told once


def call_and_warn(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The result of a function that is traced with containers of its own, so that only what it returns is kept.

    It warns of buffers of these containers that the function replaces and does not return.
    """
    before = _list_buffers(given)
    outcome = function(*given, **named)
    if before:
        held = {id(leaf) for _, leaf in (*before, *flatten(outcome, empty=True)[0])}
        lost = [path for path, leaf in _list_buffers(given) if id(leaf) not in held]
        if lost:
            place = user_location()
            warnings.warn_explicit(describe_lost(lost), LostUpdateWarning, place.file, place.line, registry=_TOLD)
    return outcome


def _list_buffers(given: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The leaves that derivatives leave alone, with their paths."""
    found = [flatten(value, empty=True) for value in given]
    return [pair for leaves, tree in found for pair, fixed in zip(leaves, tree.list_fixed(), strict=True) if fixed]


def describe_lost(paths: list[str]) -> str:
    """The text of the warning: the buffers of the first module, and how many more modules there are.

    >>> describe_lost(["norm.mean", "norm.var"]).partition(".")[0]
    'new buffers are lost, because the function does not return the module: mean and var of norm'
    """
    owners: dict[str, list[str]] = {}
    for path in paths:
        owner, _, name = path.rpartition(".")
        owners.setdefault(owner, []).append(name)
    first, names = next(iter(owners.items()))
    listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    more = f" (and those of {len(owners) - 1} more)" if len(owners) > 1 else ""
    return (
        f"new buffers are lost, because the function does not return the module: {listed} of {first or 'the module'}"
        f"{more}. Return the module too, under ts.value_and_grad as (loss, model) with has_aux=True; "
        "or call model.eval() first"
    )
