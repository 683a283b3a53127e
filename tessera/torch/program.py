"""Imported program: a PyTorch model as a Graph function with its parameters, buffers and constraints (torch.export)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Node
from torch.utils import _pytree

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TraceError, UnsupportedOpError, user_location
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import Jit, TracedFunction
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, as_tensor
from tessera.torch.aten import ATEN
from tessera.torch.conversion import check_supported, convert, name_op, supported
from tessera.torch.recurrent_layers import whole_recurrent_layers
from tessera.torch.tensors import find_dtype, from_torch

WRITTEN_INPUTS = [k for k in OutputKind if k.name in ("USER_INPUT_MUTATION", "PARAMETER_MUTATION")]
STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def import_program(
    program: ExportedProgram | torch.nn.Module,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: str | None = None,
) -> ImportedProgram:
    """A PyTorch model as a Tessera program: its ops, parameters, buffers and the constraints of its sizes.

    A module is exported first, in its mode (`model.eval()`), with `example_inputs` and `dynamic_shapes` as
    `torch.export.export` takes them. Parameters on the CPU share memory with the module's, where they are contiguous.
    Buffers are copied: what a call writes into them is kept in the program's `buffers`, not in the module.

    `target` is where calls run ("interp", "cpu", "cuda:0", ...); None means the default device.

    >>> layer = torch.nn.Linear(2, 1)
    >>> program = import_program(layer, (torch.ones(3, 2),))
    >>> program(torch.ones(3, 2)).shape
    (3, 1)

    Raises:
        UnsupportedOpError: the model cannot be exported, or has ops that have no row; the error names all of them with
            their lines of Python.
        DTypeError: a parameter has elements of a type that is not here, as complex numbers.
    """
    if isinstance(program, torch.nn.Module):
        program = _export(program, tuple(example_inputs), dict(example_kwargs or {}), dynamic_shapes)
    if not isinstance(program, ExportedProgram):
        raise ArgumentError(
            "this is not a program of PyTorch", location=user_location(), received=type(program).__name__,
            expected="a torch.nn.Module, or what torch.export.export returns",
        )  # fmt: skip
    return ImportedProgram(decompose(program), target)


def _export(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any], dynamic_shapes: Any) -> Any:
    try:
        with _without_future_warnings(), whole_recurrent_layers():
            return torch.export.export(module, args, named, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise UnsupportedOpError(
            f"torch.export cannot export {type(module).__name__}: {type(error).__name__}", location=user_location(),
            received=str(error).strip().split("\n\n")[0],
            suggestion="make it exportable (docs of torch.export), or use torch.compile(model, backend=\"tessera\")",
        ) from error  # fmt: skip


@contextmanager
def _without_future_warnings() -> Iterator[None]:
    """PyTorch's export warns of its own future, and of what its recurrent layers do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=r"The tensor attributes? self\._flat_weights", category=UserWarning)
        yield


# Decomposition: what the table has stays whole, the rest comes apart.


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The program without mutation, in ops of the table where possible."""
    if _is_functional(program) and not _list_refused(program):
        return program
    whole: set[Any] = {op for op in default_decompositions() if str(op) in ATEN}
    for _ in range(3):
        table = default_decompositions()
        for op in whole:
            table.pop(op, None)
        program = _run_decompositions(program, table)
        refused = {node.target for node in _list_refused(program)} & whole
        if not refused:
            break
        whole -= refused
    return program


def _run_decompositions(program: ExportedProgram, table: Any) -> ExportedProgram:
    try:
        with _without_future_warnings():
            return program.run_decompositions(table)
    except Exception as error:
        raise UnsupportedOpError(
            f"PyTorch cannot take the program apart: {type(error).__name__}", location=user_location(),
            received=str(error).strip().split("\n\n")[0],
        ) from error  # fmt: skip


def _list_refused(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if supported(node) is not None]


def _is_functional(program: ExportedProgram) -> bool:
    ops = (n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return not any(op._schema.is_mutable for op in ops)


# The constraints of the export.


@dataclass(frozen=True)
class InputSpec:
    """What an export says of one input: its name, its fake tensor or its fixed value."""

    name: str
    value: Any

    def check(self, given: Any, sizes: dict[Any, int]) -> None:
        """Refuse an input that the export does not hold for; `sizes` collects the values of symbols.

        Raises:
            ShapeError: its rank or a size differs.
            DTypeError: its element type differs.
            ArgumentError: the export fixed another value.
        """
        if not isinstance(self.value, torch.Tensor):
            self._check_fixed(given)
            return
        if not isinstance(given, Tensor):
            raise ArgumentError(f"input {self.name} is not a tensor", received=repr(given), expected=self.describe())
        if given.dtype != find_dtype(self.value.dtype):
            raise DTypeError(f"input {self.name} has another element type", **self._compare(given))
        if len(given.shape) != self.value.ndim:
            raise ShapeError(f"input {self.name} has another rank", **self._compare(given))
        for have, want in zip(given.shape, self.value.shape, strict=True):
            if isinstance(have, int) and not _agrees(have, want, sizes):
                raise ShapeError(f"input {self.name} has a size that the export excludes", **self._compare(given))

    def _check_fixed(self, given: Any) -> None:
        fixed = self.value.value if isinstance(self.value, ConstantArgument) else self.value
        known = isinstance(fixed, (int, float, bool, str, type(None)))
        if known and given != fixed:
            raise ArgumentError(
                f"input {self.name} was {fixed!r} when the model was exported", location=user_location(),
                expected=repr(fixed), received=repr(given), suggestion="import the model once more with this value",
            )  # fmt: skip

    def _compare(self, given: Tensor) -> dict[str, Any]:
        return {
            "location": user_location(), "expected": self.describe(), "received": str(given.type),
            "suggestion": "import the model with dynamic_shapes=, or give it inputs of the sizes of the example",
        }  # fmt: skip

    def describe(self) -> str:
        """The type that the export requires, as 2xS0xf32."""
        return "x".join([*(str(n) for n in self.value.shape), str(find_dtype(self.value.dtype))])


def _agrees(have: int, want: Any, sizes: dict[Any, int]) -> bool:
    if isinstance(want, int):
        return have == want
    expression = want.node.expr
    if expression.is_Symbol:
        return sizes.setdefault(expression, have) == have
    known = expression.subs(sizes)
    return not known.is_Integer or int(known) == have


# The program.


@dataclass
class ImportedProgram:
    """A model: call it with tensors, or use `apply` as a function of its parameters.

    `parameters` and `buffers` map the names of the module to tensors; `buffers` has what the last call wrote.
    """

    exported: ExportedProgram
    target: str | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_supported(self.exported.graph_module)
        self._check_outputs()
        signature = self.exported.graph_signature
        values = {n.name: n.meta.get("val") for n in self.exported.graph.nodes if n.op == "placeholder"}
        self._specs = [(s.kind, s.target, s.arg.name) for s in signature.input_specs]
        self.inputs = [
            InputSpec(s.arg.name, s.arg if isinstance(s.arg, ConstantArgument) else values[s.arg.name])
            for s in signature.input_specs
            if s.kind is InputKind.USER_INPUT
        ]
        self.constants: dict[str, Tensor] = {}
        self._read_state()
        self._run = convert(self.exported.graph_module, checked=False)
        self._jit = Jit(self._call_flat, target=self.target)

    def _check_outputs(self) -> None:
        written = [s.target for s in self.exported.graph_signature.output_specs if s.kind in WRITTEN_INPUTS]
        if written:
            raise UnsupportedOpError(
                f"the model writes into {', '.join(map(str, written))}, which it was given", location=user_location(),
                expected="a model that only writes its own buffers",
                suggestion="return the new values, or write a copy",
            )  # fmt: skip

    def _read_state(self) -> None:
        homes = {InputKind.PARAMETER: self.parameters, InputKind.BUFFER: self.buffers}
        for kind, target, _ in self._specs:
            if kind in STATE:
                value = self.exported.state_dict.get(target)
                value = self.exported.constants[target] if value is None else value
                # A call of the module writes its buffers in place; those of the program are its own.
                value = value.clone() if kind is InputKind.BUFFER else value
                homes.get(kind, self.constants)[target] = from_torch(value)
            elif kind is not InputKind.USER_INPUT:
                raise UnsupportedOpError(f"the model holds {target}, a {kind.name.lower()}", location=user_location())

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The model's result, in its containers; what it writes into buffers is kept.

        Inputs are tensors of Tessera or PyTorch, or arrays.

        Raises:
            ShapeError, DTypeError, ArgumentError: the export does not hold for these inputs.
            TraceError: it is traced, and writes buffers: use `apply`.
        """
        inputs = self._flatten_inputs(args, named)
        writes = any(s.kind is OutputKind.BUFFER_MUTATION for s in self.exported.graph_signature.output_specs)
        if writes and CURRENT_BUILDER.get() is not None:
            raise TraceError(
                "the model writes its buffers, which a trace cannot keep", location=user_location(),
                suggestion="use program.apply(program.parameters, program.buffers, ...), which returns them",
            )  # fmt: skip
        results, written = self._jit(self.parameters, self.buffers, inputs)
        self.buffers = written if writes else self.buffers
        return self._unflatten(results)

    def apply(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], *args: Any, **named: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The model's result and its buffers after the call, as a function of parameters and buffers.

        >>> import tessera as ts
        >>> program = import_program(torch.nn.Linear(2, 1), (torch.ones(3, 2),))
        >>> loss = lambda p: ts.sum(program.apply(p, program.buffers, ts.ones((3, 2)))[0])
        >>> ts.grad(loss)(program.parameters)["weight"]
        Tensor([[3., 3.]], f32)
        """
        results, written = self._call_flat(parameters, buffers, self._flatten_inputs(args, named))
        return self._unflatten(results), written

    def trace(self) -> TracedFunction:
        """The Graph function for inputs of the sizes of the example: of parameters, buffers and inputs."""
        types = [_example_type(spec.value) for spec in self.inputs]
        return self._jit.trace(self.parameters, self.buffers, types)

    def _flatten_inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        leaves, tree = _pytree.tree_flatten((args, self._order(named)))
        if tree != self.exported.call_spec.in_spec:
            raise ArgumentError(
                "the arguments have another structure than those of the export", location=user_location(),
                expected=str(self.exported.call_spec.in_spec), received=str(tree),
            )  # fmt: skip
        inputs, sizes = [_to_value(x) for x in leaves], dict[Any, int]()
        for spec, given in zip(self.inputs, inputs, strict=True):
            spec.check(given, sizes)
        self._check_ranges(sizes)
        return inputs

    def _order(self, named: dict[str, Any]) -> dict[str, Any]:
        """The named arguments in the order of the export."""
        spec = self.exported.call_spec.in_spec
        assert spec is not None
        listed = spec.child(1).context if spec.num_children == 2 else []
        return {**{k: named[k] for k in listed if k in named}, **named}

    def _check_ranges(self, sizes: Mapping[Any, int]) -> None:
        for symbol, limits in self.exported.range_constraints.items():
            have = sizes.get(symbol)
            if have is not None and not limits.lower <= have <= limits.upper:
                raise ShapeError(
                    f"the size {symbol} is out of the range of the export", location=user_location(),
                    expected=f"from {limits.lower} to {limits.upper}", received=str(have),
                )  # fmt: skip

    def _call_flat(self, parameters: Any, buffers: Any, inputs: Any) -> tuple[list[Any], dict[str, Any]]:
        """The results as a list, and the buffers."""
        listed = iter(inputs)
        state = {InputKind.PARAMETER: parameters, InputKind.BUFFER: buffers, InputKind.CONSTANT_TENSOR: self.constants}
        values = [next(listed) if k is InputKind.USER_INPUT else state[k][target] for k, target, _ in self._specs]
        found = self._run(*values)
        written, results = dict(buffers), []
        for spec, value in zip(self.exported.graph_signature.output_specs, found, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                written[str(spec.target)] = value
            elif not isinstance(spec.arg, ConstantArgument):
                results.append(value)
        return results, written

    def _unflatten(self, results: Sequence[Any]) -> Any:
        listed, values = iter(results), []
        for spec in self.exported.graph_signature.output_specs:
            if spec.kind is not OutputKind.BUFFER_MUTATION:
                values.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else next(listed))
        tree = self.exported.call_spec.out_spec
        assert tree is not None
        return _pytree.tree_unflatten(values, tree)

    def describe_ops(self) -> dict[str, int]:
        """How often each op of ATen occurs."""
        counts: dict[str, int] = {}
        for node in self._iterate_calls():
            counts[name_op(node.target)] = counts.get(name_op(node.target), 0) + 1
        return counts

    def _iterate_calls(self) -> Iterator[Node]:
        return (n for n in self.exported.graph.nodes if n.op == "call_function")

    def __repr__(self) -> str:
        inputs = ", ".join(f"{s.name}: {s.describe()}" for s in self.inputs if isinstance(s.value, torch.Tensor))
        ops = sum(1 for _ in self._iterate_calls())
        return f"ImportedProgram({inputs}; {len(self.parameters)} parameters, {len(self.buffers)} buffers, {ops} ops)"


def _to_value(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return from_torch(x)
    return as_tensor(x) if isinstance(x, np.ndarray) else x


def _example_type(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value.value if isinstance(value, ConstantArgument) else value
    sizes = (n if isinstance(n, int) else int(n.node.hint) for n in value.shape)
    return TensorType(tuple(sizes), find_dtype(value.dtype))
