"""Strings: operators on arrays of Python strings, which run on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule


@rule("StringConcat")
def _(call: NodeCall, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(np.add(x, y), object)


@rule("StringSplit")
def _(call: NodeCall, x: np.ndarray) -> tuple[np.ndarray, Tensor]:
    by, most = call.attr("delimiter", None) or None, call.attr("maxsplit", None)
    parts: list[list[str]] = [str(s).split(by, -1 if most is None else most) for s in x.reshape(-1)]
    parts = [[] if p == [""] and not str(s) else p for p, s in zip(parts, x.reshape(-1), strict=True)]
    width = max((len(p) for p in parts), default=0)
    rows = [p + [""] * (width - len(p)) for p in parts]
    table = np.array(rows, object).reshape(*x.shape, width)
    return table, Tensor(np.array([len(p) for p in parts], np.int64).reshape(x.shape))


@rule("StringNormalizer")
def _(call: NodeCall, x: np.ndarray) -> np.ndarray:
    changes: dict[str, Callable[[str], str]] = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}
    change = changes[call.attr("case_change_action")]
    exact = bool(call.attr("is_case_sensitive"))
    stops = [s if exact else s.lower() for s in call.attr("stopwords", ())]
    rows = x.reshape(-1, x.shape[-1]) if x.ndim == 2 else x.reshape(1, -1)
    if x.ndim > 2 or (x.ndim == 2 and x.shape[0] != 1):
        raise call.fail("strings of more than one row", expected="[N] or [1, N]", received=str(x.shape))
    kept = [s for s in rows[0] if (s if exact else str(s).lower()) not in stops]
    found = np.array([change(str(s)) for s in kept] or [""], object)
    return found.reshape(1, -1) if x.ndim == 2 else found


@rule("TfIdfVectorizer")
def _(call: NodeCall, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        x = call.array(x, "the sequence")
    grams = _read_grams(call)
    size = max(call.attr("ngram_indexes")) + 1
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    counts = np.stack([_count_grams(call, list(row), grams, size) for row in rows])
    weights = np.asarray(call.attr("weights", None) or np.ones(len(call.attr("ngram_indexes"))), np.float32)
    scale = np.ones(size, np.float32)
    scale[list(call.attr("ngram_indexes"))] = weights
    mode = call.attr("mode")
    found = {"TF": counts, "IDF": (counts > 0) * scale, "TFIDF": counts * scale}[mode].astype(np.float32)
    return Tensor(found if x.ndim == 2 else found[0])


def _read_grams(call: NodeCall) -> dict[tuple[Any, ...], int]:
    """The n-grams of the pool, each with its place in the result."""
    pool = call.attr("pool_strings", None) or call.attr("pool_int64s")
    starts = [*call.attr("ngram_counts"), len(pool)]
    indexes = iter(call.attr("ngram_indexes"))
    found = {}
    for n, (a, b) in enumerate(zip(starts, starts[1:], strict=False), 1):
        for at in range(a, b, n):
            found[tuple(pool[at : at + n])] = next(indexes)
    return found


def _count_grams(call: NodeCall, row: list[Any], grams: dict[tuple[Any, ...], int], size: int) -> np.ndarray:
    counts = np.zeros(size, np.float32)
    for n in range(call.attr("min_gram_length"), call.attr("max_gram_length") + 1):
        for skip in range(1, call.attr("max_skip_count") + 2 if n > 1 else 2):
            for start in range(len(row) - (n - 1) * skip):
                place = grams.get(tuple(row[start : start + n * skip : skip][:n]))
                if place is not None:
                    counts[place] += 1
    return counts


@rule("RegexFullMatch")
def _(call: NodeCall, x: np.ndarray) -> Tensor:
    raise call.refuse("regular expressions: a pattern of a model could take without limit")


@rule("LabelEncoder", domain="ai.onnx.ml")
def _(call: NodeCall, x: Any) -> Any:
    keys, values, default = _read_labels(call)
    table = dict(zip(keys, values, strict=True))
    nan = next((v for k, v in table.items() if k != k), default)
    array = call.array(x, "the labels") if isinstance(x, Tensor) else x
    found = [table.get(k, nan if k != k else default) for k in array.reshape(-1).tolist()]
    if isinstance(default, str):
        return np.array(found, object).reshape(array.shape)
    return Tensor(np.array(found, np.asarray(values).dtype).reshape(array.shape))


def _read_labels(call: NodeCall) -> tuple[list[Any], list[Any], Any]:
    types = {"strings": ("_Unused", object), "int64s": (-1, np.int64), "floats": (-0.0, np.float32)}

    def read(what: str) -> Any:
        held = call.attr(f"{what}_tensor", None)
        if held is not None:
            return held.numpy() if isinstance(held, Tensor) else held
        name = next((n for n in types if call.attr(f"{what}_{n}", None) is not None), None)
        if name is None:
            raise call.fail(f"no {what}")
        return np.asarray(call.attr(f"{what}_{name}"), types[name][1])

    keys, values = read("keys"), read("values")
    name = "strings" if values.dtype == object else "floats" if values.dtype.kind == "f" else "int64s"
    held = call.attr("default_tensor", None)
    singular = {"strings": "default_string", "int64s": "default_int64", "floats": "default_float"}[name]
    default = call.attr(singular, types[name][0]) if held is None else np.asarray(getattr(held, "data", held)).item()
    return keys.tolist(), values.tolist() if name == "strings" else values, default


@rule("ArrayFeatureExtractor", domain="ai.onnx.ml")
def _(call: NodeCall, x: Any, places: Tensor) -> Any:
    array, at = call.array(x, "the elements"), call.array(places, "the places").reshape(-1)
    found = np.take(array, at, axis=-1)
    found = found.reshape(1, -1) if array.ndim == 1 else found
    return Tensor(found) if isinstance(x, Tensor) else found


@rule("Binarizer", domain="ai.onnx.ml")
def _(call: NodeCall, x: Tensor) -> Tensor:
    from tessera.ops.tensor.basic import cast
    from tessera.ops.tensor.elementwise import greater

    return cast(greater(x, call.attr("threshold")), dtype=x.dtype)
