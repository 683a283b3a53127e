"""Optimisation for deployment: passes over a model with its weights, their report, and limits that must be met."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.codegen.contract import Runtime, emit_artifact, get_capable_backend, list_backends, load_runtime
from tessera.core.device import INTERP, count_gpus, find_generator_name
from tessera.core.errors import (
    ArgumentError,
    ConstraintError,
    DeviceUnavailable,
    UnknownNameError,
    UnsupportedOpError,
    as_names,
    as_text,
    user_location,
)
from tessera.core.pytree import TreeDef
from tessera.deploy.constant_program import ConstantProgram
from tessera.deploy.passes import PassInputs, PassRecord, find_passes
from tessera.frontend.jit.tracing import Jit, jit, to_array
from tessera.ir.core import Function
from tessera.ir.tensor import Tensor
from tessera.nn.module import Module
from tessera.ops.tensor.elementwise import abs
from tessera.ops.tensor.reduce import max as reduce_max
from tessera.runtime import driver
from tessera.runtime.artifacts import describe_interface, emit_program
from tessera.runtime.bundles import Bundle, check_batch_size, count_needed_bytes, measure_latency, resize_call
from tessera.runtime.program import PreparedProgram
from tessera.runtime.storage.memory_pool import as_bytes
from tessera.transforms.flow import optimize as minimise

GRAPH = ("constant_folding", "kernel_fusion", "memory_planning")
# By destination: the generator, and the passes where none are named.
DESTINATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "server": ("llvm", GRAPH),
    "edge": ("llvm", (*GRAPH, "weight_int8")),
    "web": ("llvm", GRAPH),
    "webgpu": ("wgsl", GRAPH),
}
CHECKED_ON = "llvm"  # where accuracy and ranges are measured


# The report.


@dataclass
class OptimisationReport:
    """What each pass did, and what came of it: JSON data by `data()`, a table when it is printed.

    `figures` has weight bytes before and after, the largest memory of a variant, the accuracy loss (the relative
    distance of all results from those before, in the Euclidean norm; or the difference of `evaluate`), and what was
    measured of time.
    """

    entry: str
    target: str
    passes: list[PassRecord] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """The report as JSON data."""
        steps = [{"name": p.name, "summary": p.summary, **p.figures} for p in self.passes]
        return {"entry": self.entry, "target": self.target, "passes": steps, **self.figures}

    def __rich__(self) -> Any:
        from rich.table import Table  # seldom printed

        table = Table("pass", "what it did", title=f"{self.entry} for {self.target}", title_justify="left")
        for each in self.passes:
            table.add_row(each.name, each.summary)
        table.add_section()
        for name, value in self.figures.items():
            table.add_row(name.replace("_", " "), _format_figure(value))
        return table

    def __str__(self) -> str:
        from rich.console import Console  # seldom printed

        console = Console(width=110, force_terminal=False, color_system=None)
        with console.capture() as shown:
            console.print(self)
        return shown.get().rstrip()

    __repr__ = __str__


def _format_figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


# Limits.

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def parse_milliseconds(value: Any) -> float:
    """A duration: a number of seconds, or text such as "10ms".

    >>> parse_milliseconds("10ms"), parse_milliseconds(0.5), parse_milliseconds("250 us")
    (10.0, 500.0, 0.25)

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and math.isfinite(value):
        return value * 1e3
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ArgumentError(f"{value!r} is no duration", location=user_location(), expected='seconds, or "10ms"')
    return round(float(found[1]) * _SECONDS[found[2]] * 1e3, 9)


def _parse_share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(f"{value!r} is no loss", location=user_location(), expected="a number from 0 on")
    return float(value)


# For each limit what it means, and the figure that it limits.
CONSTRAINTS: dict[str, tuple[Callable[[Any], float], str]] = {
    "size": (as_bytes, "weight_bytes"),
    "memory": (as_bytes, "memory_bytes"),
    "latency": (parse_milliseconds, "latency_ms"),
    "accuracy_loss": (_parse_share, "accuracy_loss"),
}


def _parse_constraints(given: Any, target: str) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "constraints is no mapping", location=user_location(), expected='{"size": "10MB"}',
            received=f"{type(given).__name__} {given!r:.60}",
        )  # fmt: skip
    if "power" in given:
        raise ArgumentError(
            "power cannot be measured here", location=user_location(), expected=", ".join(CONSTRAINTS),
            suggestion="leave it out, and measure it on the device",
        )  # fmt: skip
    if unknown := [name for name in given if name not in CONSTRAINTS]:
        raise UnknownNameError(
            f"there is no constraint {unknown[0]}", location=user_location(), expected=", ".join(CONSTRAINTS)
        )
    if "latency" in given and (target == "csl" or (target == "ptx" and not count_gpus())):
        raise DeviceUnavailable(
            f"the latency of {target} cannot be measured on this machine", location=user_location(),
            suggestion="leave it out, or optimise on the machine that serves",
        )  # fmt: skip
    return {name: CONSTRAINTS[name][0](value) for name, value in given.items()}


# Programs with constants.


@dataclass(frozen=True)
class TracedModel:
    """A model traced for one call: its program with constants, the arrays of the call, and the tree of its results."""

    program: ConstantProgram
    arrays: tuple[np.ndarray, ...]
    results: TreeDef


def trace_model(entry: Jit, module: Module | None, args: tuple[Any, ...], named: Any, weights: Sequence[str]) -> Any:
    """Trace a model, in evaluation mode, with the arguments named in `weights` as constants.

    Raises:
        UnsupportedOpError: it draws random numbers.
        UnknownNameError: it has no argument of a name in `weights`.
    """
    parts = module.modules() if module is not None else []
    modes = [part.training for part in parts]
    try:
        if module is not None:
            module.eval()
        call, traced = entry.bind(args, named), entry.trace(*args, **named)
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
    if traced.random is not None:
        raise UnsupportedOpError(
            f"{entry.name} draws random numbers", location=traced.function.loc,
            expected="a model for inference, whose results its arguments decide",
            suggestion="leave out dropout, as model.eval() does",
        )  # fmt: skip
    fixed = [any(n == w or n.startswith(f"{w}.") for w in weights) for n in call.names]
    for name in weights:
        if not any(n == name or n.startswith(f"{name}.") for n in call.names):
            raise UnknownNameError(f"{entry.name} has no argument {name}", expected=", ".join(call.names[:8]))
    arrays = [to_array(leaf) for leaf in call.leaves]
    params = traced.function.params
    inputs = [i for i, f in enumerate(fixed) if not f]
    order = [*inputs, *(i for i, f in enumerate(fixed) if f), *range(len(fixed), len(params))]
    constants = [*(a for a, f in zip(arrays, fixed, strict=True) if f), *map(_copy_to_host, traced.captures)]
    function = _reorder(traced.function, order)
    program = ConstantProgram(function, tuple(constants), tuple(call.names[i] for i in inputs))
    return TracedModel(program, tuple(arrays[i] for i in inputs), traced.results)


def _copy_to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else np.asarray(array.numpy())


def _reorder(function: Function, order: Sequence[int]) -> Function:
    params = tuple(function.params[i] for i in order)
    return replace(function, body=replace(function.body, params=params))


def measure_ranges(program: ConstantProgram, calls: Iterable[Sequence[np.ndarray]]) -> dict[int, float]:
    """The largest magnitude of the operand of each product with a constant matrix, over calls of the same shapes."""
    observed = program.observe(lambda product: reduce_max(abs(product.x)))
    found: dict[int, float] = {}
    run = driver.compile_graph(observed.function, CHECKED_ON)
    for arrays in calls:
        for number, value in enumerate(run([*arrays, *observed.constants])):
            found[number] = max(found.get(number, 0.0), float(value)) if np.isfinite(value) else math.inf
    return found


def measure_loss(before: Sequence[Sequence[np.ndarray]], after: Sequence[Sequence[np.ndarray]]) -> float:
    """The relative distance of results from those before: the norm of the differences by the norm of all.

    >>> measure_loss([[np.float32([3, 4])]], [[np.float32([3, 3])]])
    0.2
    """
    wrong = whole = 0.0
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            wrong += float(np.sum(np.square(a - b), where=~((a == b) | (np.isnan(a) & np.isnan(b)))))
            whole += float(np.sum(np.square(a)))
    return math.sqrt(wrong / whole) if whole else (0.0 if not wrong else math.inf)


# Optimised models.


@dataclass(frozen=True)
class CompiledVariant:
    """One program of an optimised model: for the shapes of one call."""

    prepared: PreparedProgram
    runtime: Runtime
    results: TreeDef
    constants: tuple[np.ndarray, ...]

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results for the arrays of a call."""
        return self.runtime.run([*arrays, *self.constants])


class OptimisedModel:
    """A model after its passes, compiled for the shapes of each call: what `ts.optimize` gives.

    A call runs it; `compile` adds the program for another batch size, `report` says what the passes did, and `ts.save`
    writes all programs as a bundle.
    """

    def __init__(
        self, model: Any, target: str, passes: Sequence[Any], limits: Mapping[str, float], weights: Sequence[str]
    ) -> None:
        self._module = model if isinstance(model, Module) else None
        # a module is closed over: its tensors are constants
        self._entry: Jit = _make_entry(model)
        self.target, self.passes, self.limits = target, tuple(passes), dict(limits)
        self._weights = as_names(weights, "weights")
        self._variants: dict[str, CompiledVariant] = {}
        self._by_shapes: dict[tuple[tuple[int, ...], ...], str] = {}
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._ranges: dict[int, float] | None = None
        self._report = OptimisationReport(self._entry.name, target)

    @property
    def report(self) -> OptimisationReport:
        """What the passes did.

        Raises:
            ArgumentError: nothing has been compiled: there was no example.
        """
        if not self._variants:
            raise ArgumentError(
                "nothing has been compiled", location=user_location(),
                suggestion="give ts.optimize an example=, or call compile(*arguments) first",
            )  # fmt: skip
        return self._report

    def compile(self, *args: Any, batch_size: int | None = None, **named: Any) -> OptimisedModel:
        """Compile for the shapes of these arguments, or of the example; with `batch_size` for another first axis.

        Raises:
            ArgumentError: there is no example. ConstraintError: a limit is not met.
        """
        if not args and not named:
            if self._example is None:
                raise ArgumentError(
                    f"{self._entry.name} has no example", location=user_location(),
                    suggestion="give ts.optimize an example=, or compile the arguments of a call",
                )  # fmt: skip
            args, named = self._example
        if batch_size is not None:
            call = self._entry.signature.bind(*args, **named)
            call.arguments.update(resize_call(call.arguments, check_batch_size(batch_size), self._weights))
            args, named = call.args, call.kwargs
        self._compile(args, named, f"b{batch_size}" if batch_size is not None else "")
        return self

    def __call__(self, *args: Any, **named: Any) -> Any:
        arrays = [to_array(leaf) for leaf in self._list_inputs(args, named)]
        shapes = tuple(a.shape for a in arrays)
        name = self._by_shapes.get(shapes) or self._compile(args, named, "")
        variant = self._variants[name]
        found = variant.run(arrays)
        return variant.results.build(iter([Tensor(a) for a in found]))

    def prepare_program(self, target: str) -> PreparedProgram:
        """The program that was compiled first, lowered for a target.

        Raises:
            ArgumentError: nothing has been compiled.
        """
        self.report  # noqa: B018 - it says so
        first = next(iter(self._variants.values())).prepared
        levels = first.levels if target == self.target else driver.lower(first.levels["graph"].main, target)
        return replace(first, levels=levels)

    def find_stored_parameters(self) -> list[int]:
        """The places of the weights among the arrays of the program that was compiled first."""
        first = next(iter(self._variants.values()))
        count = len(first.prepared.arrays)
        return [*range(count - len(first.constants), count)]

    def __bundle__(self) -> Bundle:
        self.report  # noqa: B018 - nothing can be saved before something is compiled
        measured = {n: dict(v) for n, v in self._report.figures.get("measured", {}).items()}
        artifacts = {n: emit_program(v.prepared, self.target) for n, v in self._variants.items()}
        return Bundle(self._entry.name, artifacts, measured)

    def __repr__(self) -> str:
        names = ", ".join(p.name for p in self.passes)
        made = ", ".join(self._variants) or "not compiled"
        return f"<{self._entry.name} for {self.target}, {names or 'no passes'}: {made}>"

    def _list_inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        call = self._entry.bind(args, named)
        kept = [not any(n == w or n.startswith(f"{w}.") for w in self._weights) for n in call.names]
        return [leaf for leaf, k in zip(call.leaves, kept, strict=True) if k]

    def _trace(self, args: tuple[Any, ...], named: dict[str, Any]) -> TracedModel:
        found: TracedModel = trace_model(self._entry, self._module, args, named, self._weights)
        return found

    def calibrate(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Measure the ranges of activations on calls of the model."""
        found: dict[int, float] = {}
        for args, named in calls:
            traced = self._trace(args, named)
            for number, value in measure_ranges(self._prepare(traced.program), [traced.arrays]).items():
                found[number] = max(found.get(number, 0.0), value)
        self._ranges = found

    def _prepare(self, program: ConstantProgram) -> ConstantProgram:
        """The program before quantisation: folded and pruned."""
        for each in self.passes:
            if each.order < 2:
                program = each.apply(program, PassInputs(), PassRecord(each.name))
        return program

    def _compile(self, args: tuple[Any, ...], named: dict[str, Any], label: str) -> str:
        """Compile the program for a call's shapes, and return its name; nothing where it is there."""
        traced = self._trace(args, named)
        shapes = tuple(a.shape for a in traced.arrays)
        if shapes in self._by_shapes:
            return self._by_shapes[shapes]
        records = [PassRecord(p.name) for p in self.passes]
        program, inputs = traced.program, PassInputs(self._ranges)
        for each, record in zip(self.passes, records, strict=True):
            if hasattr(each, "apply"):
                program = each.apply(program, inputs, record)
        levels = driver.lower(program.function, self.target)
        for each, record in zip(self.passes, records, strict=True):
            if hasattr(each, "describe"):
                each.describe(levels, record)
        names = tuple(p.hint for p in program.function.params)
        prepared = PreparedProgram(self._entry.name, levels, names, (*traced.arrays, *program.constants))
        generator = get_capable_backend(self.target, "runtime")
        artifact = emit_artifact(generator, levels["tile"], {})
        variant = CompiledVariant(prepared, load_runtime(generator, artifact), traced.results, program.constants)
        interface = describe_interface(prepared, range(len(traced.arrays), len(prepared.arrays)))
        described = replace(artifact, manifest={**artifact.manifest, "interface": interface})
        name = self._name_variant(label)
        figures = {
            "weight_bytes_before": traced.program.constant_bytes,
            "weight_bytes": program.constant_bytes,
            "memory_bytes": max(count_needed_bytes(described), self._report.figures.get("memory_bytes", 0)),
        }
        if "latency" in self.limits:
            measured = measure_latency(variant, traced.arrays)
            self._report.figures.setdefault("measured", {})[name] = measured
            figures["latency_ms"] = max(measured["median_ms"], self._report.figures.get("latency_ms", 0.0))
        if not self._variants:
            self._report.passes = records
            self._example = args, named
        self._check({**self._report.figures, **figures})
        self._report.figures.update(figures)
        self._variants[name], self._by_shapes[shapes] = variant, name
        return name

    def _name_variant(self, label: str) -> str:
        base = "-".join(filter(None, (self.target.replace(":", "-"), label)))
        taken = [n for n in self._variants if n == base or n.startswith(f"{base}.")]
        return f"{base}.{len(taken) + 1}" if taken else base

    def measure_accuracy(
        self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], evaluate: Callable[[Any], float] | None
    ) -> None:
        """Compare the results with those before the passes, on calls or by `evaluate(model)`; more is better.

        Raises:
            ConstraintError: the loss is above its limit.
        """
        if evaluate is not None:
            before, after = (float(evaluate(f)) for f in (self._run_before, self))
            found = {"accuracy_before": before, "accuracy": after, "accuracy_loss": before - after}
        else:
            pairs = [self._run_both(args, named) for args, named in calls]
            found = {"accuracy_loss": measure_loss([a for a, _ in pairs], [b for _, b in pairs])}
        self._report.figures.update(found)
        self._check(self._report.figures)

    def _run_both(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        traced = self._trace(args, named)
        before = driver.compile_graph(traced.program.function, CHECKED_ON)
        name = self._compile(args, named, "")
        arrays = [np.asarray(a) for a in traced.arrays]
        return before([*arrays, *traced.program.constants]), self._variants[name].run(arrays)

    def _run_before(self, *args: Any, **named: Any) -> Any:
        traced = self._trace(args, named)
        run = driver.compile_graph(traced.program.function, CHECKED_ON)
        return traced.results.build(iter([Tensor(a) for a in run([*traced.arrays, *traced.program.constants])]))

    def _check(self, figures: Mapping[str, Any]) -> None:
        for name, limit in self.limits.items():
            reached = figures.get(CONSTRAINTS[name][1])
            if reached is not None and not reached <= limit:
                unit = {"size": " bytes", "memory": " bytes", "latency": " ms"}.get(name, "")
                raise ConstraintError(
                    f"{self._entry.name} does not meet the limit of {name}", location=user_location(),
                    expected=f"at most {_format_figure(limit)}{unit}", received=f"{_format_figure(reached)}{unit}",
                    suggestion="choose stronger optimizations, or a higher limit",
                )  # fmt: skip


def _make_entry(model: Any) -> Jit:
    if isinstance(model, Jit):
        return model
    if isinstance(model, Module):
        forward = jit(lambda *args, **named: model(*args, **named))
        forward.signature = _read_signature(model)
        forward.name = type(model).__name__
        return forward
    if not callable(model):
        raise ArgumentError(
            f"{type(model).__name__} is no model", location=user_location(),
            expected="a ts.nn.Module, or a function of tensors",
        )  # fmt: skip
    return jit(model)  # type: ignore[no-any-return]


def _read_signature(model: Module) -> Any:
    import inspect

    return inspect.signature(model.forward)


def _read_calls(data: Any, what: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of a model: each a tuple of arguments, a dict by name, or its only argument."""
    if data is None:
        return []
    if hasattr(data, "shape") or not isinstance(data, Iterable):
        raise ArgumentError(
            f"{what} is no list of calls", location=user_location(), expected="[(x,), ...] or [x, ...]",
            received=type(data).__name__,
        )  # fmt: skip
    return [_read_call(each) for each in data]


def _read_call(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(data, Mapping):
        return (), dict(data)
    return (tuple(data), {}) if isinstance(data, (tuple, list)) else ((data,), {})


def optimize(
    model: Any,
    init: Any = None,
    steps: int = 100,
    *,
    target: str | None = None,
    optimizations: Sequence[Any] | None = None,
    constraints: Mapping[str, Any] | None = None,
    example: Any = None,
    calibration: Any = None,
    evaluate: Callable[[Any], float] | None = None,
    weights: Sequence[str] = (),
    generator: str | None = None,
) -> Any:
    """Optimise a model for deployment on a `target`; without one, the minimum of a function near `init`.

    With `target` ("server", "edge", "web", or a generator's name), `model` is a `ts.nn.Module` or a function; those of
    its arguments that are named in `weights` are constants, as are tensors that it closes over. `optimizations` are
    names or passes of `ts.deploy`; by default those of the target. `example` is a call, as a tuple of arguments:
    with one the model is compiled at once; `calibration` is a list of calls, on which activations and accuracy are
    measured. `evaluate(model)` is a number that measures accuracy, in place of the distance of results. `generator`
    replaces the target's. Each of `constraints` (`size`, `memory`, `latency`, `accuracy_loss`) is a limit.

    Without `target`: the y near `init` that minimises model(y), a smooth scalar function (Newton's method).

    >>> import tessera as ts
    >>> small = optimize(ts.nn.Linear(64, 8), target="edge", example=(ts.ones((1, 64)),))
    >>> small(ts.ones((1, 64))).shape, small.report.figures["weight_bytes"]
    ((1, 8), 576)
    >>> optimize(lambda y: (y - 3.0) ** 2, init=ts.Tensor(0.0))
    Tensor(3., f32)

    Raises:
        ConstraintError: a limit is not met; the error has the figure reached.
        UnknownNameError: a name of a target, a pass or a constraint is none.
    """
    if target is None:
        return minimise(model, init, steps)
    name = _find_target(target, generator)
    if evaluate is not None and not callable(evaluate):
        raise ArgumentError("evaluate is no function of a model", location=user_location(),
                            received=type(evaluate).__name__)  # fmt: skip
    calls = _read_calls(calibration, "calibration")
    named = optimizations if optimizations is not None else DESTINATIONS.get(target, ("", GRAPH))[1]
    passes = find_passes(named, bool(calls))
    limits = _parse_constraints({} if constraints is None else constraints, name)
    made = OptimisedModel(model, name, passes, limits, weights)
    first = _read_call(example) if example is not None else calls[0] if calls else None
    if first is None:
        if limits or evaluate is not None or any(getattr(p, "calibrated", False) for p in passes):
            raise ArgumentError(
                "limits, accuracy and ranges are measured on a call", location=user_location(),
                expected="example=(x,) or calibration=[(x,), ...]",
            )  # fmt: skip
        return made
    if any(getattr(p, "calibrated", False) for p in passes):
        made.calibrate(calls or [first])
    made.compile(*first[0], **first[1])
    made.measure_accuracy(calls or [first], evaluate)
    return made


def _find_target(target: str, generator: str | None) -> str:
    """The generator for a destination.

    Raises:
        UnknownNameError, DeviceUnavailable: there is none.
    """
    target = as_text(target, "the target")
    if generator is not None:
        name = find_generator_name(generator)
    elif target in DESTINATIONS:
        name = DESTINATIONS[target][0]
    else:
        name = find_generator_name(target)
    if name == INTERP or name.partition(":")[0] not in list_backends():
        raise UnknownNameError(
            f'"{target}" is no target that is installed', location=user_location(),
            expected=", ".join([*DESTINATIONS, *sorted(list_backends())]),
        )  # fmt: skip
    return name
