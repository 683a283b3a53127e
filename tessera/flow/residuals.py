"""What the way back through a scan needs: what each step made, what every step shares, and where each lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.autodiff.linear import needed
from tessera.autodiff.record import replay
from tessera.ir.core import Block, Value
from tessera.tensor import Tensor


@dataclass(frozen=True)
class Residuals:
    """The stacks of steps, then the tensors that all steps share; `places` says where each needed value lies."""

    stacks: list[Tensor]
    shared: list[Tensor]
    places: tuple[tuple[bool, int], ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self.stacks, *self.shared]

    def of_step(self, slices: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
        """The needed values of one step."""
        return [slices[i] if stacked else shared[i] for stacked, i in self.places]


@dataclass(frozen=True)
class Needs:
    """A body whose results after the first `count` are needed on the way back, sorted by what they depend on.

    Inputs of a step and what rests on constants alone are not stacked again.
    """

    block: Block
    count: int
    carry: int
    xs: int

    @property
    def wanted(self) -> tuple[Value, ...]:
        """The needed values."""
        return self.block.results[self.count :]

    def varying(self) -> set[Value]:
        """The values that differ from step to step."""
        found = set(self.block.params[: self.carry + self.xs])
        for node in self.block.nodes:
            if node.op.effects or not found.isdisjoint(node.args):
                found.update(node.results)
        return found

    def sorted(self) -> tuple[list[Value], list[Value], list[Value]]:
        """Those that a step makes, inputs of a step, and those that all steps share; each once."""
        varying, inputs = self.varying(), set(self.block.params[self.carry : self.carry + self.xs])
        once = list(dict.fromkeys(self.wanted))
        made = [v for v in once if v in varying and v not in inputs]
        return made, [v for v in once if v in inputs], [v for v in once if v not in varying]

    def shared(self, values: Sequence[Value], consts: Sequence[Tensor]) -> list[Tensor]:
        """What rests on constants alone, computed once."""
        varying, params = self.varying(), self.block.params[self.carry + self.xs :]
        nodes = tuple(n for n in self.block.nodes if varying.isdisjoint(n.results))
        return replay(Block(params, needed(nodes, values), tuple(values)), consts)
