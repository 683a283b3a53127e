"""Lazy graph: records calls on tensors as Graph IR, and evaluates them as one `ts.jit` program when a value is needed.

An `Expression` is a value of the graph: either a leaf, which has its elements or a function that makes them, or a
result of a `Record`, the Graph nodes that one call recorded. Assembled records are a Graph function. Programs are
cached by the structure of that function.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import Location, TraceError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import TensorType, int64
from tessera.frontend.jit.tracing import Jit, to_result_tensor
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Block, Function, Node, Value, structural_key
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.ops.tensor.random import RandomState, trace_random_state
from tessera.ops.tensor.reduce import sum as total
from tessera.pyflame.layouts import MeshLayout
from tessera.transforms.autodiff.gradients import value_and_grad
from tessera.transforms.recording import TransformBuilder, eval_block, traced_value

# Whether calls are recorded for `backward`.
GRAD_ENABLED: ContextVar[bool] = ContextVar("pyflame gradients", default=True)


@dataclass(frozen=True, eq=False)
class Record:
    """One call: its name, the Graph nodes it recorded, the expressions they use, and where it was made."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Expression, ...]
    tracked: bool
    location: Location
    freed: list[bool]
    results: list[weakref.ref[Expression]]


class Expression:
    """A value of the lazy graph: its Graph value, and its elements, how they are made, or the record that has it."""

    __slots__ = (
        "__weakref__", "constant", "elements", "freed", "label", "layout", "location", "make", "needs_gradient",
        "owner", "record", "value",
    )  # fmt: skip

    def __init__(
        self,
        type: TensorType,
        label: str,
        *,
        value: Value | None = None,
        elements: CoreTensor | None = None,
        make: Callable[[], CoreTensor] | None = None,
        record: Record | None = None,
        layout: MeshLayout | None = None,
        constant: bool = False,
    ) -> None:
        self.value = value or Value(type)
        self.label, self.layout, self.constant = label, layout, constant
        self.elements, self.make, self.record = elements, make, record
        self.location = record.location if record else user_location()
        self.freed = False  # a backward freed the graph that computed this
        self.needs_gradient = False  # computed from a tensor with requires_grad
        self.owner: Callable[[], Any] = lambda: None  # a weak reference to the tensor of the user, for its gradient

    @property
    def type(self) -> TensorType:
        """Shape and element type."""
        return self.value.type  # type: ignore[return-value]

    @property
    def is_evaluated(self) -> bool:
        """Whether the elements are known."""
        return self.elements is not None

    @property
    def is_freed(self) -> bool:
        """Whether a backward freed the graph behind this."""
        return self.freed or (self.record is not None and self.record.freed[0] and not self.constant)

    def own(self, tensor: Any) -> None:
        """Make a tensor the one that receives the gradient."""
        self.owner = weakref.ref(tensor)


def record_call(
    name: str, function: Callable[..., Any], inputs: Sequence[Expression], layout: MeshLayout | None = None
) -> tuple[list[Expression], Any]:
    """Record a function of Tessera's tensors on expressions: the expressions of its results, and their container.

    A result that is an input is that input's expression.
    """
    values = {x.value: x for x in inputs}
    builder = TransformBuilder(list(values))
    seed, first = Value(TensorType((), int64), "random_seed"), Value(TensorType((), int64), "random_offset")
    random = RandomState(CoreTensor(seed), CoreTensor(first))
    with trace_random_state(random), builder.active():
        outcome = function(*(CoreTensor(x.value) for x in inputs))
        leaves, tree = flatten(outcome, empty=True)
        results = [traced_value(builder, to_result_tensor(leaf)) for _, leaf in leaves]
    block = builder.block((), ())
    used = [*values.values()]
    captured = [(CoreTensor(array), value) for array, value in builder.captures.values()]
    used += [Expression(t.type, "constant", value=v, elements=t) for t, v in captured]
    if random.drawn:
        state = random.summarise().reserve()
        used += [
            Expression(v.type, v.hint, value=v, elements=CoreTensor(a))  # type: ignore[arg-type]
            for v, a in zip((seed, first), state, strict=True)
        ]
    found = Record(name, block.nodes, tuple(used), GRAD_ENABLED.get(), user_location(), [False], [])
    return [values[v] if v in values else _make_result(found, v, layout) for v in results], tree


def _make_result(record: Record, value: Value, layout: MeshLayout | None) -> Expression:
    type = value.type
    assert isinstance(type, TensorType)
    alike = (x.layout for x in record.inputs if x.layout is not None and x.type.shape == type.shape)
    result = Expression(
        type, record.name, value=value, record=record, layout=layout or next(alike, None), constant=not record.tracked
    )
    if record.tracked and type.dtype.is_float:
        result.needs_gradient = any(_needs_gradient(x) for x in record.inputs)
    record.results.append(weakref.ref(result))
    return result


def _needs_gradient(x: Expression) -> bool:
    return x.needs_gradient or (x.record is None and bool(getattr(x.owner(), "_wants_gradient", False)))


# Assembly of records to a Graph function.


@dataclass(frozen=True)
class LazyProgram:
    """A Graph function whose parameters are leaves."""

    function: Function
    leaves: tuple[Expression, ...]
    order: tuple[Expression, ...]  # leaves and results of records, in topological order

    def records(self) -> list[Record]:
        """The records, in topological order."""
        leaves = frozenset(self.leaves)
        return list(dict.fromkeys(x.record for x in self.order if x.record is not None and x not in leaves))


def is_known(x: Expression) -> bool:
    """Whether evaluation does not look behind an expression."""
    return x.elements is not None or x.record is None


def assemble(
    wanted: Sequence[Expression], is_leaf: Callable[[Expression], bool] = is_known, name: str = "lazy"
) -> LazyProgram:
    """The Graph function that computes some expressions from leaves."""
    order: dict[Expression, None] = {}
    leaves: dict[Expression, None] = {}
    records: dict[int, Record] = {}
    work = [(x, False) for x in reversed(wanted)]
    while work:
        x, done = work.pop()
        if x in order:
            continue
        if is_leaf(x):
            leaves[x] = order[x] = None
        elif done:
            order[x] = None
            assert x.record is not None
            records.setdefault(id(x.record), x.record)
        else:
            assert x.record is not None
            work.append((x, True))
            work += [(i, False) for i in reversed(x.record.inputs)]
    nodes = tuple(node for record in records.values() for node in record.nodes)
    body = Block(tuple(x.value for x in leaves), nodes, tuple(x.value for x in wanted))
    return LazyProgram(Function(name, body), tuple(leaves), tuple(order))


# Evaluation.

MAX_PROGRAMS = 512  # compiled programs that are kept; the one not used for longest is forgotten
_PROGRAMS: OrderedDict[Hashable, Jit] = OrderedDict()


def find_program(key: Hashable, function: Callable[..., Any]) -> Jit:
    """The compiled program of a key; a new one traces `function`."""
    found = _PROGRAMS.pop(key, None)
    _PROGRAMS[key] = found or Jit(function, dynamic=False)
    if len(_PROGRAMS) > MAX_PROGRAMS:
        _PROGRAMS.popitem(last=False)
    return _PROGRAMS[key]


def count_programs() -> int:
    """The number of compiled programs."""
    return len(_PROGRAMS)


def _run_body(body: Block, inputs: list[CoreTensor]) -> list[CoreTensor]:
    return eval_block(body, inputs)


def run_forward(program: LazyProgram) -> list[CoreTensor]:
    """The results of a program."""
    function = program.function
    compiled = find_program(structural_key(function), functools.partial(_run_body, function.body))
    return compiled(load_leaves(program.leaves))  # type: ignore[no-any-return]


def run_gradients(
    program: LazyProgram, moving: Sequence[int], cotangent: CoreTensor
) -> tuple[list[CoreTensor], list[CoreTensor]]:
    """The results of a program, and the gradients of some of its leaves for a cotangent of the first result."""
    function = program.function
    key = "gradients", tuple(moving), structural_key(function)
    compiled = find_program(key, functools.partial(_differentiate, function.body, tuple(moving)))
    return compiled(load_leaves(program.leaves), cotangent)  # type: ignore[no-any-return]


def _differentiate(
    body: Block, moving: tuple[int, ...], inputs: list[CoreTensor], cotangent: CoreTensor
) -> tuple[list[CoreTensor], list[CoreTensor]]:
    def forward(moved: list[CoreTensor]) -> tuple[CoreTensor, list[CoreTensor]]:
        replaced = dict(zip(moving, moved, strict=True))
        results = eval_block(body, [replaced.get(i, x) for i, x in enumerate(inputs)])
        return total(results[0] * cotangent), results  # its gradient by the result is the cotangent

    (_, results), gradients = value_and_grad(forward, has_aux=True)([inputs[i] for i in moving])
    return results, gradients


def load_leaves(leaves: Sequence[Expression]) -> list[CoreTensor]:
    """The elements of leaves; those that are not made yet are made now."""
    for x in leaves:
        if x.elements is None:
            assert x.make is not None
            x.elements, x.make = x.make(), None
    return [x.elements for x in leaves]  # type: ignore[misc]


def evaluate(wanted: Sequence[Expression]) -> None:
    """Compute the elements of expressions that do not have them, in one program.

    Raises:
        TraceError: a program of `ts.jit` is being traced.
    """
    missing = list(dict.fromkeys(x for x in wanted if x.elements is None))
    if not missing:
        return
    if CURRENT_BUILDER.get() is not None:
        raise TraceError(
            "a lazy tensor is evaluated while a program is traced", location=user_location(),
            suggestion="call eval() before the traced function, or write the function with tensors of ts",
        )  # fmt: skip
    load_leaves([x for x in missing if x.record is None])
    computed = [x for x in missing if x.record is not None]
    if not computed:
        return
    for x, elements in zip(computed, run_forward(assemble(computed)), strict=True):
        x.elements = elements
        release(x)


def release(x: Expression) -> None:
    """Forget how an evaluated expression was computed where no backward may ask for it."""
    if x.record is not None and (x.constant or x.record.freed[0]):
        x.freed = not x.constant
        x.record = None
