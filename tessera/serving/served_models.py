"""Served models: an artifact or a function with the names, types and shapes of its tensors, batching and replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.types import as_dtype
from tessera.ir.tensor import Tensor
from tessera.runtime.loading import get_parameter_shape
from tessera.runtime.tensor_files import load
from tessera.serving.batching import DynamicBatcher, take_rows
from tessera.serving.options import ServerOptions
from tessera.serving.replicas import LoadBalancer, ProcessReplica, ThreadReplica
from tessera.serving.requests import InferenceRequest, hash_arrays
from tessera.serving.response_cache import CacheManager

PROBED = 2  # for a size that may be any


@dataclass(frozen=True)
class TensorDescription:
    """The name, element type and shape of an input or output; a size of -1 is any, from 1 on."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        as_dtype(self.dtype)
        sizes = self.shape if isinstance(self.shape, (tuple, list)) else (None,)
        if not all(isinstance(n, (int, np.integer)) and (n >= 0 or n == -1) for n in sizes):
            raise ArgumentError(f"the shape of {self.name} is {self.shape!r}", location=user_location(),
                                expected="sizes, -1 for any")  # fmt: skip

    def check(self, array: np.ndarray) -> None:
        """Check an array.

        Raises:
            ShapeError, DTypeError: it is another.
        """
        fits = len(array.shape) == len(self.shape) and all(
            n >= 1 if want == -1 else n == want for n, want in zip(array.shape, self.shape, strict=True)
        )
        if not fits:
            raise ShapeError(f"input {self.name} has another shape", expected=list(self.shape),
                             received=list(array.shape))  # fmt: skip
        if array.dtype != as_dtype(self.dtype).numpy:
            raise DTypeError(f"input {self.name} has another element type", expected=self.dtype,
                             received=str(array.dtype))  # fmt: skip


class ArtifactFunction:
    """An artifact or bundle as a function from named arrays to named arrays; arrays that it writes are results too.

    `row_sizes` are the sizes of the first axis that it was compiled for; none where any size fits. A bundle has a
    program for each.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        names = [n for n, target in source.variants.items() if target == source.target] if _is_bundle(source) else []
        programs = [source.load_variant(n) for n in names] or [source]
        interface = programs[0].interface
        self._writes = [interface["parameters"][i]["name"] for i in interface["written"]]
        self.inputs = merge_programs([[_describe(p) for p in a.parameters] for a in programs])
        self.outputs = merge_programs([_list_outputs(a) for a in programs])
        leading = [{get_parameter_shape(p)[:1] for p in a.parameters} for a in programs]
        self.has_rows = all(len(sizes) == 1 and () not in sizes for sizes in leading)
        fixed = [n for sizes in leading for n in sizes if n and isinstance(n[0], (int, np.integer))]
        self.row_sizes = sorted(int(n[0]) for n in fixed) if len(fixed) == len(programs) else []
        self.repeats = "random" not in interface and not self._writes

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = [np.array(inputs[s.name]) if s.name in self._writes else inputs[s.name] for s in self.inputs]
        found = self.source.run(arrays)
        return {s.name: np.asarray(a) for s, a in zip(self.outputs, found, strict=True)}


def _is_bundle(source: Any) -> bool:
    return hasattr(source, "load_variant")


def _describe(tensor: Mapping[str, Any], sizes: str = "sizes") -> TensorDescription:
    """A parameter or output of a manifest; `sizes` is the field with symbolic sizes."""
    shape = get_parameter_shape({**tensor, "sizes": tensor.get(sizes, tensor["shape"])})
    return TensorDescription(
        tensor["name"], tensor["dtype"], tuple(int(n) if isinstance(n, (int, np.integer)) else -1 for n in shape)
    )


def _list_outputs(program: Any) -> list[TensorDescription]:
    """The results of a program in their order: its outputs, and then the parameters that it writes."""
    parameters = program.interface["parameters"]
    written = [parameters[i] for i in program.interface["written"]]
    names = {p["name"] for p in written}
    signature = program.artifact.manifest.get("signature", {}).get("outputs", ())
    outputs = [_describe(o, "shape") for o in signature if o["name"] not in names]
    return [*outputs, *map(_describe, written)]


def merge_programs(programs: Sequence[list[TensorDescription]]) -> list[TensorDescription]:
    """The tensors of several programs as those of one: a size that differs is any.

    Raises:
        ArgumentError: the programs have different tensors.
    """
    found = []
    for tensors in zip_longest(*programs):
        first = tensors[0]
        kinds = {(t.name, t.dtype, len(t.shape)) if t else None for t in tensors}
        if None in kinds or len(kinds) > 1:
            names = sorted({t.name for t in tensors if t is not None})
            raise ArgumentError("the programs of the bundle have different tensors", location=user_location(),
                                received=", ".join(names))  # fmt: skip
        sizes = [set(each) for each in zip(*(t.shape for t in tensors), strict=True)]
        found.append(replace(first, shape=tuple(n.pop() if len(n) == 1 else -1 for n in sizes)))
    return found


def load_function(path: str | Path) -> ArtifactFunction:
    """The function of an artifact folder or a bundle.

    Raises:
        ArgumentError: the path holds something that is no program.
    """
    found = load(path)
    if not hasattr(found, "parameters") or not hasattr(found, "run"):
        raise ArgumentError(f"{Path(path).name} holds no program", location=user_location(),
                            received=type(found).__name__, suggestion="ts.build writes one")  # fmt: skip
    return ArtifactFunction(found)


class NamedFunction:
    """A user's function of arrays in the order of the inputs, as one from named arrays to named arrays."""

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[TensorDescription], outputs: Sequence[TensorDescription]
    ):
        self.function, self.inputs, self.outputs = function, list(inputs), list(outputs)
        leading = {s.shape[:1] for s in inputs}
        self.has_rows = len(leading) == 1 and () not in leading
        self.row_sizes = [n for sizes in leading for n in sizes if n > 0]
        self.repeats = False  # it may have an effect

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self.function(*(inputs[s.name] for s in self.inputs))
        results = list(found) if isinstance(found, (list, tuple)) else [found]
        if len(results) != len(self.outputs):
            raise ArgumentError("the function does not give the outputs that were stated",
                                expected=len(self.outputs), received=len(results))  # fmt: skip
        arrays = [r.numpy() if isinstance(r, Tensor) else np.asarray(r) for r in results]
        return {s.name: a for s, a in zip(self.outputs, arrays, strict=True)}


class ServedModel:
    """A model behind a server: checks inputs, and runs them through the cache, the batcher and a replica.

    `source` is the path of an artifact or bundle, a loaded artifact, or a function with `inputs` and `outputs`.
    With `options.max_batch_size` above 1, rows of several requests run together: that is checked on two rows when the
    model is made, since a model whose rows depend on each other gives other results.

    Raises:
        ArgumentError: the model is of another kind, or its rows depend on each other.
    """

    def __init__(
        self, name: str, source: Any, options: ServerOptions | None = None, inputs: Sequence[TensorDescription] = (),
        outputs: Sequence[TensorDescription] = (), version: str = "1",
    ) -> None:  # fmt: skip
        self.name, self.version, self.options = name, version, options or ServerOptions()
        self.function = _make_function(source, inputs, outputs)
        self.inputs, self.outputs = self.function.inputs, self.function.outputs
        self.platform = "tessera"
        self.cache = CacheManager(self.options.cache_size)
        self.row_sizes = self.function.row_sizes if self.batched else []
        if self.batched:
            self._check_batching()
        self.balancer = LoadBalancer(self._make_replicas(source))
        most = min([self.options.max_batch_size, *self.row_sizes[-1:]])
        self.batcher = DynamicBatcher(
            most, self.options.batch_timeout_ms, self.options.padding, is_busy=lambda: self.balancer.busy
        )
        self.balancer.on_idle = self.batcher.release

    @property
    def batched(self) -> bool:
        """Whether requests share batches."""
        return self.options.max_batch_size > 1

    @property
    def accepted(self) -> list[TensorDescription]:
        """The inputs of a request: with batching, the first size is any."""
        if not self.batched:
            return self.inputs
        return [TensorDescription(s.name, s.dtype, (-1, *s.shape[1:])) for s in self.inputs]

    def _make_replicas(self, source: Any) -> list[ThreadReplica]:
        names = [f"{self.name} {i}" for i in range(self.options.replicas)]
        is_path = isinstance(source, (str, Path))
        if self.options.processes:
            if not is_path:
                raise ArgumentError("replicas in processes load their model from a path", location=user_location())
            return [ProcessReplica(source, n) for n in names]
        # A program has memory of its own for what lies between its kernels: each thread loads one.
        functions = [self.function, *(_make_function(source, self.inputs, self.outputs) for _ in names[1:])]
        return [ThreadReplica(self._adapt(f), n) for f, n in zip(functions, names, strict=True)]

    @staticmethod
    def _adapt(function: Any) -> Callable[[Any], Any]:
        only = function.inputs[0].name if len(function.inputs) == 1 else ""
        return lambda inputs: function(inputs if isinstance(inputs, Mapping) else {only: inputs})

    def _check_batching(self) -> None:
        """Check that the model can be batched.

        Raises:
            ArgumentError: the inputs have no common first axis, or the rows depend on each other.
        """
        if not self.function.has_rows:
            raise ArgumentError(f"the inputs of {self.name} have no common first axis to batch",
                                location=user_location(),
                                suggestion="serve it without batching: max_batch_size=1")  # fmt: skip
        if self.row_sizes and self.row_sizes[-1] == 1:
            raise ArgumentError(f"{self.name} was compiled for batches of one row", location=user_location(),
                                suggestion="build it with symbolic rows, or serve it unbatched")  # fmt: skip
        self._check_rows()

    def _check_rows(self) -> None:
        """Check that the result of a row does not depend on the other rows, on inputs of zeros and ones."""
        shapes = [tuple(PROBED if n == -1 else n for n in s.shape[1:]) for s in self.inputs]
        rows = [{s.name: np.full((1, *shape), value, as_dtype(s.dtype).numpy)
                 for s, shape in zip(self.inputs, shapes, strict=True)} for value in (0, 1)]  # fmt: skip
        both = self._run_rows({n: np.concatenate([rows[0][n], rows[1][n]]) for n in rows[0]}, 2)
        for i, row in enumerate(rows):
            for name, found in self._run_rows(row, 1).items():
                if not _agree(both[name][i : i + 1], found):
                    raise ArgumentError(
                        f"the rows of {self.name} depend on each other (output {name}), and cannot be batched",
                        location=user_location(), suggestion="serve it without batching: max_batch_size=1",
                    )  # fmt: skip

    def _pad_rows(self, inputs: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        """The inputs with as many rows as the next program has: the last row is repeated."""
        size = next((n for n in self.row_sizes if n >= rows), rows)
        if size == rows:
            return dict(inputs)
        return {n: np.concatenate([a, np.repeat(a[-1:], size - rows, axis=0)]) for n, a in inputs.items()}

    def _run_rows(self, inputs: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        padded = self._pad_rows(inputs, rows)
        return take_rows(self.function(padded), 0, rows, _count_rows(padded))

    async def infer(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The named outputs for named inputs.

        Raises:
            ArgumentError: an input is missing or unknown.
            ShapeError, DTypeError: an input does not fit.
        """
        self.check_inputs(inputs)
        key = hash_arrays(inputs) if self.function.repeats and self.options.cache_size else ""
        if key and (found := self.cache.get(key)) is not None:
            return found
        result = await (self._infer_batched(inputs) if self.batched else self.balancer.run(inputs))
        if key:
            self.cache.put(key, result)
        return result

    def check_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Check names, shapes and types."""
        names = [s.name for s in self.inputs]
        if wrong := [n for n in inputs if n not in names] or [n for n in names if n not in inputs]:
            kind = "lacks" if wrong[0] in names else "has an unknown"
            raise ArgumentError(f"the request {kind} input {wrong[0]}", expected=", ".join(names))
        for spec in self.accepted:
            spec.check(inputs[spec.name])
        sizes = self.function.row_sizes if self.function.has_rows and not self.batched else []
        if sizes and (rows := _count_rows(inputs)) not in sizes:
            raise ShapeError(f"{self.name} was compiled for other numbers of rows", received=rows,
                             expected=f"{' or '.join(map(str, sizes))}; with --max-batch above 1, any up to the most",
                             )  # fmt: skip

    async def _infer_batched(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        request = InferenceRequest(dict(inputs))
        if self.row_sizes and request.rows > self.row_sizes[-1]:
            raise ShapeError("the request has more rows than the program", expected=f"up to {self.row_sizes[-1]}",
                             received=request.rows)  # fmt: skip
        slot = await self.batcher.add(request)
        return await slot.run(lambda held: self._run_batch(held, slot.batch.rows))

    async def _run_batch(self, inputs: dict[str, np.ndarray], rows: int) -> Any:
        padded = self._pad_rows(inputs, rows)
        return take_rows(await self.balancer.run(padded), 0, rows, _count_rows(padded))

    def close(self) -> None:
        """End the replicas."""
        self.balancer.close()


def _count_rows(inputs: Mapping[str, np.ndarray]) -> int:
    return next(iter(inputs.values())).shape[0]


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-3, atol=1e-5, equal_nan=True))


def _make_function(source: Any, inputs: Sequence[TensorDescription], outputs: Sequence[TensorDescription]) -> Any:
    if isinstance(source, (str, Path)):
        return load_function(source)
    if hasattr(source, "interface") and hasattr(source, "run"):
        return ArtifactFunction(source)
    if callable(source) and inputs and outputs:
        return NamedFunction(source, inputs, outputs)
    raise ArgumentError(
        "this is no model that can be served", location=user_location(), received=type(source).__name__,
        expected="the path of an artifact, a loaded artifact, or a function with inputs= and outputs=",
        suggestion="ts.build writes an artifact of a jit function",
    )  # fmt: skip
