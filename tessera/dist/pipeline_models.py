"""`ts.pipeline`: a class decorator for models whose parts are the stages of a pipeline.

`forward` hands the activation from part to part; `part.on(device)` says which device runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import flatten
from tessera.dist.mesh import Mesh
from tessera.dist.pipeline import SCHEDULES, Pipeline, list_actions
from tessera.dist.ranks import CURRENT_RANK
from tessera.dist.spmd import RANKS, Spmd
from tessera.ir.tensor import Tensor
from tessera.nn.module import Module

AXIS = "stages"


class PipelineDecorator:
    """`@ts.pipeline(stages=2, devices=["gpu:0", "gpu:1"])` for a module, `@ts.pipeline.schedule("1f1b")` for `forward`.

    A call of the model computes `forward`. `model.value_and_grad(x, targets, loss)` gives the mean loss of the batch
    and its gradients, a model like this one, as `ts.value_and_grad` does; the stages run on the ranks of a mesh of the
    devices, and micro-batches pass through them in the order of the schedule.

    >>> import tessera as ts
    >>> @ts.pipeline(stages=2, devices=["gpu:0", "gpu:1"], microbatches=2)
    ... class Model(ts.nn.Module):
    ...     def __init__(self):
    ...         self.first = ts.nn.Linear(3, 4).on("gpu:0")
    ...         self.second = ts.nn.Linear(4, 1).on("gpu:1")
    ...     @ts.pipeline.schedule("1f1b")
    ...     def forward(self, x):
    ...         return self.second(self.first(x))
    >>> def loss(y, targets):
    ...     return ((y - targets) * (y - targets)).mean()
    >>> value, grads = Model().value_and_grad(ts.ones((4, 3)), ts.zeros((4, 1)), loss)
    >>> value.shape, grads.first.weight.shape
    ((), (4, 3))
    """

    def __call__(
        self, stages: int, devices: Sequence[Any] | None = None, microbatches: int = 4, mesh: Mesh | None = None
    ) -> Callable[[type], type]:
        """A class decorator.

        Raises:
            ArgumentError: the devices are not one for each stage, or the class is no module.
        """
        count = stages if devices is None else len(devices)
        if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1 or count != stages:
            raise ArgumentError(
                "a pipeline has a device for each stage", location=user_location(), expected=f"{stages} devices",
                received=str(count),
            )  # fmt: skip
        names = list(range(stages)) if devices is None else list(devices)

        def decorate(cls: type) -> type:
            if not isinstance(cls, type) or not issubclass(cls, Module):
                raise ArgumentError(
                    "ts.pipeline decorates a module", location=user_location(), received=repr(cls),
                    expected="a class derived from ts.nn.Module",
                )  # fmt: skip

            def value_and_grad(self: Any, x: Any, targets: Any, loss: Callable[..., Any]) -> tuple[Tensor, Any]:
                where = mesh or Mesh(names, AXIS)
                return _differentiate_model(self, loss, x, targets, microbatches, names, where)

            value_and_grad.__doc__ = _DOC
            cls.value_and_grad = value_and_grad  # type: ignore[attr-defined]
            return cls

        return decorate

    def schedule(self, name: str) -> Callable[[FunctionType], FunctionType]:
        """A decorator for `forward`: the order in which micro-batches pass ("gpipe", "1f1b", "interleaved").

        Raises:
            ArgumentError: there is no such schedule.
        """
        list_actions(name if name in SCHEDULES else str(name), 0, 1, 1)

        def decorate(function: FunctionType) -> FunctionType:
            function.schedule = name  # type: ignore[attr-defined]
            return function

        return decorate


_DOC = """The mean loss over the batch, `loss(activation, targets)` of each micro-batch, and its gradients as a model.

        Raises:
            ArgumentError: forward does more than to hand the activation from part to part, the parts do not fit the
                devices, or the caller is a rank.
            ShapeError: the batch has no equal micro-batches.
        """
pipeline = PipelineDecorator()


def _differentiate_model(
    model: Any, loss: Callable[..., Any], x: Any, targets: Any, microbatches: int, devices: list[Any], mesh: Mesh
) -> tuple[Tensor, Any]:
    if CURRENT_RANK.get() is not None:
        raise ArgumentError(
            "a pipeline model starts the ranks of its stages, and this code is one already", location=user_location(),
            suggestion="ts.dist.Pipeline runs inside of ranks",
        )  # fmt: skip
    stages = find_stages(model, devices)
    schedule = getattr(type(model).forward, "schedule", "1f1b")
    run = Pipeline([_run_parts] * len(stages), loss, microbatches, schedule)

    def program() -> Any:
        own = run.own_stages()
        value, grads = run.value_and_grad([[part for _, part in stages[i]] for i in own], x, targets)
        return value, dict(zip(own, grads, strict=True))

    by_rank = Spmd(program, mesh, out_specs=RANKS)()
    found: dict[str, Any] = {}
    for _, grads in by_rank:
        for number, parts in grads.items():
            for (name, _), grad in zip(stages[number], parts, strict=True):
                found.update({f"{name}.{path}": leaf for path, leaf in flatten(grad, empty=True)[0]})
    leaves, tree = flatten(model, empty=True)
    return by_rank[0][0], tree.build(iter([found[path] for path, _ in leaves]))


def _run_parts(parts: list[Any], x: Any) -> Any:
    for part in parts:
        x = part(x)
    return x


class _Activation:
    """Stands for an activation while `forward` is probed."""


class _Probe:
    """Stands for a model while its `forward` is asked for the order of its parts."""

    def __init__(self, model: Any) -> None:
        self.model, self.order, self.last = model, [], _Activation()  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.model, name)
        if not isinstance(found, Module):
            return found

        def call(x: Any) -> _Activation:
            if x is not self.last or name in self.order:
                raise _not_a_chain(self.model, f"{name} does not take the activation of the part before it")
            self.order.append(name)
            self.last = _Activation()
            return self.last

        return call


def _not_a_chain(model: Any, what: str) -> ArgumentError:
    return ArgumentError(
        f"the forward of {type(model).__name__} is no pipeline: {what}", location=user_location(),
        expected="x = self.first(x); x = self.second(x); ...; return x",
        suggestion="put what lies between two stages into one of them",
    )  # fmt: skip


def find_stages(model: Any, devices: Sequence[Any]) -> list[list[tuple[str, Any]]]:
    """The named parts of each stage, in the order in which `forward` calls them; neighbours on a device are one stage.

    Raises:
        ArgumentError: forward is no chain of parts, a parameter is in none, or the parts do not fit the devices.
    """
    probe = _Probe(model)
    try:
        result = type(model).forward(probe, probe.last)
    except (TypeError, AttributeError) as error:
        raise _not_a_chain(model, str(error)) from None
    if result is not probe.last or not probe.order:
        raise _not_a_chain(model, "it does not return the activation of the last part")
    outside = [n for n, _ in flatten(model, empty=True)[0] if n.partition(".")[0] not in probe.order]
    if outside:
        raise _not_a_chain(model, f"{outside[0]} is in no stage")
    parts = [(name, getattr(model, name)) for name in probe.order]
    if all(getattr(part, "placement", None) is None for _, part in parts):
        stages = list(_cut_evenly(parts, len(devices)))
    else:
        placed = itertools.groupby(parts, key=lambda pair: getattr(pair[1], "placement", None))
        stages = [list(group) for _, group in placed]
        _check_placements(model, stages, devices)
    return stages


def _cut_evenly(parts: list[tuple[str, Any]], count: int) -> Iterator[list[tuple[str, Any]]]:
    if len(parts) % count:
        raise ArgumentError(
            f"{len(parts)} parts have no {count} equal stages", location=user_location(),
            suggestion='self.part = Part().on("gpu:0")',
        )  # fmt: skip
    each = len(parts) // count
    return (parts[i : i + each] for i in range(0, len(parts), each))


def _check_placements(model: Any, stages: list[list[tuple[str, Any]]], devices: Sequence[Any]) -> None:
    for number, stage in enumerate(stages):
        name, part = stage[0]
        wanted = devices[number % len(devices)]
        if part.placement != wanted:
            raise ArgumentError(
                f"stage {number} of {type(model).__name__} begins with {name}, on {part.placement!r}",
                location=user_location(), expected=f"it on {wanted!r}: stage i runs on device i modulo their number",
            )  # fmt: skip
    if len(stages) % len(devices):
        raise ArgumentError(
            f"{type(model).__name__} has {len(stages)} stages", location=user_location(),
            expected=f"a multiple of {len(devices)}, the devices",
        )  # fmt: skip
