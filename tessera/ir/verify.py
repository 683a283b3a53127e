"""IR verifier: the numbered rules V1 to V8 that a module of each level must keep.

V1 definitions dominate uses; V2 operand and result types; V3 legality of ops; V4 regions; V5 launches; V6 outputs;
V7 attributes; V8 static shapes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tessera.core.errors import TesseraError, VerifyError
from tessera.core.symbolic_dim import Dim
from tessera.core.types import GLOBAL, DType, RefType, TensorType, Type, bool_, int64, scalar
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.levels import (
    CONTROL_OPS,
    FLOW_OPS,
    GRAPH_LAUNCH_OP,
    KERNEL_OP,
    LAUNCH_OP,
    LEVELS,
    IrLevel,
    LegalityScope,
)
from tessera.ir.printer import is_printable
from tessera.ir.rules import Op

# Rule violations.


class RuleViolation(NamedTuple):
    """A violation of a rule: the node, function or module that violates it, and the reason."""

    where: Node | Function | Module
    message: str
    expected: Any = None
    received: Any = None


def walk_module(module: Module) -> Iterator[Node]:
    """Every node of every function."""
    for function in module.functions:
        yield from function.body.walk()


def get_types(values: Sequence[Value]) -> tuple[Type, ...]:
    """The types of values."""
    return tuple(v.type for v in values)


def format_types(found: Sequence[Type]) -> str:
    """Types as text, with their policies, so that types that differ are printed differently."""
    return ", ".join(f"{t} {t.policy}" if t.policy else str(t) for t in found) or "none"


def compare_types(where: Node, what: str, want: Sequence[Type], got: Sequence[Type]) -> Iterator[RuleViolation]:
    """A violation where types are not the expected ones."""
    if tuple(want) != tuple(got):
        yield RuleViolation(where, f"{what} have other types", format_types(want), format_types(got))


# Rules of functions: definitions (V1), legality (V3), launches (V5), outputs (V6), shapes (V8).


def check_definitions(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V1: each name and value is defined once, and a value is used only after that and inside its block."""
    names = [f.name for f in module.functions]
    if not names:
        yield RuleViolation(module, "a module needs an entry function")
    for number, function in enumerate(module.functions):
        if function.name in names[:number]:
            yield RuleViolation(function, f"the function {function.name} is defined twice")
        yield from _DefinedValues().block(function.body, function)


class _DefinedValues:
    """The values defined so far, and those of them that are in scope."""

    def __init__(self) -> None:
        self.ever: set[Value] = set()
        self.here: set[Value] = set()

    def block(self, block: Block, where: Node | Function) -> Iterator[RuleViolation]:
        """The violations in a block; its values leave the scope at its end."""
        yield from self.define(block.params, where)
        for node in block.nodes:
            yield from self.use(node.args, node)
            for region in node.regions:
                yield from self.block(region, node)
            yield from self.define(node.results, node)
        yield from self.use(block.results, where)
        self.here.difference_update(block.params, *(n.results for n in block.nodes))

    def define(self, values: Sequence[Value], where: Node | Function) -> Iterator[RuleViolation]:
        """Make values known."""
        for value in values:
            if value in self.ever:
                yield RuleViolation(where, "a value is defined twice", received=str(value.type))
            self.ever.add(value)
            self.here.add(value)

    def use(self, values: Sequence[Value], where: Node | Function) -> Iterator[RuleViolation]:
        """Check that values are known."""
        for value in values:
            if value not in self.here:
                yield RuleViolation(where, "a value is used that is not defined before", received=str(value.type))


def pair_with_scopes(module: Module, level: IrLevel) -> list[tuple[Function, LegalityScope | None]]:
    """Each function with its scope at this level; None where the level has no such functions."""
    return [(f, level.others if number else level.entry) for number, f in enumerate(module.functions)]


def check_legality(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V3: ops, parameters and results are legal in their scope."""
    for function, place in pair_with_scopes(module, level):
        if place is None:
            yield RuleViolation(function, f"a {level.name} module has one function")
            continue
        for param in function.params:
            if not place.takes(param.type):
                yield RuleViolation(function, f"a parameter is illegal in {place.name}", place.params, param.type)
        if function.results and not place.returns:
            yield RuleViolation(function, f"{place.name} returns nothing", received=f"{len(function.results)} results")
        yield from _check_block_legality(function.body, place, level)


def _check_block_legality(block: Block, place: LegalityScope, level: IrLevel) -> Iterator[RuleViolation]:
    for node in block.nodes:
        if not place.legal(node.op):
            yield RuleViolation(node, f"illegal in {place.name}", place.ops, node.op.name)
        for region in node.regions:
            yield from _check_block_legality(region, level.regions.get(node.op.name, place), level)


def check_launches(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V5: a launch names a tile function of the module, with operands of its parameters' types and a real grid."""
    kernels = {f.name: f for f in module.functions[1:]}
    for node in walk_module(module):
        if node.op.name != LAUNCH_OP:
            continue
        kernel = kernels.get(node.attrs["kernel"])
        if kernel is None:
            yield RuleViolation(
                node, "no tile function has this name", ", ".join(kernels) or "none", node.attrs["kernel"]
            )
            continue
        yield from compare_types(node, f"the operands of {kernel.name}", get_types(kernel.params), get_types(node.args))
        if not all(_is_size(n) for n in node.attrs["grid"]):
            yield RuleViolation(node, "a grid is a tuple of sizes", received=node.attrs["grid"])


def is_integer_from(value: Any, least: int = 0) -> bool:
    """Whether this is an integer (a bool is none) from `least` on."""
    return type(value) is int and value >= least


def _is_size(value: Any) -> bool:
    """Whether this is a size of a grid: a number, or symbolic."""
    return isinstance(value, Dim) or is_integer_from(value)


def check_outputs(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V6: only an entry that returns nothing counts outputs, which are its last refs; a group has one tile or more."""
    for function, place in pair_with_scopes(module, level):
        count = function.attrs.get("outputs", 0)
        params = get_types(function.params)
        if "outputs" in function.attrs and place is not level.entry or (place and place.returns and count):
            yield RuleViolation(
                function, "outputs are counted by the entry of a schedule or tile module", received=count
            )
        elif not is_integer_from(count) or count > len(params):
            yield RuleViolation(function, "not a number of outputs", f"0 to {len(params)}", count)
        elif not all(isinstance(t, RefType) for t in params[len(params) - count :]):
            yield RuleViolation(
                function, "an output is no ref", "refs", ", ".join(map(str, params[len(params) - count :]))
            )
        if not is_integer_from(function.attrs.get("group", 1), 1):
            yield RuleViolation(function, "not a group size", "1 or more", function.attrs["group"])


def check_static_shapes(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V8: in a tile function the shape of each block, and of memory that is not global, is known."""
    for function, place in pair_with_scopes(module, level):
        if place is level.entry:
            continue
        yield from _check_static_values(function.params, function)
        for node in function.body.walk():
            yield from _check_static_values((*node.results, *(p for r in node.regions for p in r.params)), node)


def _check_static_values(values: Sequence[Value], where: Node | Function) -> Iterator[RuleViolation]:
    for value in values:
        if not _is_global(value.type) and not all(isinstance(s, int) for s in value.type.shape):
            yield RuleViolation(where, "a shape in a tile function is not static", "sizes that are numbers", value.type)


def _is_global(type: Type) -> bool:
    return isinstance(type, RefType) and type.space == GLOBAL


# Rules of single nodes: result types (V2) and attributes (V7).


# Operands with these names are refs; all others are tensors.
_REF_OPERANDS: Mapping[str, Any] = {
    "ref": RefType,
    "refs": RefType,
    "dst": RefType,
    "src": RefType,
    "a_ref": RefType,
    "b_ref": RefType,
    "args": (RefType, TensorType),
}
_ATTRIBUTE_KINDS: Mapping[str, type] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "tuple": tuple,
    "DType": DType,
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# The exceptions that a type rule raises for operands or attributes that it does not expect.
_TYPE_RULE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError)


def check_result_types(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V2: operands are of the kind and number the op takes, and results of the types its rule gives."""
    for node in walk_module(module):
        if node.op.name in CONTROL_OPS | FLOW_OPS:  # their types are V4's
            continue
        yield from _check_operands(node)
        yield from _check_results(node)


def _check_operands(node: Node) -> Iterator[RuleViolation]:
    names = match_operand_names(node.op, len(node.args))
    if names is None:
        yield RuleViolation(node, "another number of operands", ", ".join(node.op.operands) or "none", len(node.args))
        return
    for name, value in zip(names, node.args, strict=True):
        if not isinstance(value.type, _REF_OPERANDS.get(name, TensorType)):
            want = "a ref" if name in _REF_OPERANDS else "a tensor"
            yield RuleViolation(node, f"the operand {name} is of another kind", want, value.type)


def match_operand_names(op: Op, count: int) -> list[str] | None:
    """The name of each of `count` operands; None where the op does not take so many."""
    fixed, rest, needed = _read_operands(op)
    if count < needed or (not rest and count > len(fixed)):
        return None
    names = fixed[:count]
    return names + rest * (count - len(names))


@functools.cache
def _read_operands(op: Op) -> tuple[list[str], list[str], int]:
    """The names of the operands of an op, the name of those after them, and how many it needs."""
    parameters = inspect.signature(op.ref).parameters.values()
    fixed = [p for p in parameters if p.kind in _POSITIONAL]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    return [p.name for p in fixed], rest, sum(p.default is p.empty for p in fixed)


def _check_results(node: Node) -> Iterator[RuleViolation]:
    try:
        want = node.op.result_types(get_types(node.args), node.attrs)
    except TesseraError as error:
        yield RuleViolation(node, error.message, error.expected, error.received)
    except _TYPE_RULE_ERRORS as error:
        yield RuleViolation(node, f"its type rule fails on these operands: {error}")
    else:
        yield from compare_types(node, "the results", want, get_types(node.results))


def check_attributes(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V7: a node has exactly the attributes of its op, of the declared kinds, and each can be printed."""
    for node in walk_module(module):
        want, got = set(node.op.attrs), set(node.attrs)
        if want != got:
            yield RuleViolation(
                node, "other attributes", ", ".join(sorted(want)) or "none", ", ".join(sorted(got)) or "none"
            )
        else:
            yield from _check_attribute_values(node)
    holders: tuple[Module | Function, ...] = (module, *module.functions)
    for holder in holders:
        if not is_printable(holder.attrs) or "sym_name" in holder.attrs:
            yield RuleViolation(holder, "an attribute cannot be printed", received=dict(holder.attrs))


def _check_attribute_values(node: Node) -> Iterator[RuleViolation]:
    for name, parameter in node.op.attrs.items():
        value = node.attrs[name]
        kind = _ATTRIBUTE_KINDS.get(str(parameter.annotation).partition("[")[0], object)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or not is_printable(value):
            yield RuleViolation(node, f"the attribute {name} is of another kind", parameter.annotation, f"{value!r}")


# Regions (V4).


_INDEX, _BOOL = scalar(int64), scalar(bool_)


def check_regions(module: Module, level: IrLevel) -> Iterator[RuleViolation]:
    """V4: the regions of a node have the parameters and results that its op requires."""
    for node in walk_module(module):
        count, rule = _REGION_RULES.get(node.op.name, (0, _check_nothing))
        if len(node.regions) != count:
            yield RuleViolation(node, "another number of regions", count, len(node.regions))
        else:
            yield from rule(node)
            if node.op.name in FLOW_OPS and any(region.free for region in node.regions):
                yield RuleViolation(node, "a region uses what is not its parameter")


def _check_nothing(node: Node) -> Iterator[RuleViolation]:
    return iter(())


def _check_for(node: Node) -> Iterator[RuleViolation]:
    (body,) = node.regions
    carried = get_types(node.args[3:])
    yield from compare_types(node, "the bounds", (_INDEX,) * 3, get_types(node.args[:3]))
    yield from compare_types(node, "the parameters of the region", (_INDEX, *carried), get_types(body.params))
    yield from compare_types(node, "the values yielded", carried, get_types(body.results))
    yield from compare_types(node, "the results", carried, get_types(node.results))


def _check_while(node: Node) -> Iterator[RuleViolation]:
    condition, body = node.regions
    carried = get_types(node.args)
    yield from compare_types(node, "the parameters of the condition", carried, get_types(condition.params))
    yield from compare_types(node, "the values of the condition", (_BOOL,), get_types(condition.results))
    yield from compare_types(node, "the parameters of the region", carried, get_types(body.params))
    yield from compare_types(node, "the values yielded", carried, get_types(body.results))
    yield from compare_types(node, "the results", carried, get_types(node.results))


def _check_if(node: Node) -> Iterator[RuleViolation]:
    yield from compare_types(node, "the operands", (_BOOL,), get_types(node.args))
    for branch in node.regions:
        yield from compare_types(node, "the parameters of a branch", (), get_types(branch.params))
        yield from compare_types(node, "the values of a branch", get_types(node.results), get_types(branch.results))


def _check_kernel(node: Node) -> Iterator[RuleViolation]:
    (body,) = node.regions
    yield from compare_types(node, "the parameters of the region", get_types(node.args), get_types(body.params))
    yield from compare_types(node, "the values yielded", (), get_types(body.results))


def _check_scan(node: Node) -> Iterator[RuleViolation]:
    (body,) = node.regions
    carry, xs, length = (node.attrs[k] for k in ("carry", "xs", "length"))
    stacks = node.args[carry : carry + xs]
    if len(node.args) < carry + xs or not all(s.type.shape[:1] == (length,) for s in stacks):
        yield RuleViolation(node, "the stacks are not of the scan's length", length, get_types(stacks))
        return
    slices = tuple(s.type.with_shape(s.type.shape[1:]) for s in stacks)  # type: ignore[union-attr]
    carried, consts = get_types(node.args[:carry]), get_types(node.args[carry + xs :])
    made = tuple(v.type.with_shape((length, *v.type.shape)) for v in body.results[carry:])  # type: ignore[union-attr]
    yield from compare_types(node, "the parameters of the region", (*carried, *slices, *consts), get_types(body.params))
    yield from compare_types(node, "the values carried on", carried, get_types(body.results[:carry]))
    yield from compare_types(node, "the results", (*carried, *made), get_types(node.results))


def _check_cond(node: Node) -> Iterator[RuleViolation]:
    yield from compare_types(node, "the condition", (_BOOL,), get_types(node.args[:1]))
    for branch in node.regions:
        yield from compare_types(node, "the parameters of a branch", get_types(node.args[1:]), get_types(branch.params))
        yield from compare_types(node, "the values of a branch", get_types(node.results), get_types(branch.results))


def _check_while_loop(node: Node) -> Iterator[RuleViolation]:
    test, body = node.regions
    carry, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    carried = get_types(node.args[:carry])
    asked, consts = get_types(node.args[carry:end]), get_types(node.args[end:])
    yield from compare_types(node, "the parameters of the condition", (*carried, *asked), get_types(test.params))
    yield from compare_types(node, "the values of the condition", (_BOOL,), get_types(test.results))
    yield from compare_types(node, "the parameters of the region", (*carried, *consts), get_types(body.params))
    yield from compare_types(node, "the values yielded", carried, get_types(body.results))
    yield from compare_types(node, "the results", carried, get_types(node.results))


def _check_graph_launch(node: Node) -> Iterator[RuleViolation]:
    (body,) = node.regions
    held = tuple(RefType.of(v.type) for v in node.args)  # type: ignore[arg-type]
    yield from compare_types(node, "the first parameters of the region", held, get_types(body.params[: len(held)]))
    yield from _check_yields_nothing(node, body)
    if not all(_is_size(n) for n in node.attrs["grid"]):
        yield RuleViolation(node, "a grid is a tuple of sizes", received=node.attrs["grid"])
    if not is_integer_from(node.attrs["attrs"].get("group", 1), 1):
        yield RuleViolation(node, "not a group size", "1 or more", node.attrs["attrs"]["group"])
    written = node.attrs["written"]
    if not {*range(len(held), len(body.params))} <= {*written} <= {*range(len(body.params))}:
        yield RuleViolation(node, "the written memories are others", f"some of {len(body.params)}", written)
        return
    made = tuple(RefType.of(v.type) for v in node.results)  # type: ignore[arg-type]
    yield from compare_types(node, "the results", tuple(body.params[i].type for i in written), made)


def _check_host_loop(node: Node) -> Iterator[RuleViolation]:
    yield from compare_types(node, "the parameters of the region", (_INDEX,), get_types(node.regions[0].params))
    yield from _check_yields_nothing(node, node.regions[0])


def _check_yields_nothing(node: Node, *regions: Block) -> Iterator[RuleViolation]:
    for region in regions:
        yield from compare_types(node, "the values yielded", (), get_types(region.results))


def _check_host_regions(node: Node) -> Iterator[RuleViolation]:
    yield from _check_yields_nothing(node, *node.regions)
    for region in node.regions:
        yield from compare_types(node, "the parameters of a region", (), get_types(region.params))


_REGION_RULES: Mapping[str, tuple[int, Callable[[Node], Iterator[RuleViolation]]]] = {
    "ts.for": (1, _check_for),
    "ts.while": (2, _check_while),
    "ts.if": (2, _check_if),
    KERNEL_OP: (1, _check_kernel),
    "ts.scan": (1, _check_scan),
    "ts.cond": (2, _check_cond),
    "ts.while_loop": (2, _check_while_loop),
    GRAPH_LAUNCH_OP: (1, _check_graph_launch),
    "host.loop": (1, _check_host_loop),
    "host.while": (2, _check_host_regions),
    "host.if": (2, _check_host_regions),
}


# The verifier: each rule relies on those before it.


VERIFIER_RULES: Mapping[str, Callable[[Module, IrLevel], Iterator[RuleViolation]]] = {
    "V1": check_definitions,
    "V2": check_result_types,
    "V3": check_legality,
    "V4": check_regions,
    "V5": check_launches,
    "V6": check_outputs,
    "V7": check_attributes,
    "V8": check_static_shapes,
}


def verify(module: Module) -> Module:
    """Verify a module against the rules of its level, and return it.

    Raises:
        VerifyError: a rule is violated; the message begins with the number of the rule and names the op.
    """
    level = LEVELS.get(module.level)
    if level is None:
        raise VerifyError("the module's level is unknown", expected=", ".join(LEVELS), received=module.level)
    for number in level.rules:
        for violation in VERIFIER_RULES[number](module, level):
            raise _make_error(number, violation)
    return module


# The rules that do not depend on the level.
FUNCTION_RULES = ("V1", "V2", "V4", "V7")


def verify_function(function: Function) -> Function:
    """Verify a function against the rules of every level (definitions, types, regions, attributes), and return it.

    Raises:
        VerifyError: a rule is violated; the message begins with the number of the rule and names the op.
    """
    module = Module("graph", (function,))
    for number in FUNCTION_RULES:
        for violation in VERIFIER_RULES[number](module, LEVELS["graph"]):
            raise _make_error(number, violation)
    return function


def _make_error(number: str, violation: RuleViolation) -> TesseraError:
    where = violation.where
    error = VerifyError(
        f"{number}: {_describe_violator(where)}: {violation.message}",
        expected=violation.expected,
        received=violation.received,
    )
    return error if isinstance(where, Module) else error.at(where.loc)


def _describe_violator(where: Node | Function | Module) -> str:
    if isinstance(where, Node):
        return where.op.name
    return f"function {where.name}" if isinstance(where, Function) else f"{where.level} module"
