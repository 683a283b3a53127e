"""Memoisation: keeps results for equal arguments, in memory (LRU) or in an SQLite file across runs."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import sqlite3
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, FileError, user_location
from tessera.core.pytree import TreeDef, flatten
from tessera.core.types import DType, Policy, as_dtype
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.argument_checks import check_function

Function = Callable[..., Any]
_SCALAR_TYPES = (bool, int, float, str, type(None))


class MemoizeInfo(NamedTuple):
    """Statistics of a cache."""

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


def hash_arguments(args: Any, keywords: Any, typed: bool) -> str:
    """A hash of arguments: tensors by type and elements, the rest by value (and by type, if `typed`).

    Raises:
        ArgumentError: an argument is neither a tensor, a number, a string nor a container of them.
    """
    found = hashlib.sha256()
    leaves, tree = flatten([list(args), dict(keywords)], "argument")
    found.update(repr(tree).encode())
    for name, leaf in leaves:
        found.update(_encode_argument(name, leaf, typed))
    return found.hexdigest()


def _encode_argument(name: str, leaf: Any, typed: bool) -> bytes:
    if isinstance(leaf, (Tensor, np.ndarray, np.generic)):
        array = np.ascontiguousarray(leaf.numpy() if isinstance(leaf, Tensor) else leaf)
        kind = repr(leaf.type) if isinstance(leaf, Tensor) else f"{array.dtype}{array.shape}"
        return f"|{kind}|".encode() + array.tobytes()
    if not isinstance(leaf, _SCALAR_TYPES):
        raise ArgumentError(
            f"{name} cannot be part of a cache's key", location=user_location(), received=type(leaf).__name__,
            expected="tensors, arrays, numbers, strings, and containers of them",
        )  # fmt: skip
    # 1, 1.0 and True are equal in Python.
    value = leaf if typed or not isinstance(leaf, (bool, int, float)) else float(leaf)
    return f"|{type(value).__name__ if typed else ''}{value!r}|".encode()


def memoize(function: Function | None = None, *, maxsize: int | None = 128, typed: bool = False) -> Function:
    """Keep the results of up to `maxsize` different calls (None: all), the most recently used ones.

    Tensors are compared by their elements. With `typed`, 1 and 1.0 are different. Inside a trace nothing is
    cached: there are no elements yet. The function has `cache_info()` and `cache_clear()`.

    >>> @memoize(maxsize=10)
    ... def square(x):
    ...     return x * x
    >>> square(Tensor([2.0])), square(Tensor([2.0])), square.cache_info().hits
    (Tensor([4.], f32), Tensor([4.], f32), 1)

    Raises:
        ArgumentError: an argument cannot be part of a key.
    """
    if function is None:
        return functools.partial(memoize, maxsize=maxsize, typed=typed)
    check_function(function, "memoize")
    kept: OrderedDict[str, Any] = OrderedDict()
    lock, counts = Lock(), [0, 0]

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if CURRENT_BUILDER.get() is not None:
            return function(*args, **keywords)
        key = hash_arguments(args, keywords, typed)
        with lock:
            if key in kept:
                counts[0] += 1
                kept.move_to_end(key)
                return kept[key]
            counts[1] += 1
        result = function(*args, **keywords)
        with lock:
            kept[key] = result
            if maxsize is not None and len(kept) > maxsize:
                kept.popitem(last=False)
        return result

    wrapper.cache_info = lambda: MemoizeInfo(counts[0], counts[1], maxsize, len(kept))  # type: ignore[attr-defined]
    wrapper.cache_clear = kept.clear  # type: ignore[attr-defined]
    return wrapper


def persistent_cache(path: str | Path) -> Callable[[Function], Function]:
    """Keep results in an SQLite file at `path`, across runs; `~` is the home folder.

    The key is the function's name and source and its arguments, tensors by their
    elements: after a change of the source, or of a version among the arguments, results are recomputed.
    Results are tensors, numbers, strings and containers of them: dicts, lists, tuples, and named tuples whose
    class is defined at the top level of a module. Inside a trace nothing is cached.

    A file that cannot be written is a RuntimeWarning: the results hold without it.

    Raises:
        ArgumentError: an argument or a result is of another kind, or the class of a cached result is missing.
        FileError: the file is no cache of results.
    """
    file = Path(path).expanduser()

    def decorate(function: Function) -> Function:
        own = f"{function.__module__}.{function.__qualname__}|{_hash_source(function)}"

        @functools.wraps(function)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            if CURRENT_BUILDER.get() is not None:
                return function(*args, **keywords)
            key = hashlib.sha256(f"{own}|{hash_arguments(args, keywords, True)}".encode()).hexdigest()
            held = _read_result(file, key)
            if held is not None:
                return _deserialise_result(held)
            result = function(*args, **keywords)
            _write_result(file, key, _serialise_result(result))
            return result

        return wrapper

    return decorate


def _hash_source(function: Function) -> str:
    try:
        return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()
    except (OSError, TypeError):  # typed in a console: its code must do
        return hashlib.sha256(inspect.unwrap(function).__code__.co_code).hexdigest()


def _read_result(file: Path, key: str) -> bytes | None:
    """What a cache file holds for a key; None without a file, or while it cannot be read."""
    try:
        with closing(sqlite3.connect(file, timeout=30)) as connection:
            row = connection.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        raise FileError(
            f"{file} is no cache of results", location=user_location(), received=str(error),
            suggestion="delete it: the results are computed again",
        ) from None  # fmt: skip
    return None if row is None else row[0]


def _write_result(file: Path, key: str, content: bytes) -> None:
    """Add a result to a cache file. One that cannot be written is a warning: the result holds without it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=30)) as connection, connection:
            connection.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value BLOB)")
            connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (key, content))
    except (sqlite3.OperationalError, OSError) as error:
        warnings.warn(f"{file} cannot be written ({error}): the result is not kept", RuntimeWarning, stacklevel=4)


def _serialise_result(result: Any) -> bytes:
    """A result as bytes: its tree and plain leaves as JSON, its tensors as arrays without pickling."""
    leaves, tree = flatten(result, "result")
    plain: list[Any] = []
    arrays: dict[str, np.ndarray] = {}
    for number, (name, leaf) in enumerate(leaves):
        if isinstance(leaf, Tensor):
            plain.append({"tensor": leaf.dtype.name, "shape": list(leaf.shape), "policy": _policy_clauses(leaf)})
            arrays[str(number)] = np.ascontiguousarray(leaf.numpy()).reshape(-1).view(np.uint8)
        elif isinstance(leaf, _SCALAR_TYPES):
            plain.append({"plain": leaf})
        else:
            raise ArgumentError(
                f"{name} cannot be kept in a file", location=user_location(), received=type(leaf).__name__
            )
    head = json.dumps({"tree": _encode_tree(tree), "leaves": plain}).encode()
    file = io.BytesIO()
    np.savez(file, head=np.frombuffer(head, np.uint8), **arrays)  # type: ignore[arg-type]
    return file.getvalue()


_CONTAINERS: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}


def _policy_clauses(tensor: Tensor) -> dict[str, Any]:
    """A tensor's policy as plain values."""
    policy = tensor.type.policy
    return {k: str(v) if isinstance(v, DType) else v for k, v in policy.clauses().items()} if policy else {}


def _encode_tree(tree: TreeDef) -> Any:
    if tree.kind is None:
        return None
    name = tree.kind.__name__ if tree.kind in _CONTAINERS.values() else _qualified_class_name(tree.kind)
    return [name, list(tree.keys), [_encode_tree(c) for c in tree.children]]


def _qualified_class_name(kind: type) -> str:
    """The module and name of a class of named tuples, by which a later run finds it."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_class(name) is not kind:
        raise ArgumentError(
            f"{kind.__qualname__} cannot be kept in a file: a later run would not find it", location=user_location(),
            expected="a class defined at the top of a module", received=name,
        )  # fmt: skip
    return name


def _find_class(name: str) -> Any:
    """A class of named tuples by its module and name, in a module that is loaded; None if there is none.

    Nothing is imported: a file would choose what runs.
    """
    module, _, path = name.partition(":")
    try:
        found = functools.reduce(getattr, path.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return found if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields") else None


def _decode_tree(shape: Any) -> TreeDef:
    """The tree of a result.

    Raises:
        ArgumentError: a class of named tuples is missing.
    """
    if shape is None:
        return TreeDef()
    name, keys, children = shape
    kind = _CONTAINERS.get(name) or _find_class(name)
    if kind is None:
        raise ArgumentError(
            "the class of a cached result is missing", location=user_location(), received=name,
            suggestion="import the module that defines it first, or delete the cache file",
        )  # fmt: skip
    return TreeDef(kind, tuple(keys), tuple(_decode_tree(c) for c in children))


def _deserialise_result(content: bytes) -> Any:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        head = json.loads(found["head"].tobytes())
        leaves = [_decode_leaf(number, each, found) for number, each in enumerate(head["leaves"])]
    return _decode_tree(head["tree"]).build(iter(leaves))


def _decode_leaf(number: int, described: Any, found: Any) -> Any:
    if "tensor" not in described:
        return described["plain"]
    dtype = as_dtype(described["tensor"])
    array = found[str(number)].view(dtype.numpy).reshape(described["shape"])
    return Tensor(array, dtype=Policy(dtype, **described["policy"]) if described["policy"] else dtype)
