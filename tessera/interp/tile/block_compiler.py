"""Block compiler: translates each block of a tile function to one Python function.

Constants are folded, and values freed after their last use (liveness). The meaning of ops is in the tables of
`op_rules`; this only chooses their rows ahead, since looking them up again for each node of each pass through a loop
costs more than NumPy's work on a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from tessera.core.errors import Location, TesseraError
from tessera.core.types import DType, TensorType, Type, tf32
from tessera.interp.tile import memory, op_rules
from tessera.interp.tile.affine import AffineScalar, combine_affine
from tessera.interp.tile.machine import TileMachine
from tessera.ir.builder import Evaluation
from tessera.ir.core import Block, Node, Value
from tessera.ir.numerics.conversion import convert, round_to_storage
from tessera.ir.rules import COMPUTE, STORAGE, Op
from tessera.ops.dialects import tile

# The file of the emitted functions: a name inside this package, so that its frames count as the package's own.
COMPILED_FILE = f"{__file__}:compiled"


def find_last_uses(block: Block) -> dict[Node, tuple[Value, ...]]:
    """Liveness: for each node the values of this block whose last use it is, inner regions included."""
    made = {v for node in block.nodes for v in node.results}
    needed: set[Value] = set(block.results)
    found: dict[Node, tuple[Value, ...]] = {}
    for node in reversed(block.nodes):
        used = {*node.args, *node.results, *(v for region in node.regions for v in region.free)}
        found[node] = tuple(v for v in used & made if v not in needed)
        needed |= used
    return found


class BlockEmitter:
    """Emits the Python functions of a program's blocks.

    A value is a local variable, dropped where it is used last. What inner regions use lies in `env` meanwhile, where
    a part of the instances finds its own share of it.
    """

    def __init__(self, constants: dict[Value, Any], rank: int) -> None:
        self.constants, self.rank = constants, rank
        self.lines: list[str] = []
        self.locations: list[Location | None] = []
        self.objects: dict[str, Any] = {"arrayed": _materialise_affine, "convert": convert}
        self.names: dict[Value, str] = {}

    def functions(self) -> dict[str, Any]:
        """The functions by name; they are not among their own globals, which would be a reference cycle."""
        found: dict[str, Any] = {}
        exec(compile("\n".join(self.lines), COMPILED_FILE, "exec"), self.objects, found)
        return found

    def object(self, thing: Any) -> str:
        """The name of an object in the emitted text."""
        name = f"o{len(self.objects)}"
        self.objects[name] = thing
        return name

    def name(self, value: Value) -> str:
        """The variable of a value."""
        if value not in self.names:
            known = value in self.constants
            self.names[value] = self.object(self.constants[value]) if known else f"v{len(self.names)}"
        return self.names[value]

    def block(self, block: Block, nodes: Sequence[Node]) -> str:
        """Emit the function of a block for the nodes passed; return its name."""
        name = f"b{len(self.lines)}"
        self._line(f"def {name}({', '.join(['run', 'env', *map(self.name, block.params)])}):")
        self._line(" machine = run.machine; count = machine.count")
        direct = dict.fromkeys([v for node in nodes for v in node.args] + list(block.results))
        for value in direct:
            if value in block.free and value not in self.constants:
                self._line(f" {self.name(value)} = env[{self.object(value)}]")
        last = find_last_uses(block)
        for node in nodes:
            dead = [f"{self.name(v)} = None" for v in last[node] if v not in self.constants]
            self._line("; ".join([f" {self._within(block, node)}", *dead]), node.loc)
        self._line(f" return [{self._join_names(block.results)}]")
        return name

    def _line(self, line: str, location: Location | None = None) -> None:
        self.lines.append(line)
        self.locations.append(location)

    def _within(self, block: Block, node: Node) -> str:
        """Emit a node with regions; the values that its regions use are stored in `env`."""
        used = {v for region in node.regions for v in region.free if v not in block.free and v not in self.constants}
        own = {v: self.object(v) for v in sorted(used, key=self.name)}
        before = [f"env[{key}] = {self.name(v)}" for v, key in own.items()]
        return "; ".join([*before, self._node(node), *(f"del env[{key}]" for key in own.values())])

    def _node(self, node: Node) -> str:
        row = memory.view_rules.get(node.op)
        if row is not None:
            move, array = row(node, self.rank), self._array(node.args[0])
            return (
                f"{self.name(node.out)} = {array if move is memory.identity_view else f'{self.object(move)}({array})'}"
            )
        rule = op_rules.affine_rules.get(node.op)
        if rule is not None:
            return self._emit_rule_call(node, rule, self._join_names(node.args))
        rule = op_rules.array_rules.get(node.op)
        if rule is not None and node.op not in op_rules.operand_rules:
            return self._emit_rule_call(node, rule, ", ".join(map(self._array, node.args)))
        return self._pure(node)

    def _emit_rule_call(self, node: Node, rule: Callable[..., Any], args: str) -> str:
        """Emit a node that has a rule."""
        call = f"{self.object(rule)}(machine, {self.object(node)}, [{args}], run)"
        return f"[{self._join_names(node.results)}] = {call}" if node.results else call

    def _pure(self, node: Node) -> str:
        """Emit a pure op; index scalars stay affine where possible, else they become arrays."""
        if len(node.results) > 1:
            calculate = self.object(partial(node.op.compute, node.types, node.result_types, node.attrs.plain()))
            return f"[{self._join_names(node.results)}] = {calculate}([{', '.join(map(self._array, node.args))}])"
        out = self.name(node.out)
        if any(v.type == tile.INDEX_TYPE for v in node.args):
            return f"{out} = {self.object(_make_index_function(node))}(machine, [{self._join_names(node.args)}])"
        if node.op in op_rules.operand_rules:
            return f"{out} = {self.object(_make_pure_function(node))}([{self._join_names(node.args)}])"
        return f"{out} = {self._direct(node)}"

    def _direct(self, node: Node) -> str:
        """Emit the widening, computation and rounding inline, without a call."""
        wider = [_compute_dtype(node.op, t) for t in node.types]
        names = [self.name(v) for v in node.args]
        args = [n if w is None else f"convert({n}, {self.object(w)})" for n, w in zip(names, wider, strict=True)]
        call = f"{self.object(_bind_reference(node))}({', '.join(args)})"
        rounded, always = self.object(_make_rounding(node)), _always_rounds(node)
        if always:
            return f"{rounded}({call})"
        return f"t if (t := {call}).dtype is {self.object(node.out.type.dtype.numpy)} else {rounded}(t)"

    def _array(self, value: Value) -> str:
        """Emit a value, converted to an array where it may be affine."""
        name = self.name(value)
        return f"arrayed({name}, count)" if value.type == tile.INDEX_TYPE else name

    def _join_names(self, values: Sequence[Value]) -> str:
        return ", ".join(map(self.name, values))


def _materialise_affine(value: Any, count: tuple[int, ...]) -> Any:
    return value.array(count) if type(value) is AffineScalar else value


def _make_index_function(node: Node) -> Callable[[TileMachine, list[Any]], Any]:
    calculate = _make_pure_function(node)

    def indexed(machine: TileMachine, values: list[Any]) -> Any:
        if AffineScalar in map(type, values):
            found = combine_affine(node.op, values)
            if found is not None:
                return found
            values = machine.arrays(values)
        return calculate(values)

    return indexed


def _make_pure_function(node: Node) -> Callable[[list[Any]], Any]:
    """Make the function of a pure op: widen, compute, round, as `Op.compute` does, with its choices made ahead."""
    prepare, compute, rounded = op_rules.operand_rules.get(node.op), _bind_reference(node), _make_rounding(node)
    wider = [_compute_dtype(node.op, t) for t in node.types]

    def calculate(values: list[Any]) -> Any:
        if prepare is not None:
            values = prepare(node, values)
        return rounded(compute(*(v if w is None else convert(v, w) for v, w in zip(values, wider, strict=True))))

    return calculate


def _bind_reference(node: Node) -> Callable[..., Any]:
    return partial(node.op.ref, **node.attrs.plain()) if node.attrs else node.op.ref


def _make_rounding(node: Node) -> Callable[[Any], Any]:
    dtype, policy, always = node.out.type.dtype, node.out.type.policy, _always_rounds(node)
    return lambda found: round_to_storage(found, dtype, policy) if always or found.dtype != dtype.numpy else found


def _always_rounds(node: Node) -> bool:
    """Whether a result is rounded although its elements have the right type already."""
    return node.out.type.policy is not None or node.out.type.dtype is tf32


def _compute_dtype(op: Op, type: Type) -> DType | None:
    """The type to which an operand is widened, or None."""
    if op.numerics == STORAGE:
        return None
    assert isinstance(type, TensorType)
    wide = type.compute if op.numerics == COMPUTE else type.accumulate
    return None if wide.numpy == type.dtype.numpy else wide


# A constant larger than this is computed at its use, not folded.
MAX_CONSTANT_BYTES = 1 << 20

# function(run, env, *inputs) runs a block: it reads outer values from env and returns the block's results.
CompiledBlock = Callable[..., list[Any]]


@dataclass
class CompiledBody:
    """A compiled function body: a function for each block, and the source location of each of their lines."""

    blocks: dict[Block, CompiledBlock]
    locations: list[Location | None]

    def place(self, error: TesseraError) -> Location:
        """The source location of an error raised in a compiled block."""
        trace = error.__traceback__
        assert trace is not None and trace.tb_next is not None
        location = self.locations[trace.tb_next.tb_lineno - 1]
        assert location is not None
        return location


class CompiledRun:
    """A running program: the values that inner regions use, and `run(block, *inputs)` for one of them."""

    __slots__ = ("env", "machine", "program")

    def __init__(self, program: CompiledBody, machine: TileMachine, env: dict[Value, Any]) -> None:
        self.program, self.machine, self.env = program, machine, env

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        try:
            return self.program.blocks[block](self, self.env, *inputs)
        except TesseraError as error:
            raise error.at(self.program.place(error)) from None

    def with_values(self, env: dict[Value, Any]) -> CompiledRun:
        """The same program with another environment."""
        return CompiledRun(self.program, self.machine, env)


def run_compiled(body: Block, inputs: Sequence[Any], machine: TileMachine) -> None:
    """Run a tile function's body on a machine."""
    CompiledRun(_compile_body(body, machine.rank), machine, {})(body, *inputs)


@lru_cache(maxsize=1024)
def _compile_body(body: Block, rank: int) -> CompiledBody:
    constants: dict[Value, Any] = {}
    text = BlockEmitter(constants, rank)
    one = TileMachine.of((1,) * rank, (0,) * rank, (1,) * rank, 1, False)
    defined = Counter(v for n in body.walk() for v in n.results)
    again = {
        v for v, count in defined.items() if count > 1
    }  # folded on both sides of a branch: no constants of the program
    names = {
        block: text.block(
            block, [n for n in block.nodes if not again.isdisjoint(n.results) or not _fold_constant(n, constants, one)]
        )
        for block in _nested_blocks(body)
    }
    found = text.functions()
    return CompiledBody({block: found[name] for block, name in names.items()}, text.locations)


def _nested_blocks(body: Block) -> Sequence[Block]:
    """A block and its nested blocks, outer ones first."""
    return [body, *(inner for node in body.nodes for region in node.regions for inner in _nested_blocks(region))]


def _fold_constant(node: Node, known: dict[Value, Any], one: TileMachine) -> bool:
    """Fold a pure node whose operands are constants."""
    if node.regions or node.op.effects or not node.op.name.startswith("ts.") or not all(a in known for a in node.args):
        return False
    mean = op_rules.make_evaluator(one)
    try:
        results = mean(node, [known[a] for a in node.args], Evaluation(mean, {}))
    except TesseraError:  # the error is raised when the node runs
        return False
    if sum(getattr(a, "nbytes", 0) for a in results) > MAX_CONSTANT_BYTES:
        return False
    known.update(zip(node.results, results, strict=True))
    return True
