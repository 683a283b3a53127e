"""Training over ranks: gradients of shared parameters, data parallelism, and ZeRO (Rajbhandari et al. 2020)."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import TreeDef, flatten
from tessera.core.types import DType
from tessera.dist.collectives import all_gather, all_reduce, reduce_scatter, shard
from tessera.dist.mesh import Mesh
from tessera.dist.ranks import CURRENT_RANK, current_axes
from tessera.dist.sharding import P
from tessera.dist.spmd import Spmd, spmd, sum_shared
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.rearrange import pad
from tessera.ops.tensor.shape import reshape
from tessera.optim.optimizer import Optimizer
from tessera.transforms.recording import normalise_argnums

DATA = "data"


def reduce_gradients(grads: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """The gradient of a loss that all ranks return, from what `ts.grad` gives in each rank.

    `specs` are the shardings of the parameters: one for all, or a container like `grads` (None: every rank has the
    whole parameter). Gradients are summed over the ranks that have the same part of a parameter, and divided by the
    number of ranks, since `ts.grad` in a rank counts the result of each rank.

    Raises:
        ArgumentError: the specs do not fit, or the caller is not a rank.
    """
    return sum_shared(grads, specs, mesh or current_axes(None, None, "reduce_gradients").mesh)


# Data parallelism.


class DataParallel:
    """A function of a batch that ranks run on equal parts of it: see `data_parallel`."""

    def __init__(
        self, function: Callable[..., Any], mesh: Mesh, batch_argnums: Sequence[int] | None, jit: bool = False,
        target: str | None = None,
    ) -> None:  # fmt: skip
        check_function(function, "data_parallel")
        functools.update_wrapper(self, function)
        self.function, self.mesh, self.batch_argnums = function, mesh, batch_argnums
        self.jit, self.target = jit, target
        self._programs: dict[int, Spmd] = {}  # by the number of arguments: each is compiled once

    def _make(self, args: Sequence[Any]) -> Spmd:
        if len(args) in self._programs:
            return self._programs[len(args)]
        count = len(args)
        cut = range(count) if self.batch_argnums is None else normalise_argnums(self.batch_argnums, count)
        specs = [P(self.mesh.axis_names) if i in cut else None for i in range(len(args))]
        made = Spmd(self._run, self.mesh, specs, jit=self.jit, target=self.target)
        made.name = getattr(self.function, "__name__", made.name)  # errors name the user's function
        self._programs[len(args)] = made
        return made

    def _run(self, *args: Any, **named: Any) -> Any:
        result = self.function(*args, **named)
        leaves, tree = flatten(result, empty=True)
        return tree.build(iter([self._join(as_tensor(leaf)) for _, leaf in leaves]))

    def _join(self, x: Tensor) -> Tensor:
        return all_gather(x, self.mesh) if x.ndim else all_reduce(x, "mean", self.mesh)

    def _bind(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position, which `batch_argnums` counts; keyword-only ones stay."""
        if not named:
            return args, named
        bound = inspect.signature(self.function).bind(*args, **named)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def __call__(self, *args: Any, **named: Any) -> Any:
        args, named = self._bind(args, named)
        return self._make(args)(*args, **named)

    def __value_and_grad__(self, argnums: Any, has_aux: bool) -> Callable[..., Any]:
        """The value and gradient of the mean over the ranks: each rank differentiates its part."""

        def call(*args: Any, **named: Any) -> Any:
            args, named = self._bind(args, named)
            return self._make(args).__value_and_grad__(argnums, has_aux)(*args, **named)

        return call


def data_parallel(
    function: Callable[..., Any] | None = None, *, devices: Any = None, mesh: Mesh | None = None,
    batch_argnums: Sequence[int] | int | None = None, jit: bool = False, target: str | None = None,
) -> Any:  # fmt: skip
    """A function of a batch that each device runs on an equal part, cut along the first axis.

    `devices` is a list of devices, or a number. `batch_argnums` are the arguments that are cut, by position (default:
    all); every device gets the others, and keyword-only ones, whole. A result without axes is averaged over the
    devices, another is concatenated. `ts.grad` of it gives the averaged gradient. `jit=True` or `target` compiles the
    part of each device.

    >>> import tessera as ts
    >>> @data_parallel(devices=4, batch_argnums=1)
    ... def loss(w, x):
    ...     return ((x @ w) ** 2.0).mean()
    >>> ts.grad(loss)(ts.ones((2,)), ts.ones((8, 2)))
    Tensor([4., 4.], f32)

    Raises:
        ArgumentError: no devices are given, or `batch_argnums` names no argument.
        ShapeError: a batch has no equal parts.
    """
    if function is None:
        return functools.partial(
            data_parallel, devices=devices, mesh=mesh, batch_argnums=batch_argnums, jit=jit, target=target
        )
    if mesh is None:
        if devices is None:
            raise ArgumentError(
                "data_parallel needs devices", location=user_location(),
                expected="devices=4, a list of names, or mesh=", suggestion="@ts.data_parallel(devices=4)",
            )  # fmt: skip
        mesh = Mesh(devices, (DATA,))
    cut = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
    return DataParallel(function, mesh, cut, jit, target)


# ZeRO: the optimizer's state, the gradients and the parameters in equal flat parts, one for each rank.


@dataclass(frozen=True)
class _Flat:
    """A parameter as it was: its shape and element type."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class ZeroOptimizer:
    """An optimizer whose state is cut over the ranks of a mesh axis: each rank updates its part of every parameter.

    Stage 1 cuts the optimizer's state; stage 2 also the gradients, which are reduced and scattered at once; stage 3
    also the parameters: `shard` cuts them, `gather` joins them where a loss uses them, and the derivative of that
    scatters the gradients. The steps are those of the optimizer on whole parameters, which computes element by element.

    Raises:
        ArgumentError: there is no such stage, or the optimizer needs whole parameters (Adafactor).
    """

    def __init__(self, optimizer: Any, stage: int = 1, axis: Any = None) -> None:
        if stage not in (1, 2, 3):
            raise ArgumentError(f"ZeRO has no stage {stage}", location=user_location(), expected="1, 2 or 3")
        if isinstance(optimizer, Optimizer) and type(optimizer).update_all is not Optimizer.update_all:
            raise ArgumentError(
                f"ZeRO cuts parameters into flat parts, and {type(optimizer).__name__} needs whole ones",
                location=user_location(), expected="an optimizer that computes element by element, e.g. ts.optim.AdamW",
            )  # fmt: skip
        self.optimizer, self.stage, self.axis = optimizer, stage, axis
        self._tree: TreeDef | None = None
        self._flat: dict[str, _Flat] = {}

    def _where(self) -> Any:
        return current_axes(None, self.axis, "ZeroOptimizer")

    def _pad(self, x: Tensor) -> Tensor:
        flat = reshape(x, shape=(-1,))
        rest = -int(flat.shape[0]) % self._where().size
        return pad(flat, (0, rest)) if rest else flat

    def shard(self, params: Any) -> dict[str, Tensor]:
        """This rank's part of each parameter, by its path."""
        leaves, self._tree = flatten(params, empty=True)
        self._flat = {path: _Flat(tuple(as_tensor(p).shape), as_tensor(p).dtype) for path, p in leaves}  # type: ignore[arg-type]
        return {path: shard(self._pad(as_tensor(p)), self._where()) for path, p in leaves}

    def gather(self, shards: Mapping[str, Tensor]) -> Any:
        """The whole parameters, from the parts of all ranks.

        Raises:
            ArgumentError: `shard` was not called, or they are other parameters.
        """
        if self._tree is None or shards.keys() != self._flat.keys():
            raise ArgumentError(
                "these are not the parts that `shard` gave", location=user_location(),
                expected=", ".join(self._flat) or "a call of shard first", received=", ".join(shards),
            )  # fmt: skip
        whole = [self._restore(all_gather(shards[path], self._where()), flat) for path, flat in self._flat.items()]
        return self._tree.build(iter(whole))

    def _restore(self, x: Tensor, flat: _Flat) -> Tensor:
        return reshape(x[: flat.count], shape=flat.shape)

    def init(self, params: Any) -> Any:
        """The state of the optimizer for this rank's parts; `params` are whole, and parts in stage 3."""
        return self.optimizer.init(params if self.stage == 3 else self.shard(params))

    def update(self, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        """The parameters and the state after one step; `grads` are this rank's gradients of its own loss.

        The mean over the ranks is the gradient of the step. In stage 3 `params` and `grads` are parts: the derivative
        of `gather` has summed the gradients already.
        """
        count = float(self._where().size)
        if self.stage == 3:
            return self.optimizer.update(params, {path: g / count for path, g in grads.items()}, state)  # type: ignore[no-any-return]
        given = {path: self._pad(g) for path, g in flatten(grads, empty=True)[0]}
        mine = {path: self._reduce(g) for path, g in given.items()}
        shards, state = self.optimizer.update(self.shard(params), mine, state)
        return self.gather(shards), state

    def _reduce(self, g: Tensor) -> Tensor:
        if self.stage == 1:
            return shard(all_reduce(g, "mean", self._where()), self._where())
        return reduce_scatter(g, self._where(), op="mean")


class ZeroSteps:
    """`ts.zero(stage=3)`: a decorator for a function that updates parameters, and the steps that it is made of.

    >>> import tessera as ts
    >>> @ts.zero(stage=2, mesh=ts.Mesh(2, "data"), optimizer=ts.optim.SGD(0.5))
    ... def update(params, grads):
    ...     grads = ts.zero.reduce_scatter_grads(grads)
    ...     local = ts.zero.update_local(params, grads)
    ...     return ts.zero.all_gather(local)
    >>> update({"w": ts.ones((4,))}, {"w": ts.full((4,), 2.0)})
    {'w': Tensor([0., 0., 0., 0.], f32)}
    """

    def __call__(self, stage: int = 1, optimizer: Any = None, mesh: Mesh | None = None, axis: Any = None) -> Any:
        """A decorator: the function runs in the ranks of a mesh, with the steps of this ZeRO stage.

        Raises:
            ArgumentError: there is no such stage.
        """
        if stage not in (1, 2, 3):
            raise ArgumentError(f"ZeRO has no stage {stage}", location=user_location(), expected="1, 2 or 3")

        def decorate(function: Callable[..., Any]) -> Any:
            @functools.wraps(function)
            def run(*args: Any, **named: Any) -> Any:
                zero = ZeroOptimizer(optimizer, stage, axis)
                token = _ZERO.set(zero)
                try:
                    return function(*args, **named)
                finally:
                    _ZERO.reset(token)

            return spmd(run, mesh=mesh)

        return decorate

    def gather_params(self, params: Any) -> Any:
        """The whole parameters: gathered where they are parts (stage 3), else as they are."""
        zero = _current_zero()
        return zero.gather(params) if zero.stage == 3 and isinstance(params, Mapping) and zero._flat else params

    def reduce_scatter_grads(self, grads: Any) -> dict[str, Tensor]:
        """This rank's part of the mean of the gradients, by path."""
        zero = _current_zero()
        return {path: zero._reduce(zero._pad(as_tensor(g))) for path, g in flatten(grads, empty=True)[0]}

    def update_local(self, params: Any, grads: Mapping[str, Tensor], state: Any = None) -> Any:
        """This rank's parts of the parameters after a step of the decorator's optimizer; with `state` also the new one.

        Raises:
            ArgumentError: the decorator was given no optimizer.
        """
        zero = _current_zero()
        if zero.optimizer is None:
            raise ArgumentError(
                "update_local needs an optimizer", location=user_location(),
                suggestion="@ts.zero(stage=3, optimizer=ts.optim.AdamW(1e-3))",
            )  # fmt: skip
        shards = zero.shard(params)
        new, after = zero.optimizer.update(shards, dict(grads), zero.optimizer.init(shards) if state is None else state)
        return new if state is None else (new, after)

    def all_gather(self, shards: Mapping[str, Tensor]) -> Any:
        """The whole parameters, from the parts of all ranks."""
        return _current_zero().gather(shards)


_ZERO: ContextVar[ZeroOptimizer | None] = ContextVar("zero", default=None)
zero = ZeroSteps()


def _current_zero() -> ZeroOptimizer:
    found = _ZERO.get()
    if found is None or CURRENT_RANK.get() is None:
        raise ArgumentError(
            "this step of ZeRO runs in a function that @ts.zero decorates", location=user_location(),
            suggestion="@ts.zero(stage=3, mesh=mesh, optimizer=ts.optim.AdamW(1e-3))",
        )  # fmt: skip
    return found
