"""Pipeline parallelism: stages of a model on ranks, micro-batches that pass through them, and their schedules.

GPipe (Huang et al. 2019) runs all forward passes before the backward passes; 1F1B (PipeDream-flush, Narayanan et al.
2021) alternates, so that a rank holds the activations of as many micro-batches as ranks follow it; the interleaved
schedule gives each rank several stages, which shortens the time in which ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import TensorType, as_dtype
from tessera.dist.collectives import recv, send
from tessera.dist.ranks import PredictedWorld, UnknownMessage, current_axes, find_members, get_rank, require_rank
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.collectives import all_reduce
from tessera.ops.tensor.rearrange import split
from tessera.transforms.autodiff.gradients import vjp

SCHEDULES = ("gpipe", "1f1b", "interleaved")
MAX_RANK = 8  # axes of an activation


class Action(NamedTuple):
    """One step of a rank: the forward or backward pass of a stage (by its number on this rank) on a micro-batch."""

    forward: bool
    chunk: int
    micro: int


def list_actions(schedule: str, rank: int, ranks: int, micros: int, chunks: int = 1) -> list[Action]:
    """The steps of a rank in order.

    >>> [f"{'F' if a.forward else 'B'}{a.micro}" for a in list_actions("1f1b", 0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']

    Raises:
        ArgumentError: there is no such schedule, or the numbers do not fit it.
    """
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"there is no pipeline schedule {schedule!r}", location=user_location(), expected=", ".join(SCHEDULES)
        )
    if schedule == "interleaved" and micros % ranks:
        raise ArgumentError(
            "the interleaved schedule takes a multiple of the ranks as micro-batches", location=user_location(),
            expected=f"a multiple of {ranks}", received=str(micros),
        )  # fmt: skip
    if schedule != "interleaved" and chunks != 1:
        raise ArgumentError(
            f"the schedule {schedule!r} has one stage for each rank", location=user_location(),
            expected=f"{ranks} stages", received=f"{ranks * chunks} stages", suggestion='schedule="interleaved"',
        )  # fmt: skip
    total = micros * chunks
    forward = [Action(True, *_find_unit(i, ranks, chunks)) for i in range(total)]
    backward = [Action(False, chunks - 1 - a.chunk, a.micro) for a in forward]
    if schedule == "gpipe":
        return forward + backward
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, total)
    pairs = [a for i in range(total - ahead) for a in (forward[ahead + i], backward[i])]
    return forward[:ahead] + pairs + backward[total - ahead :]


def _find_unit(number: int, ranks: int, chunks: int) -> tuple[int, int]:
    """The stage of a rank and the micro-batch of its n-th forward pass."""
    if chunks == 1:
        return 0, number
    turn = number // ranks
    return turn % chunks, turn // chunks * ranks + number % ranks


class Pipeline:
    """A model as stages on the ranks of a mesh axis; stage s runs on rank s modulo the ranks.

    `stages` are functions of (parameters, activation) that return an activation; `loss` is a function of the last
    activation and the targets of a micro-batch, and gives a mean over its examples.

    Raises:
        ArgumentError: the numbers of stages, ranks or micro-batches do not fit, or there is no such schedule.
    """

    def __init__(
        self, stages: Sequence[Callable[..., Any]], loss: Callable[..., Any], microbatches: int = 4,
        schedule: str = "1f1b", axis: Any = None,
    ) -> None:  # fmt: skip
        if not stages or not all(callable(s) for s in stages):
            raise ArgumentError("a pipeline needs stages", location=user_location(), expected="a list of functions")
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ArgumentError("a pipeline needs micro-batches", location=user_location(), received=repr(microbatches))
        list_actions(schedule, 0, 1, microbatches, 1)
        self.stages, self.loss = list(stages), loss
        self.microbatches, self.schedule, self.axis = microbatches, schedule, axis

    def own_stages(self) -> list[int]:
        """The numbers of the stages that this rank runs.

        Raises:
            ArgumentError: the ranks do not divide the stages, or the caller is not a rank.
        """
        where = current_axes(None, self.axis, "a pipeline")
        if len(self.stages) % where.size:
            raise ArgumentError(
                f"{len(self.stages)} stages on {where.size} ranks", location=user_location(),
                expected=f"a multiple of {where.size} stages",
            )  # fmt: skip
        return list(range(get_rank(where), len(self.stages), where.size))

    def value_and_grad(self, params: Sequence[Any], x: Any, targets: Any) -> tuple[Tensor, list[Any]]:
        """The mean loss of the batch, for every rank, and the gradients of this rank's stages.

        `params` are the parameters of `own_stages()`, in that order. Every rank gets the whole batch `x` and `targets`,
        which are cut along the first axis.

        Raises:
            ShapeError: the batch has no equal micro-batches.
            ArgumentError: the number of parameters is not that of this rank's stages.
        """
        own = self.own_stages()
        if len(params) != len(own):
            raise ArgumentError(
                f"{len(params)} parameters for {len(own)} stages of this rank", location=user_location(),
                expected=f"those of the stages {own}",
            )  # fmt: skip
        return _Run(self, own, params, self._split_microbatches(x), self._split_microbatches(targets)).run()

    def _split_microbatches(self, value: Any) -> list[Tensor]:
        x = as_tensor(value)
        if not x.ndim or x.shape[0] % self.microbatches:
            raise ShapeError(
                f"the batch has no {self.microbatches} equal micro-batches", location=user_location(),
                expected=f"a multiple of {self.microbatches} examples", received=str(x.type),
            )  # fmt: skip
        return list(split(x, self.microbatches, 0))


class _Run:
    """One step of a rank of a pipeline: what its forward passes keep for the backward passes."""

    def __init__(
        self, pipeline: Pipeline, own: list[int], params: Sequence[Any], xs: list[Tensor], targets: list[Tensor]
    ) -> None:
        self.pipeline, self.own, self.params = pipeline, own, params
        self.xs, self.targets = xs, targets
        where = current_axes(None, pipeline.axis, "a pipeline")
        self.rank = require_rank("a pipeline")
        self.where, self.members = where, find_members(where.groups, self.rank.rank)
        self.last = len(pipeline.stages) - 1
        self.pulls: dict[tuple[int, int], Callable[..., Any]] = {}
        self.grads: list[Any] = [None] * len(own)
        self.total = zeros(())
        self._kept: dict[int, Tensor] = {}  # messages of this rank to itself
        self._types: dict[int, TensorType] = {}  # of what stages give to the next one, which is that of its gradient

    def run(self) -> tuple[Tensor, list[Any]]:
        """All steps of the schedule."""
        ranks = self.where.size
        me, chunks = get_rank(self.where), len(self.own)
        for action in list_actions(self.pipeline.schedule, me, ranks, self.pipeline.microbatches, chunks):
            (self._forward if action.forward else self._backward)(action.chunk, action.micro)
        loss = all_reduce(self.total, kind="sum", groups=self.where.groups, site="the loss of a pipeline")
        return loss, self.grads

    def _forward(self, chunk: int, micro: int) -> None:
        stage, params = self.own[chunk], self.params[chunk]
        function = self.pipeline.stages[stage]
        x = self.xs[micro] if stage == 0 else self._receive(stage - 1, stage, micro, forward=True)
        share = 1.0 / self.pipeline.microbatches
        if stage == self.last:
            y, pull = _differentiate(
                lambda p, a: self.pipeline.loss(function(p, a), self.targets[micro]) * share, params, x
            )
            self.total = self.total + y
        else:
            y, pull = _differentiate(function, params, x)
            self._send(y, stage, stage + 1, micro, forward=True)
        self.pulls[chunk, micro] = pull

    def _backward(self, chunk: int, micro: int) -> None:
        stage, pull = self.own[chunk], self.pulls.pop((chunk, micro))
        g: Any = 1.0 if stage == self.last else self._receive(stage + 1, stage, micro, forward=False)
        grads, to_input = pull(g)
        before = self.grads[chunk]
        self.grads[chunk] = grads if before is None else _add_trees(before, grads)
        if stage > 0:
            self._send(to_input, stage, stage - 1, micro, forward=False)

    # Messages: before the first activation of a stage a header of its element type and shape.

    def _tag(self, stage: int, micro: int, forward: bool) -> int:
        return 2 * ((stage * self.pipeline.microbatches + micro) * 2 + forward)

    def _send(self, x: Tensor, here: int, there: int, micro: int, forward: bool) -> None:
        to, tag = self.members[there % self.where.size], self._tag(here, micro, forward)
        if to == self.rank.rank:
            self._kept[tag] = x
            return
        if forward and here not in self._types:
            self._types[here] = x.type
            self._announce(x.type, to, tag)
        send(x, to, tag + 1)

    def _announce(self, type: TensorType, to: int, tag: int) -> None:
        if isinstance(self.rank.world, PredictedWorld):
            self.rank.world.types[self.rank.rank, to, tag] = type
            return
        if type.rank > MAX_RANK:
            raise ShapeError(f"an activation has at most {MAX_RANK} axes", received=str(type))
        name = str(type.dtype).removeprefix("ts.").encode().ljust(16, b"\0")
        header = np.zeros(MAX_RANK + 3, np.int64)
        header[:2], header[2], header[3 : 3 + type.rank] = np.frombuffer(name, np.int64), type.rank, type.shape
        send(Tensor(header), to, tag)

    def _receive(self, there: int, here: int, micro: int, forward: bool) -> Tensor:
        source, tag = self.members[there % self.where.size], self._tag(there, micro, forward)
        if source == self.rank.rank:
            return self._kept.pop(tag)
        if forward and there not in self._types:
            self._types[there] = self._read_type(source, tag)
        type = self._types[there if forward else here]
        return recv(zeros(type.shape, dtype=type.dtype), source, tag=tag + 1)

    def _read_type(self, source: int, tag: int) -> TensorType:
        if isinstance(self.rank.world, PredictedWorld):
            found = self.rank.world.types.get((source, self.rank.rank, tag))
            if found is None:
                raise UnknownMessage(f"rank {self.rank.rank} receives what rank {source} does not send")
            return found
        header = recv(Tensor(np.zeros(MAX_RANK + 3, np.int64)), source, tag=tag).numpy()
        dtype = as_dtype(header[:2].tobytes().rstrip(b"\0").decode())
        return TensorType(tuple(int(n) for n in header[3 : 3 + header[2]]), dtype)


def _differentiate(function: Callable[..., Any], params: Any, x: Tensor) -> tuple[Tensor, Callable[..., Any]]:
    """The result of a stage, and its pullback to (parameters, input); tokens have no gradient."""
    if x.dtype.is_float:
        return vjp(function, params, x)
    y, pull = vjp(lambda p: function(p, x), params)
    return y, lambda g: (*pull(g), None)


def _add_trees(a: Any, b: Any) -> Any:
    leaves, tree = flatten(a, empty=True)
    return tree.build(iter([x + y for (_, x), (_, y) in zip(leaves, flatten(b, empty=True)[0], strict=True)]))


def count_held(schedule: str, rank: int, ranks: int, micros: int, chunks: int = 1) -> int:
    """The most micro-batches whose activations a rank holds at one time."""
    held = most = 0
    for action in list_actions(schedule, rank, ranks, micros, chunks):
        held += 1 if action.forward else -1
        most = max(most, held)
    return most


def bubble_share(ranks: int, micros: int, chunks: int = 1) -> float:
    """The share of a step in which ranks wait, for stages of equal time.

    >>> round(bubble_share(4, 8), 3), round(bubble_share(4, 8, 2), 3)
    (0.273, 0.158)
    """
    wait = (ranks - 1) / chunks
    return wait / (micros + wait)
