"""Custom ops of PyTorch (torch.library): a Tessera function or kernel as an op, with shapes and gradients."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.core.symbolic_dim import Dim
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import Jit, TracedFunction, locate_definition, read_annotations
from tessera.frontend.kernel import Kernel
from tessera.frontend.kernel.graph_launch import launch, like
from tessera.ir.tensor import Tensor
from tessera.torch.aten import ATEN
from tessera.torch.interop import ProgramOptions, choose_target, compile_for_tensors
from tessera.torch.tensors import find_dtype, find_torch_dtype
from tessera.transforms.autodiff import vjp

MAX_PROGRAMS = 64  # programs that an op keeps, one for each combination of types and numbers
NUMBER_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}


class TensorFunction:
    """A function of tensors and static numbers: what its op's schema says, and its programs by argument types."""

    def __init__(self, function: Callable[..., Any], results: int | None, target: str | None) -> None:
        self.function = function.function if isinstance(function, Jit) else function
        self.target = target or (function.target if isinstance(function, Jit) else None)
        self.parameters = list(inspect.signature(self.function).parameters.values())
        self._check_parameters()
        annotations = read_annotations(self.function)
        self.numbers = {p.name: kind for p in self.parameters if (kind := _find_number_type(p, annotations))}
        self.results = _count_results(annotations.get("return")) if results is None else results
        self.traceable = Jit(self.function, static_argnames=tuple(self.numbers))
        # Of a kernel: for each result the argument that has its shape and type.
        self.likes: tuple[str, ...] | None = getattr(function, "likes", None)
        self._programs: OrderedDict[Any, Any] = OrderedDict()

    def _check_parameters(self) -> None:
        for p in self.parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise ArgumentError(
                    f"{self.function.__name__} takes {p}: an op of PyTorch has a fixed list of arguments",
                    location=locate_definition(self.function), expected="parameters with names",
                    suggestion="wrap it in a function that names each tensor and number",
                )  # fmt: skip

    def schema(self) -> str:
        """The op's schema in PyTorch's notation.

        >>> def scale(x, factor: float = 2.0): return x * factor
        >>> TensorFunction(scale, None, None).schema()
        '(Tensor x, float factor=2.0) -> Tensor'
        """
        return f"({', '.join(self._list_arguments())}) -> " + _format_results(self.results)

    def backward_schema(self) -> str:
        """The schema of the op that computes the gradients of the tensors in `wanted`."""
        own = ", ".join(a for a in self._list_arguments(defaults=False) if a != "*")
        return f"(Tensor[] gradients, bool[] wanted, {own}) -> Tensor[]"

    def _list_arguments(self, defaults: bool = True) -> Iterator[str]:
        starred = False
        for p in self.parameters:
            if p.kind is p.KEYWORD_ONLY and not starred:
                starred = True
                yield "*"
            kind = self.numbers.get(p.name)
            has_default = defaults and kind is not None and p.default is not p.empty
            yield f"{NUMBER_TYPES[kind] if kind else 'Tensor'} {p.name}" + (
                f"={_format_default(kind, p.default)}" if has_default else ""
            )

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in the order of the parameters."""
        names = [p.name for p in self.parameters]
        given = {**dict(zip(names, args, strict=False)), **named}
        return {p.name: given.get(p.name, p.default) for p in self.parameters}

    def tensors(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors among the arguments."""
        return {name: value for name, value in given.items() if name not in self.numbers}

    def apply(self, given: Mapping[str, Any]) -> Any:
        """The function on Tessera values."""
        return self.function(**given)

    def apply_backward(self, gradients: Sequence[Tensor], wanted: Sequence[bool], *args: Any) -> list[Tensor]:
        """The gradients of the wanted tensors on Tessera values, from those of the float results."""
        given = self.bind(args, {})
        tensors = self.tensors(given)
        names = [n for n, w in zip(tensors, wanted, strict=True) if w]

        def of_wanted(*chosen: Tensor) -> Any:
            out = self.function(**{**given, **dict(zip(names, chosen, strict=True))})
            floats = [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if o.dtype.is_float]
            return floats[0] if len(floats) == 1 else tuple(floats)

        _, pull = vjp(of_wanted, *(tensors[n] for n in names))
        return list(pull(gradients[0] if len(gradients) == 1 else tuple(gradients)))

    def run(self, *args: Any, **named: Any) -> Any:
        """The op on tensors: compiled for their types and device on first use."""
        given = self.bind(args, named)
        tensors = self.tensors(given)
        program = self._find_program("forward", given, lambda types: self._trace(given, types))
        out = program(list(tensors.values()))
        return out[0] if self.results == 1 else tuple(out)

    def run_backward(self, gradients: Sequence[torch.Tensor], wanted: Sequence[bool], *args: Any) -> list[torch.Tensor]:
        """The gradients of the wanted tensors, from those of the float results."""
        given = self.bind(args, {})
        names = [n for n, w in zip(self.tensors(given), wanted, strict=True) if w]
        extra = {f"gradient {i}": g for i, g in enumerate(gradients)}
        program = self._find_program(
            ("backward", *names), given | extra, lambda types: self._trace_backward(given, types, names)
        )
        return program([*self.tensors(given).values(), *gradients])

    def _find_program(self, kind: Any, given: Mapping[str, Any], trace: Callable[..., TracedFunction]) -> Any:
        tensors = self.tensors(given)
        shapes = tuple((t.shape, t.dtype, t.device) for t in tensors.values())
        key = (kind, shapes, tuple((type(given[n]), given[n]) for n in self.numbers))
        found = self._programs.get(key)
        if found is None:
            types = {n: TensorType(tuple(t.shape), find_dtype(t.dtype)) for n, t in tensors.items()}
            options = ProgramOptions(choose_target(tensors.values(), self.target))
            found = self._programs[key] = compile_for_tensors(trace(types), options)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return found

    def _trace(self, given: Mapping[str, Any], types: Mapping[str, TensorType]) -> TracedFunction:
        by_position = [p.name for p in self.parameters if p.kind is not p.KEYWORD_ONLY]
        values = {**given, **types}
        positional = [values.pop(n) for n in by_position]
        found = self.traceable.trace(*positional, **values)
        if len(found.function.results) != self.results:
            raise ArgumentError(
                f"{self.function.__name__} returns {len(found.function.results)} tensors",
                location=locate_definition(self.function), expected=f"{self.results}, as its op says",
                suggestion=f"write op(..., results={len(found.function.results)})",
            )  # fmt: skip
        return found

    def _trace_backward(
        self, given: Mapping[str, Any], types: Mapping[str, TensorType], names: Sequence[str]
    ) -> TracedFunction:
        own = [n for n in types if n in given]
        wanted = [n in names for n in own]

        def gradients(*values: Tensor) -> list[Tensor]:
            named = {**given, **dict(zip(own, values, strict=False))}
            return self.apply_backward(values[len(own) :], wanted, *named.values())

        gradients.__name__ = f"{getattr(self.traceable, '__name__', 'function')}_backward"
        return Jit(gradients).trace(*types.values())

    def infer(self, *args: Any, **named: Any) -> Any:
        """New tensors of the results' types, for PyTorch's fake tensors: sizes may be symbolic."""
        given = self.bind(args, named)
        tensors = self.tensors(given)
        if self.likes is not None:
            out = [tensors[n].new_empty(tensors[n].shape) for n in self.likes]
            return out[0] if self.results == 1 else tuple(out)
        try:
            sizes: dict[str, Any] = {}
            types = {n: _name_sizes(t, sizes) for n, t in tensors.items()}
            shapes = [(r.type.evaluate(sizes).shape, r.type.dtype) for r in self._trace(given, types).function.results]
        except TesseraError:  # the grid of a kernel, for one, needs numbers: the program is of these sizes alone
            types = {n: _name_sizes(t, None) for n, t in tensors.items()}
            shapes = [(r.type.shape, r.type.dtype) for r in self._trace(given, types).function.results]
        first = next(iter(tensors.values()))
        out = [first.new_empty(tuple(s), dtype=find_torch_dtype(d)) for s, d in shapes]  # type: ignore[arg-type]
        return out[0] if self.results == 1 else tuple(out)


def _find_number_type(parameter: inspect.Parameter, annotations: Mapping[str, Any]) -> type | None:
    """The type of a parameter that is a number or a string; None for a tensor."""
    annotation = annotations.get(parameter.name)
    if annotation in NUMBER_TYPES:
        return annotation
    kind = type(parameter.default)
    return kind if annotation is None and kind in NUMBER_TYPES else None


def _format_default(kind: Any, value: Any) -> str:
    if kind is str:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(kind(value))


def _count_results(annotation: Any) -> int:
    return len(typing.get_args(annotation)) if typing.get_origin(annotation) is tuple else 1


def _format_results(count: int) -> str:
    return "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"


def _name_sizes(tensor: torch.Tensor, sizes: dict[str, Any] | None) -> TensorType:
    """The type of a fake tensor; `sizes` receives a name for each symbolic size. Without it, sizes become numbers."""
    shape: list[Any] = []
    for n in tensor.shape:
        if sizes is None or isinstance(n, int):
            shape.append(int(n))
            continue
        name = "s_" + re.sub(r"\W", "_", str(n))
        sizes[name] = n
        shape.append(Dim.of(name))
    return TensorType(tuple(shape), find_dtype(tensor.dtype))


# Registration.


def op(
    function: Any = None,
    name: str | None = None,
    *,
    grid: Any = None,
    out: str | Mapping[str, str] | None = None,
    results: int | None = None,
    target: str | None = None,
) -> Any:
    """Register a Tessera function or kernel as a custom op of PyTorch; returns the op (torch.library.CustomOpDef).

    The op takes and returns PyTorch tensors, on the processor or a GPU, without copies. It works in eager PyTorch,
    under autograd, in `torch.compile` with any backend and in `torch.export`. Parameters with an annotation or a
    default of bool, int, float or str are numbers, for each value of which the function is compiled; all others are
    tensors. Gradients are those of `ts.vjp`, so a rule of `ts.custom_vjp` holds in PyTorch too.

    Args:
        function: a function of tensors (with or without `@ts.jit`), or a kernel.
        name: "namespace::name"; by default the function's own name in the namespace "tessera".
        grid: of a kernel: its grid, or a function of its constants and sizes.
        out: of a kernel: the memory that it writes, by name, with the argument of the same shape and type (or only the
            name, where the first tensor has its type). The op makes it and returns it.
        results: how many tensors the function returns; by default what its return annotation says, else one.
        target: "llvm", "ptx" or "interp"; by default that of the tensors' device.

    Raises:
        ArgumentError: the function takes `*args`, returns another number of tensors, or is a kernel without `out`.

    >>> double = op(lambda x: x * 2.0, name="docs::double")
    >>> x = torch.ones(3, requires_grad=True)
    >>> double(x).sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
    if function is None:
        return functools.partial(op, name=name, grid=grid, out=out, results=results, target=target)
    if isinstance(function, Kernel):
        function, results = _make_functional(function, grid, out)
    known = TensorFunction(function, results, target)
    qualified = name or f"tessera::{known.function.__name__}"
    _check_name(qualified)
    made = torch.library.custom_op(qualified, known.run, mutates_args=(), schema=known.schema())
    made.register_fake(known.infer)
    backward = torch.library.custom_op(
        f"{qualified}_backward", known.run_backward, mutates_args=(), schema=known.backward_schema()
    )
    backward.register_fake(lambda gradients, wanted, *args: _infer_gradients(known, wanted, args))
    _enter_rows(qualified, known)
    made.register_autograd(
        functools.partial(_pull_back, known, backward), setup_context=functools.partial(_save, known)
    )
    return made


def _enter_rows(name: str, known: TensorFunction) -> None:
    """Enter the op and its backward op in the table: the backend of torch.compile takes them into its programs."""
    path = name.replace("::", ".")
    ATEN[f"{path}.default"] = lambda *args: known.apply(known.bind(args, {}))
    ATEN[f"{path}_backward.default"] = known.apply_backward


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise ArgumentError(
            f"{name} is not the name of an op", location=user_location(), expected="namespace::name",
            suggestion='write name="mylib::function"',
        )  # fmt: skip


def _make_functional(kernel: Kernel, grid: Any, out: Any) -> tuple[Callable[..., Any], int]:
    """A kernel as a function that returns the memories it writes, and their number."""
    parameters = list(kernel.parameters.signature.parameters.values())
    names = [p.name for p in parameters]
    written = out if isinstance(out, Mapping) else dict.fromkeys([out] if out else (), names[0])
    unknown = [n for n in (*written, *written.values()) if n not in names]
    if not written or unknown:
        raise ArgumentError(
            f"the memory that {kernel.kernel_function.__name__} writes is not named" if not unknown else
            f"{kernel.kernel_function.__name__} has no parameter {unknown[0]}",
            location=locate_definition(kernel.kernel_function), expected=", ".join(names),
            suggestion='write op(kernel, grid=..., out={"out": "x"}): `out` is new memory of the type of `x`',
        )  # fmt: skip

    def run(*args: Any, **named: Any) -> Any:
        given = dict(zip([p.name for p in kept], args, strict=False)) | named
        given |= {o: like(given[x]) for o, x in written.items()}
        return launch(kernel, grid, **given)

    kept = [p for p in parameters if p.name not in written]
    run.__name__ = kernel.kernel_function.__name__
    run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in kept if p.annotation in NUMBER_TYPES}
    run.likes = tuple(written.values())  # type: ignore[attr-defined]
    return run, len(written)


def _save(known: TensorFunction, ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    """Keep what the gradients need (torch.library's setup_context)."""
    given = known.bind(inputs, keyword_only_inputs or {})
    ctx.save_for_backward(*known.tensors(given).values())
    ctx.numbers = {n: given[n] for n in known.numbers}
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.floats = [o.dtype.is_floating_point for o in outputs]


def _pull_back(known: TensorFunction, backward: Any, ctx: Any, *gradients: Any) -> Any:
    """The gradients of an op's arguments; None for those that need none."""
    names = [p.name for p in known.parameters if p.name not in known.numbers]
    tensors = dict(zip(names, ctx.saved_tensors, strict=True))
    positional = [p for p in known.parameters if p.kind is not p.KEYWORD_ONLY]
    needs = dict(zip([p.name for p in positional], ctx.needs_input_grad, strict=False))
    wanted = [bool(needs.get(n)) and t.dtype.is_floating_point for n, t in tensors.items()]
    found: Iterator[Any] = iter(())
    if any(wanted) and any(ctx.floats):
        floats = [g for g, is_float in zip(gradients, ctx.floats, strict=True) if is_float]
        given = {**ctx.numbers, **tensors}
        found = iter(backward(floats, wanted, *(given[p.name] for p in known.parameters)))
    by_name = {n: next(found, None) if w else None for n, w in zip(names, wanted, strict=True)}
    return tuple(by_name.get(p.name) for p in positional)


def _infer_gradients(known: TensorFunction, wanted: Sequence[bool], args: Sequence[Any]) -> list[torch.Tensor]:
    """New tensors of the gradients' types: those of the tensors themselves."""
    tensors = known.tensors(known.bind(args, {})).values()
    return [t.new_empty(t.shape) for t, w in zip(tensors, wanted, strict=True) if w]
