"""How each op on blocks is emitted: operations on whole descriptors where there is one, else loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.codegen.csl.element import LONGEST_STRIDE, Element, block_size, descriptor, last_uses, unsupported
from tessera.codegen.csl.scalars import expression, literal
from tessera.codegen.csl.scalars import rows as scalar_rows
from tessera.codegen.csl.views import View, merged, row_major, spelled
from tessera.ir.core import Block, Node
from tessera.op import Rules
from tessera.ops import basic, control, linalg, mesh, reduce, shape, tile
from tessera.ops import elementwise as e
from tessera.types import f32

# row(element, node, *views) emits a node and gives where its result lies.
emit = Rules("csl emission")

# Ops of f32 that have an operation on whole blocks.
WHOLE = {e.add: "@fadds", e.sub: "@fsubs", e.mul: "@fmuls", e.neg: "@fnegs", e.abs: "@fabss"}
GATHER = {"sum": ("@fadds", "{0} + {1}"), "max": ("@fmaxs", "if ({1} > {0} or {1} != {1}) {1} else {0}"),
          "min": ("", "if ({1} < {0} or {1} != {1}) {1} else {0}")}  # fmt: skip


def statements(element: Element, block: Block) -> None:
    """Emit the nodes of a block; values that nothing needs any more give their room back."""
    last = last_uses(block)
    for place, node in enumerate(block.nodes):
        row = emit.get(node.op)
        if row is None:
            raise unsupported(node, "the mesh has no rule for it")
        _said(element, node)
        found = row(element, node, *(element.values.get(v) for v in node.args))
        if isinstance(found, View):
            element.hold(node.out, found)
        for value in last.get(place, ()):
            element.drop(value)


def _said(element: Element, node: Node) -> None:
    """Name the source line where it changes."""
    text = f"// {node.loc}"
    if node.loc.line and element.comment != text:
        element.comment = text
        element.say(text)


@emit(*(op for op in scalar_rows))
def _(element, node, *operands):
    if all(v.literal for v in operands) and not node.out.type.shape:
        return View(spelled(node.out.type), (), literal=expression(element, node, [v.literal for v in operands]))
    out = element.fresh(node.out.type)
    views = [out, *(v.repeated(out.shape) for v in operands)]
    whole = WHOLE.get(node.op) if all(t.dtype == f32 for t in (*node.types, node.out.type)) else None
    if whole and not all(v.literal for v in operands) and element.operation(whole, views):
        return out
    element.loop(views, lambda t: f"{t[0]} = {expression(element, node, t[1:])};")
    return out


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
    if node.attrs["dtype"].is_float:
        raise unsupported(node, "of floats")
    out = element.fresh(node.out.type)
    row = element.room((sizes[axis],), out.type)
    with element.inner(f"for (@range(i16, {sizes[axis]})) |place|"):
        element.say(f"{row.at(['place'])} = @as({out.type}, place);")
    spread = tuple(1 if a == axis else 0 for a in range(len(sizes)))
    element.copy(out, View(out.type, sizes, row.buffer, 0, spread))
    element.release(row)
    return out


@emit(tile.program_id)
def _(element, node):
    return View("i32", (), literal="column" if node.attrs["axis"] else "row")


@emit(tile.grid_size)
def _(element, node):
    return View("i32", (), literal=str((*element.grid, 1, 1)[node.attrs["axis"]]))


@emit(reduce.sum, reduce.max, reduce.min)
def _(element, node, x):
    kind, axes = node.op.__name__, [a % len(x.shape) for a in node.attrs["axis"]]
    out = element.fresh(node.out.type)
    builtin, step = GATHER[kind]
    zero = View(out.type, out.shape, literal=literal(0, node.out.type.dtype))
    element.copy(out, zero if kind == "sum" else _first(x, axes, out.shape))
    kept = iter(out.strides if not node.attrs["keepdims"] else [s for a, s in enumerate(out.strides) if a not in axes])
    wide = View(out.type, x.shape, out.buffer, 0, tuple(0 if a in axes else next(kept) for a in range(len(x.shape))))
    if not (x.type == out.type == "f32" and builtin and not x.literal and _in_rows(element, builtin, wide, x, axes)):
        element.loop([wide, x], lambda t: f"{t[0]} = {step.format(t[0], f'@as({out.type}, {t[1]})')};")
    return out


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
        descriptor(View(v.type, (inner,), v.buffer, v.offset, (s,)), (inner,))
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


@emit(linalg.dot)
def _(element, node, a, b):
    wide = node.types[0].accumulate
    if wide != f32 or node.attrs["dtype"] != f32:
        raise unsupported(node, "products accumulate in f32")
    left, right = _single(element, a), _single(element, b)
    out = element.fresh(node.out.type)
    element.copy(out, View("f32", out.shape, literal="0.0"))
    batch = out.shape[:-2]
    names = [f"b{next(element.names)}" for _ in batch]
    for name, size in zip(names, batch, strict=True):
        element.say(f"for (@range(i16, {size})) |{name}| {{")
        element.depth += 1
    _rows(element, out, left, right, names)
    for _ in batch:
        element.depth -= 1
        element.say("}")
    for made, given in ((left, a), (right, b)):
        if made is not given:
            element.release(made)
    return out


def _single(element: Element, x: View) -> View:
    """A view in f32, its elements one after another where a row could not be walked otherwise."""
    if x.literal or x.type == "f32":
        return x
    made = element.room(x.shape, "f32")
    element.loop([made, x], lambda t: f"{t[0]} = @as(f32, {t[1]});")
    return made


def _rows(element: Element, out: View, a: View, b: View, batch: list[str]) -> None:
    """out += a b, a row (or, where that is longer, a column) of the result at a time."""
    rows, columns = out.shape[-2:]
    summed = a.shape[-1]
    if not rows * columns * summed:
        return
    if rows > columns:  # the same with everything turned round
        turned = [v.permuted([*range(len(batch)), len(batch) + 1, len(batch)]) for v in (out, b, a)]
        out, a, b, rows, columns = (*turned, columns, rows)
    m, k = (f"{n}{next(element.names)}" for n in "mk")
    target, source = _row(out), _row(b)
    with element.inner(f"for (@range(i16, {rows})) |{m}|"), element.inner(f"for (@range(i16, {summed})) |{k}|"):
        factor = a.at([*batch, m, k])
        if target and source:
            into = f"@increment_dsd_offset({target}, {_offset(out, [*batch, m])}, f32)"
            line = f"@increment_dsd_offset({source}, {_offset(b, [*batch, k])}, f32)"
            element.say(f"const into = {into};")
            element.say(f"@fmacs(into, into, {line}, {factor});")
        else:
            with element.inner(f"for (@range(i16, {columns})) |n|"):
                element.say(f"{out.at([*batch, m, 'n'])} += {factor} * {b.at([*batch, k, 'n'])};")


def _row(x: View) -> str | None:
    """The descriptor of the first row of a matrix."""
    if x.literal or not -128 < x.strides[-1] < 128:
        return None
    return descriptor(View(x.type, (x.shape[-1],), x.buffer, x.offset, (x.strides[-1],)), (x.shape[-1],))


def _offset(x: View, names: list[str]) -> str:
    terms = [f"{n} * {s}" for n, s in zip(names, x.strides, strict=False) if s]
    return " + ".join(terms) or "0"


@emit(control.for_)
def _(element, node, lower, upper, step, *carried):
    body = node.regions[0]
    for value, start in zip(node.results, carried, strict=True):
        place = element.fresh(value.type)
        element.copy(place, start)
        element.hold(value, place)
    element.hold(body.params[0], View("i32", (), literal=f"turn{next(element.names)}"))
    name = element.values[body.params[0]].literal
    for param, value in zip(body.params[1:], node.results, strict=True):
        element.hold(param, element.values[value])
    with element.inner(f"for (@range(i32, {lower.literal}, {upper.literal}, {step.literal})) |{name}|"):
        statements(element, body)
        for result, value in zip(body.results, node.results, strict=True):
            element.copy(element.values[value], element.values[result])
    for value in (*body.params, *body.results):
        element.drop(value)
    return None


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


@emit(mesh.panel)
def _(element, node, x, number):
    axis, out = node.attrs["axis"] % len(x.shape), element.fresh(node.out.type)
    if x.literal:
        return x.repeated(out.shape)
    size = out.shape[axis]
    moved = replace(x, shape=out.shape)
    first = f"{number.literal} * {size * x.strides[axis]}"
    element.loop([out, moved], lambda t: f"{t[0]} = {_moved(t[1], first)};")
    return out


def _moved(text: str, first: str) -> str:
    name, _, index = text.partition("[")
    return f"{name}[@as(i16, {first}) + {index}"
