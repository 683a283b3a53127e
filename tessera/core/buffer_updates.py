"""Buffer updates: what becomes of buffers of a module that a traced function replaces and does not return (Flax).

`ts.jit`, `ts.value_and_grad` and `ts.grad` put them into the module that they were given; others warn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tessera.core.errors import LostUpdateWarning, user_location
from tessera.core.pytree import REGISTERED, flatten

_TOLD: dict[Any, Any] = {}  # Python's registry of warnings: each line of a user is told once


def call_and_collect(function: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
    """The result of a function that is traced with containers of its own, and what else it leaves in them.

    These are the buffers that it replaced and does not return, by path ("0.norm.running_mean" in the first container).
    """
    before = _list_buffers(given)
    outcome = function(*given, **named)
    if not before:
        return outcome, {}
    held = {id(leaf) for _, leaf in (*before, *flatten(outcome, empty=True)[0])}
    return outcome, {path: leaf for path, leaf in _list_buffers(given) if id(leaf) not in held}


def call_and_warn(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The result of a function that is traced with containers of its own, so that only what it returns is kept.

    It warns of buffers of these containers that the function replaces and does not return.
    """
    outcome, lost = call_and_collect(function, *given, **named)
    if lost:
        place = user_location()
        text = describe_lost([path.partition(".")[2] for path in lost])
        warnings.warn_explicit(text, LostUpdateWarning, place.file, place.line, registry=_TOLD)
    return outcome


def store_updates(value: Any, updates: Mapping[str, Any], path: str = "") -> None:
    """Put new buffers, by path, into the modules of a container.

    Raises:
        TraceError: a module does not belong to the trace that is under way.
    """
    inside = f"{path}." if path else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            store_updates(item, updates, f"{inside}{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            store_updates(item, updates, f"{inside}{i}")
    elif value.__class__ in REGISTERED:
        owner: Any = value
        parts = REGISTERED[value.__class__].take_apart(value)
        for key, item in zip(parts.keys, parts.children, strict=True):
            if f"{inside}{key}" in updates:
                owner.set_tensor(key, updates[f"{inside}{key}"])
            else:
                store_updates(item, updates, f"{inside}{key}")


def _list_buffers(given: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The leaves that derivatives leave alone, with their paths."""
    found = [flatten(value, str(i), empty=True) for i, value in enumerate(given)]
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
