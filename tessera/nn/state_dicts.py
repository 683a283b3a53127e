"""State dicts: the tensors of a module by path, collected and loaded (PyTorch's names)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import ArgumentError, StateDictError, TesseraError, user_location
from tessera.ir.tensor import Tensor, wrap_array
from tessera.runtime.tensor_files import load_tensors

if TYPE_CHECKING:
    from tessera.nn.module import Module

MAX_LISTED = 8  # entries that an error names


def collect_state(module: Module) -> dict[str, Tensor]:
    """The tensors of a module by path."""
    return {path: store[name] for path, store, name in _iterate_places(module) if store[name] is not None}


def _iterate_places(module: Module, prefix: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each place that holds a tensor of the state: its path, and the dict and the name to set it."""
    module.require_shapes()
    own = module.__dict__
    for store, left_out in (("_parameters", frozenset[str]()), ("_buffers", module._unsaved)):
        for name in own[store]:
            if name not in left_out:
                yield prefix + name, own[store], name
    for name, child in own["_modules"].items():
        if child is not None:
            yield from _iterate_places(child, f"{prefix}{name}.")


def load_state(module: Module, state: Any, strict: bool, cast: bool) -> None:
    """Load a state dict into a module, all of it or nothing."""
    given = load_tensors(state) if isinstance(state, (str, Path)) else state
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "load_state_dict takes a mapping of paths to arrays, or a file", location=user_location(),
            received=type(state).__name__,
        )  # fmt: skip
    places = [(path, store, name) for path, store, name in _iterate_places(module) if store[name] is not None]
    known = {path for path, _, _ in places}
    problems = []
    if strict:
        problems += [f"{path} is missing" for path in sorted(known - given.keys())]
        problems += [f"{path} is extra" for path in sorted(given.keys() - known)]
    made: dict[int, Tensor] = {}
    changes = []
    for path, store, name in places:
        if path not in given:
            continue
        old = store[name]
        new, problem = fit_tensor(path, given[path], old, cast)
        if problem:
            problems.append(problem)
        elif new is not None:
            changes.append((store, name, made.setdefault(id(old), new)))  # tied tensors stay tied
    raise_problems(f"the state dict does not fit {type(module).__name__}", problems)
    for store, name, new in changes:
        store[name] = new


def fit_tensor(path: str, value: Any, old: Any, cast: bool = False) -> tuple[Tensor | None, str]:
    """A value as a tensor like `old`, or what is wrong with it."""
    try:
        new = Tensor(_as_array(value))
        if not isinstance(value, Tensor):  # its memory may change
            new = wrap_array(np.array(new.numpy()), new.type)
    except (TesseraError, TypeError, ValueError) as error:
        return None, f"{path} is no array: {type(value).__name__} ({error})"
    if new.shape != old.shape:
        return None, f"{path} has shape {list(new.shape)}, expected {list(old.shape)}"
    if new.dtype != old.dtype:
        if not (cast and new.dtype.is_float and old.dtype.is_float):
            return None, f"{path} holds {new.dtype}, expected {old.dtype}"
        new = new.to(old.dtype)
    new.requires_grad = old.requires_grad
    return new, ""


def _as_array(value: Any) -> Any:
    """An array of another library that NumPy can read; PyTorch's parameters without their gradients."""
    return value.detach() if hasattr(value, "detach") and getattr(value, "requires_grad", False) else value


def raise_problems(what: str, problems: list[str]) -> None:
    """Raise an error that lists problems, if there are any.

    Raises:
        StateDictError: there are.
    """
    if problems:
        more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise StateDictError(f"{what}: {'; '.join(problems[:MAX_LISTED])}{more}", location=user_location())
