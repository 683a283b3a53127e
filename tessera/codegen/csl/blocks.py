"""How each op on blocks is emitted: operations on whole descriptors where there is one, else loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.codegen.csl.descriptors import LONGEST_STRIDE, block_size
from tessera.codegen.csl.element import Element, unsupported
from tessera.codegen.csl.fuse import deferred, last_uses, settled
from tessera.codegen.csl.scalars import NARROW, expression, literal, narrow, widen
from tessera.codegen.csl.scalars import rows as scalar_rows
from tessera.codegen.csl.views import FLOATS, SPELLING, View, merged, row_major, spelled
from tessera.codegen.policies import check_plain
from tessera.codegen.small_floats import FORMS
from tessera.ir.core import Block, Node, Value
from tessera.op import Rules
from tessera.ops import basic, mesh, reduce, shape, tile
from tessera.ops import elementwise as e
from tessera.types import bool_, f16, f32, int16, int64

# row(element, node, *views) emits a node and gives where its result lies.
emit = Rules("csl emission")

# Operations on whole blocks, by op and element type: what rounds once in 16 bits is as if computed in f32.
_FLOAT = {e.add: "@fadd", e.sub: "@fsub", e.mul: "@fmul", e.neg: "@fneg", e.abs: "@fabs"}
_BITS = {e.bitwise_and: "@and16", e.bitwise_or: "@or16", e.bitwise_xor: "@xor16"}
WHOLE = {
    **{(op, f32): f"{name}s" for op, name in _FLOAT.items()},
    **{(op, f16): f"{name}h" for op, name in _FLOAT.items()},
    **{(op, dtype): name for op, name in _BITS.items() for dtype in (int16, bool_)},
    (e.add, int16): "@add16",
    (e.sub, int16): "@sub16",
}
CONVERT = {(f16, f32): "@fh2s", (f32, f16): "@fs2h"}
GATHER = {"sum": ("@fadds", "{0} + {1}"), "max": ("@fmaxs", "if ({1} > {0} or {1} != {1}) {1} else {0}"),
          "min": ("", "if ({1} < {0} or {1} != {1}) {1} else {0}")}  # fmt: skip


def statements(element: Element, block: Block) -> None:
    """Emit the nodes of a block; values that nothing needs any more give their room back."""
    later = deferred(block, _looped, scalar_rows.__contains__) if element.fuses else {}
    element.later.update(later)
    last, params = last_uses(block, settled(block, later)), frozenset(block.params)
    for place, node in enumerate(block.nodes):
        if node.results and node.results[0] in later:
            check_plain(node, "csl")
            continue
        element.params, element.dying = params, frozenset(last.get(place, ()))
        row = emit.get(node.op)
        if row is None:
            raise unsupported(node, "there is no rule for it")
        check_plain(node, "csl")
        _said(element, node)
        found = row(element, node, *(element.values.get(v) for v in node.args))
        if isinstance(found, View):
            element.hold(node.out, found)
        for value in last.get(place, ()):
            if value not in params:  # their room is the loop's
                element.drop(value)


def _said(element: Element, node: Node) -> None:
    """Name the source line where it changes."""
    text = f"// {node.loc}"
    if node.loc.line and element.comment != text:
        element.comment = text
        element.say(text)


@emit(*(op for op in scalar_rows))
def _(element, node, *operands):
    if not node.out.type.shape and all(v.literal for v in operands):
        texts = [v.literal for v in operands]
        return View(spelled(node.out.type), (), literal=expression(element, node, texts, index=True))
    out = element.fresh(node.out.type)
    if node.op is e.where and all(operands) and not any(operands[0].repeated(out.shape).strides):
        _one_of(element, out, *operands)
        return out
    # Only those that take two operands in either order take a number first; subtraction of floats does as well.
    plain = all(operands) and not all(v.literal for v in operands)
    if plain and not _looped(node) and not (_builtin(node) == "@sub16" and operands[0].literal):
        if element.operation(str(_builtin(node)), [out, *(v.repeated(out.shape) for v in operands)]):
            return out
    leaves = _leaves(element, node)
    views = [typed(element.values[v].repeated(out.shape), v) for v in leaves]
    element.loop([out, *views], lambda t: _fused(element, node, dict(zip(leaves, t[1:], strict=True)), t[0]))
    return out


def _one_of(element: Element, out: View, condition: View, x: View, y: View) -> None:
    """One block or another, where the condition is the same for all of it."""
    truth = condition.repeated(out.shape).at(["0"] * len(out.shape))
    for head, chosen in ((f"if ({truth} != 0)", x), ("else", y)):
        with element.inner(head):
            element.copy(out, chosen.repeated(out.shape))


def _looped(node: Node) -> bool:
    """Whether a pointwise node needs a loop, having no operation on whole blocks."""
    return _builtin(node) is None


def _builtin(node: Node) -> str | None:
    """The operation on whole blocks that a pointwise node is, if there is one."""
    types = tuple(t.dtype for t in (*node.types, node.out.type))
    if node.op is basic.cast:
        return CONVERT.get(types)  # type: ignore[arg-type]
    return WHOLE.get((node.op, types[0])) if len(set(types)) == 1 else None


def _leaves(element: Element, node: Node) -> list[Value]:
    """The values that lie somewhere from which a node, with what is deferred to it, is computed."""
    found: dict[Value, None] = {}
    for value in node.args:
        found.update(dict.fromkeys(_leaves(element, element.later[value]) if value in element.later else [value]))
    return list(found)


def _fused(element: Element, node: Node, texts: dict[Value, str], target: str) -> str:
    """The statements that compute a node at one place, what is deferred to it first."""
    lines: list[str] = []

    def made(value: Value) -> str:
        if value not in texts:
            inner = element.later[value]
            text = expression(element, inner, [made(a) for a in inner.args])
            texts[value] = f"v{next(element.names)}"
            lines.append(f"const {texts[value]}: {SPELLING[inner.out.type.dtype]} = {text};")
        return texts[value]

    lines.append(f"{target} = {expression(element, node, [made(a) for a in node.args])};")
    return "\n".join(lines)


def typed(view: View, value: Value) -> View:
    """A view whose text has the type of its value: an index is of 32 bits, or a plain number."""
    known = view.literal and value.type.dtype == int64
    return replace(view, literal=f"@as(i64, {view.literal})") if known else view


@emit(basic.full)
def _(element, node):
    text = literal(node.attrs["value"], node.attrs["dtype"])
    return View(spelled(node.out.type), tuple(node.attrs["shape"]), literal=text)


@emit(basic.broadcast_to)
def _(element, node, x):
    return x.repeated(tuple(node.attrs["shape"]))


@emit(shape.permute)
def _(element, node, x):
    return x.permuted([a % len(x.shape) for a in node.attrs["axes"]])


@emit(shape.reshape)
def _(element, node, x):
    wanted = tuple(node.attrs["shape"])
    found = x.reshaped(wanted)
    if found is None:
        found = element.plain(x).reshaped(wanted)
    return found


@emit(shape.iota)
def _(element, node):
    sizes, axis = tuple(node.attrs["shape"]), node.attrs["axis"] % len(node.attrs["shape"])
    out = element.fresh(node.out.type)
    row = element.room((sizes[axis],), out.type)
    with element.inner(f"for (@range(i16, {sizes[axis]})) |place|"):
        element.say(
            f"{row.at(['place'])} = {NARROW.get(node.attrs['dtype'], f'@as({out.type}, {{0}})').format('place')};"
        )
    spread = tuple(1 if a == axis else 0 for a in range(len(sizes)))
    element.copy(out, View(out.type, sizes, row.buffer, 0, spread))
    element.release(row)
    return out


@emit(tile.program_id)
def _(element, node):
    places = [name for name, _ in element.programs] or ["row", "column"]
    return View("i32", (), literal=(*places, "0", "0")[node.attrs["axis"]])


@emit(tile.grid_size)
def _(element, node):
    sizes = [size for _, size in element.programs] or element.grid
    return View("i32", (), literal=str((*sizes, 1, 1)[node.attrs["axis"]]))


@emit(tile.local_id, tile.group_size)
def _(element, node):
    return View("i32", (), literal=str(int(node.op is tile.group_size)))


@emit(reduce.sum, reduce.max, reduce.min)
def _(element, node, x):
    out, dtype = element.fresh(node.out.type), node.types[0].dtype
    if dtype not in FORMS:
        _reduced(element, node, out, x)
        return out
    wide, total = element.room(x.shape, "f32"), element.room(out.shape, "f32")
    element.loop([wide, x], lambda t: f"{t[0]} = {widen(element, dtype, t[1])};")
    _reduced(element, node, total, wide)
    element.loop([out, total], lambda t: f"{t[0]} = {narrow(element, node.out.type.dtype, t[1])};")
    element.release(wide)
    element.release(total)
    return out


def _reduced(element: Element, node: Node, out: View, x: View) -> None:
    """Reduce along a node's axes."""
    kind, axes = node.op.__name__, [a % len(x.shape) for a in node.attrs["axis"]]
    builtin, step = GATHER[kind]
    zero = View(out.type, out.shape, literal="0.0" if out.type in FLOATS else "0")
    element.copy(out, zero if kind == "sum" else _first(x, axes, out.shape))
    kept = iter(out.strides if not node.attrs["keepdims"] else [s for a, s in enumerate(out.strides) if a not in axes])
    wide = View(out.type, x.shape, out.buffer, 0, tuple(0 if a in axes else next(kept) for a in range(len(x.shape))))
    if not (x.type == out.type == "f32" and builtin and not x.literal and _in_rows(element, builtin, wide, x, axes)):
        element.loop([wide, x], lambda t: f"{t[0]} = {step.format(t[0], f'@as({out.type}, {t[1]})')};")


def _in_rows(element: Element, builtin: str, out: View, x: View, axes: Sequence[int]) -> bool:
    """Reduce by an operation for each element that is kept, or for each that is not: whichever are fewer."""
    kept = [a for a in range(len(x.shape)) if a not in axes]
    pairs = (merged([_chosen(v, group) for v in (out, x)]) for group in (kept, list(axes)))
    (held, (into, along)), (gone, (_, across)) = pairs
    if max(len(held), len(gone)) > 1 or not block_size(x.shape):
        return False
    size, length = (*held, 1)[0], (*gone, 1)[0]
    steps = (*into.strides, 0)[0], (*along.strides, 0)[0], (*across.strides, 0)[0]
    outer, inner = (length, size) if size >= length else (size, length)
    strides = (steps[0], steps[1], 0, steps[2]) if size >= length else (0, steps[2], steps[0], steps[1])
    if max(map(abs, strides[:2])) > LONGEST_STRIDE:
        return False
    target, source = (
        element.described(View(v.type, (inner,), v.buffer, v.offset, (s,)), (inner,))
        for v, s in ((out, strides[0]), (x, strides[1]))
    )
    name = f"r{next(element.names)}"
    with element.inner(f"for (@range(i16, {outer})) |{name}|"):
        element.say(f"const into = @increment_dsd_offset({target}, {name} * {strides[2]}, f32);")
        element.say(f"{builtin}(into, into, @increment_dsd_offset({source}, {name} * {strides[3]}, f32));")
    return True


def _chosen(x: View, axes: Sequence[int]) -> View:
    """A view walked along some of its axes alone."""
    return View(x.type, tuple(x.shape[a] for a in axes), x.buffer, x.offset, tuple(x.strides[a] for a in axes))


def _first(x: View, axes: Sequence[int], shape_: tuple[int, ...]) -> View:
    """The first element along the reduced axes."""
    if x.literal:
        return replace(x, shape=shape_)
    kept = [s for a, s in enumerate(x.strides) if a not in axes]
    strides = tuple(kept) if len(kept) == len(shape_) else tuple(0 if a in axes else s for a, s in enumerate(x.strides))
    return View(x.type, shape_, x.buffer, x.offset, strides)


@emit(mesh.read)
def _(element, node, ref):
    sizes = tuple(node.attrs["shape"])
    buffer = element.declare(node.args[0], sizes)
    return View(buffer.type, sizes, buffer, 0, row_major(sizes))


@emit(mesh.write)
def _(element, node, ref, value):
    if element.hand_over(node.args[0], value):
        return None
    buffer = element.declare(node.args[0], node.args[1].type.shape)
    element.copy(View(buffer.type, value.shape, buffer, 0, row_major(value.shape)), value)
    return None
