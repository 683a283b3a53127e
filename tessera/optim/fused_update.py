"""Multi-tensor update: one launch applies a rule to all parameters of a type (as PyTorch's fused optimizers).

The kernel's grid counts the blocks of all parameters one after the other. A program finds its parameter by a binary
search in a tree of branches, loads a block of each operand, applies the rule and stores the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import user_location
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import RefType, TensorType, int64
from tessera.frontend.jit.tracing import TRACE_DEVICE
from tessera.ir.builder import CURRENT_BUILDER, Builder
from tessera.ir.core import Attrs, Block, Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor.basic import full
from tessera.ops.tensor.elementwise import less, mul, sub
from tessera.ops.tensor.shape import reshape
from tessera.runtime.driver import find_plan
from tessera.transforms.flow.region_ops import bind_region_op

Rule = Callable[[Sequence[Tensor], Mapping[str, Any]], list[Tensor]]
Task = Sequence[Tensor]  # a parameter, its gradient and its slots, of one shape
BLOCK = 2048  # elements of a program
LEAST_BLOCK = 256


def update_together(
    rule: Rule, tasks: Sequence[Task], shared: Mapping[str, Any], places: Sequence[int]
) -> list[list[Tensor]]:
    """The results of a rule for each task: by one launch for each combination of types in a program for a target.

    Of a vector in `shared` each task takes the element at its index.
    """
    if not _takes_launches() or any(symbol_names(t.shape) for task in tasks for t in task):
        return [rule(task, _choose_elements(shared, place)) for task, place in zip(tasks, places, strict=True)]
    groups: dict[Any, list[int]] = {}
    for i, task in enumerate(tasks):
        if 0 not in task[0].shape:
            groups.setdefault(tuple((t.dtype, t.type.policy) for t in task), []).append(i)
    found: dict[int, list[Tensor]] = {}
    for members in groups.values():
        made = _MultiTensorKernel(rule, [tasks[i] for i in members], shared, [places[i] for i in members]).launch()
        found.update(zip(members, made, strict=True))
    # A parameter without elements stays, and so do its slots.
    return [found.get(i, [task[0], *task[2:]]) for i, task in enumerate(tasks)]


def _choose_elements(shared: Mapping[str, Any], place: int) -> dict[str, Any]:
    return {name: x[place] if isinstance(x, Tensor) and x.ndim else x for name, x in shared.items()}


def _takes_launches() -> bool:
    """Whether a program is traced for a target that has one memory, and no transform is under way."""
    device = TRACE_DEVICE.get()
    if type(CURRENT_BUILDER.get()) is not Builder or device is None or find_generator_name(device) == INTERP:
        return False
    plan = find_plan(find_generator_name(device))
    return plan.flash and plan.mesh is None


@dataclass
class _MultiTensorKernel:
    """The kernel of one combination of types: its tasks, and the numbers that all share or that each has its own of."""

    rule: Rule
    tasks: Sequence[Task]
    shared: Mapping[str, Any]
    places: Sequence[int]

    def launch(self) -> list[list[Tensor]]:
        """Record the launch; the results of each task."""
        flat = [[reshape(t, shape=(int(t.size),)) for t in task] for task in self.tasks]
        tensors = {name: x for name, x in self.shared.items() if isinstance(x, Tensor)}
        numbers = [reshape(x, shape=(int(x.size),)) for x in tensors.values()]
        operands = [*numbers, *(t for task in flat for t in task)]
        inputs = [Value(_as_ref(t.type), f"in{i}") for i, t in enumerate(operands)]
        width, count = len(self.tasks[0]), len(numbers)
        refs = [inputs[count + i * width : count + (i + 1) * width] for i in range(len(self.tasks))]
        types = self._find_result_types()
        outputs = [
            [Value(RefType((int(task[0].size),), d), f"out{i}_{j}") for j, d in enumerate(types)]
            for i, task in enumerate(self.tasks)
        ]
        sizes = [int(task[0].size) for task in self.tasks]
        starts = [0, *accumulate(-(-size // choose_block(size)) for size in sizes)]
        builder = Builder()
        builder.location = user_location()
        with builder.active():
            program = builder.add(tile.program_id, (), {"axis": 0}).out
            known: dict[str, Any] = dict(self.shared)
            for (name, x), ref in zip(tensors.items(), inputs, strict=False):
                known[name] = ref if x.ndim else self._load_number(builder, ref, 0)
            self._branch(builder, program, known, list(zip(refs, outputs, starts, self.places, strict=False)))
        assert not builder.captures, "a rule has no arrays of its own"
        new = [v for row in outputs for v in row]
        body = Block((*inputs, *new), builder.block((), ()).nodes, ())
        written = tuple(range(len(inputs), len(inputs) + len(new)))
        attrs = {"kernel": "update_parameters", "grid": (starts[-1],), "written": written, "attrs": Attrs({"group": 1})}
        made = bind_region_op(
            control_flow.launch,
            operands,
            attrs,
            [body],
            tuple(TensorType(v.type.shape, v.type.dtype) for v in new),  # type: ignore[union-attr]
        )
        size = len(types)
        return [
            [reshape(t, shape=task[0].shape) for t in made[i * size : (i + 1) * size]]
            for i, task in enumerate(self.tasks)
        ]

    def _find_result_types(self) -> list[Any]:
        """The element types of the results of the rule."""
        builder = Builder()
        with builder.active():
            scalars = {
                n: Tensor(Value(TensorType((), x.dtype))) if isinstance(x, Tensor) else x
                for n, x in self.shared.items()
            }
            return [
                t.dtype for t in self.rule([Tensor(Value(TensorType((1,), t.dtype))) for t in self.tasks[0]], scalars)
            ]

    def _branch(self, builder: Builder, program: Value, scalars: Mapping[str, Any], parts: list[Any]) -> None:
        """The part of the parameters whose blocks contain this program: half of them in each branch."""
        if len(parts) == 1:
            self._update(builder, program, scalars, *parts[0])
            return
        middle = len(parts) // 2
        limit = _constant(builder, parts[middle][2])
        condition = builder.add(less, [program, limit]).out
        regions = []
        for half in (parts[:middle], parts[middle:]):
            with builder.region() as nodes:
                self._branch(builder, program, scalars, half)
            regions.append(Block((), tuple(nodes), ()))
        builder.add(control_flow.if_, [condition], types=(), regions=tuple(regions))

    def _update(
        self, builder: Builder, program: Value, scalars: Mapping[str, Any], refs: Any, outputs: Any, start: int,
        number: int,
    ) -> None:  # fmt: skip
        """One block of one parameter: loaded, updated and stored."""
        scalars = {
            name: self._load_number(builder, x, number) if isinstance(x, Value) else x for name, x in scalars.items()
        }
        size = int(refs[0].type.shape[0])
        width = choose_block(size)
        edge = "clip" if size % width else "error"  # no program leaves the parameter: no masks
        block = builder.add(sub, [program, _constant(builder, start)]).out
        place = builder.add(mul, [block, _constant(builder, width)]).out
        attrs = {"edge": edge, "vector": 1}
        loaded = [Tensor(builder.add(tile.load, [ref, place], {"shape": (width,), **attrs}).out) for ref in refs]
        for ref, value in zip(outputs, self.rule(loaded, scalars), strict=True):
            builder.add(tile.store, [ref, value.data, place], attrs)

    def _load_number(self, builder: Builder, ref: Value, place: int) -> Tensor:
        """An element of a memory, as a scalar."""
        first = [ref, _constant(builder, place)]
        one = builder.add(tile.load, first, {"shape": (1,), "edge": "error", "vector": 1}).out
        return reshape(Tensor(one), shape=())


def choose_block(size: int) -> int:
    """The elements of a program: a divisor of the parameter's size where there is a large one."""
    divisor = size & -size  # the largest power of two
    return size if size < BLOCK else min(divisor, BLOCK) if divisor >= LEAST_BLOCK else BLOCK


def _as_ref(type: TensorType) -> RefType:
    return RefType(type.shape, type.dtype, policy=type.policy)


def _constant(builder: Builder, value: int) -> Value:
    return builder.add(full, (), {"shape": (), "value": value, "dtype": int64}).out
