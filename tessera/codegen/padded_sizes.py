"""Padded sizes: calls of any size up to an upper bound, for a program of known sizes (`lower/passes/size_padding.py`).

Arguments are padded with zeros, the sizes are its last arguments, and results are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.codegen.artifact import check_fields, describe_size, is_count, is_list, is_table, is_text, parse_size
from tessera.core.errors import ArtifactError, ShapeError
from tessera.core.shapes import SizeConstraint, bind_program_sizes
from tessera.core.symbolic_dim import Size, evaluate_shape, symbol_names

SIZE_PREFIX = "size "  # of the names of parameters that hold a size

Layout = tuple[tuple[Size, ...], ...]  # for each axis of a result its factors, as B and S of B*S


@dataclass(frozen=True)
class PaddedSizes:
    """The upper bounds of a program's sizes by name, its arguments' shapes, its results' layouts, its constraints."""

    upper: Mapping[str, int]
    names: tuple[str, ...]
    patterns: tuple[tuple[Size, ...], ...]
    results: tuple[Layout, ...]
    constraints: tuple[SizeConstraint, ...] = ()

    def bind(self, arrays: Sequence[Any]) -> dict[str, int]:
        """The sizes of a call.

        Raises:
            ShapeError: a shape does not fit, or a size breaks a constraint or is above its upper bound.
        """
        shapes = [np.shape(a) for a in arrays]
        sizes = bind_program_sizes(self.names, self.patterns, shapes, self.constraints)
        for name, most in self.upper.items():
            if sizes[name] > most:
                raise ShapeError(
                    f"the size {name} is {sizes[name]}", expected=f"at most {most}, for which the artifact was built",
                    suggestion=f'build it with a larger example, or with a limit: @ts.require("{name} <= ...")',
                )  # fmt: skip
        return sizes

    def pad(self, arrays: Sequence[Any], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The arguments of the program: arrays of the upper bounds, then the sizes."""
        wanted = [evaluate_shape(p, self.upper) for p in self.patterns]
        padded = [pad_array(np.asarray(a), n) for a, n in zip(arrays, wanted, strict=True)]  # type: ignore[arg-type]
        return [*padded, *(np.asarray(sizes[name], np.int32) for name in self.upper)]

    def cut(self, results: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The results without padding."""
        return [cut_array(a, layout, self.upper, sizes) for a, layout in zip(results, self.results, strict=True)]

    def describe(self) -> dict[str, Any]:
        """This as JSON data; names and shapes are those of the interface's parameters."""
        results = [[[describe_size(f) for f in axis] for axis in layout] for layout in self.results]
        return {"upper": dict(self.upper), "results": results, "constraints": [c.text for c in self.constraints]}


_FIELDS = {
    "upper": is_table(is_count),
    "results": is_list(is_list(is_list(lambda _: True))),
    "constraints": is_list(is_text),
}


def parse_padded_sizes(
    data: Any, parameters: Sequence[Mapping[str, Any]], lines: Mapping[str, str] = MappingProxyType({})
) -> PaddedSizes:
    """The padding of an artifact from its JSON data.

    Raises:
        ArtifactError: it is damaged.
    """
    check_fields(data if isinstance(data, dict) else {}, _FIELDS, "the padding in the manifest")
    given = [p for p in parameters if not p["name"].startswith(SIZE_PREFIX)]
    patterns = tuple(tuple(parse_size(n) for n in p.get("sizes", p["shape"])) for p in given)
    results = tuple(tuple(tuple(map(parse_size, axis)) for axis in layout) for layout in data["results"])
    used = [f for p in (*patterns, *(a for layout in results for a in layout)) for f in p]
    if symbol_names(used) - data["upper"].keys() or 0 in data["upper"].values():
        raise ArtifactError("the padding in the manifest is not valid", received=repr(data["upper"])[:200])
    try:
        constraints = tuple(SizeConstraint(text, lines.get(text, "")) for text in data["constraints"])
    except ShapeError as error:
        raise ArtifactError("the padding in the manifest is not valid", received=error.message) from None
    return PaddedSizes(data["upper"], tuple(p["name"] for p in given), patterns, results, constraints)


def pad_array(array: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The array with zeros past its ends.

    >>> pad_array(np.array([1, 2]), (4,))
    array([1, 2, 0, 0])
    """
    if array.shape == tuple(sizes):
        return array
    padded = np.zeros(tuple(sizes), array.dtype)
    padded[tuple(slice(n) for n in array.shape)] = array
    return padded


def cut_array(array: np.ndarray, layout: Layout, upper: Mapping[str, int], sizes: Mapping[str, int]) -> np.ndarray:
    """The elements of a result that are no padding.

    >>> from tessera.core.symbolic_dim import Dim
    >>> B, S = Dim.of("B"), Dim.of("S")
    >>> cut_array(np.arange(6), ((B, S),), {"B": 2, "S": 3}, {"B": 2, "S": 2})
    array([0, 1, 3, 4])
    """
    factors = [f for axis in layout for f in axis]
    whole = array.reshape([int(n) for n in evaluate_shape(factors, upper)])
    held = whole[tuple(slice(int(n)) for n in evaluate_shape(factors, sizes))]
    counts = [int(np.prod([int(n) for n in evaluate_shape(axis, sizes)], dtype=np.int64)) for axis in layout]
    return np.array(held.reshape(counts), order="C")
