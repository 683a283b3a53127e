"""Size padding: a Graph function of symbolic sizes becomes one of upper bounds, whose sizes are arguments.

Elements past a size may hold anything: what sums, compares or selects over a padded axis reads its identity there
instead (bounded dynamic shapes, as XLA's dynamic padder).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import Dim, Size, evaluate_shape, symbol_names
from tessera.core.types import TensorType, int32, int64
from tessera.ir.builder import Builder, override_numerics
from tessera.ir.core import Attrs, Function, Node, Value, evaluate_attribute, find_size_names
from tessera.ir.rewrite import expand_composites
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import basic, contractions, elementwise, reduce, running_extremes, shape
from tessera.ops.tensor.reduce import find_neutral_element

# For each axis its factors, the outermost first: the elements of B*S are those of S for each of B. An axis along which
# a value is the same everywhere has none.
Layout = tuple[tuple[Size, ...], ...]
PADDING_RULES = "pointwise ops, sums, maxima, minima, products, and moves of whole axes"


@dataclass(frozen=True)
class PaddedFunction:
    """A function of upper bounds: its last parameters are the sizes of `names`; `results` are the results' layouts."""

    function: Function
    names: tuple[str, ...]
    results: tuple[Layout, ...]


def pad_sizes(function: Function, upper: Mapping[str, int]) -> PaddedFunction:
    """The function for arrays that are padded to the upper bounds of its sizes.

    Raises:
        UnsupportedOpError: an op would mix padding with elements; it names the op, the size and the line.
    """
    expanded = expand_composites(function, keep=_RULES.__contains__)
    names = find_size_names(expanded)
    padding = _SizePadding(upper)
    params = [Value(_evaluate_type(p.type, upper), p.hint) for p in expanded.params]
    sizes = [Value(TensorType((), int32), f"size {name}") for name in names]
    padding.sizes.update({n: Tensor(v) for n, v in zip(names, sizes, strict=True)})
    for old, new in zip(expanded.params, params, strict=True):
        padding.values[old], padding.layouts[old] = Tensor(new), _make_layout(old)
    with padding.builder.active(), override_numerics(None):
        for node in expanded.body.nodes:
            with padding.builder.at(node.loc):
                padding.rewrite(node)
    results = [padding.values[v] for v in expanded.body.results]
    body = padding.builder.block((*params, *sizes), [r.data for r in results])
    attrs = Attrs({k: v for k, v in function.attrs.items() if k != "constraints"})
    layouts = tuple(padding.get_layout(v) for v in expanded.body.results)
    return PaddedFunction(Function(function.name, body, attrs, function.loc), names, layouts)


def _evaluate_type(type: Any, upper: Mapping[str, int]) -> Any:
    return type.evaluate(upper)


def _make_layout(value: Value) -> Layout:
    return tuple((n,) for n in value.type.shape)


def _has_symbols(factors: Sequence[Size]) -> bool:
    return any(isinstance(f, Dim) for f in factors)


@dataclass
class _SizePadding:
    """A rewrite under way: what each value has become, and which elements of its axes are its own."""

    upper: Mapping[str, int]
    builder: Builder = field(default_factory=Builder)
    values: dict[Value, Tensor] = field(default_factory=dict)
    layouts: dict[Value, Layout] = field(default_factory=dict)
    sizes: dict[str, Tensor] = field(default_factory=dict)

    def rewrite(self, node: Node) -> None:
        """Add the node for upper bounds."""
        rule = _RULES.get(node.op) or (_pad_pointwise if node.op.pointwise else None)
        if rule is not None and not node.regions:
            rule(self, node)
            return
        named = [n for v in (*node.args, *node.results) for n in symbol_names(v.type.shape)]  # type: ignore[union-attr]
        inner = {n for r in node.regions for n in find_size_names(Function("region", r))}
        if named or inner or node.regions:
            raise self.make_error(node, (*named, *inner))
        self.add(node, [self.values[v] for v in node.args], [_make_layout(v) for v in node.results])

    def add(self, node: Node, args: Sequence[Tensor], layouts: Sequence[Layout], op: Any = None) -> None:
        """Add the op on other operands; its results have these layouts."""
        attrs = {k: evaluate_attribute(v, self.upper) for k, v in node.attrs.items()}
        types = tuple(v.type.evaluate(self.upper) for v in node.results)
        made = self.builder.add(op or node.op, [a.data for a in args], attrs, types=types)
        for old, new, layout in zip(node.results, made.results, layouts, strict=True):
            self.values[old], self.layouts[old] = Tensor(new), layout

    def get_layout(self, value: Value) -> Layout:
        """The factors of each axis, those of a constant too."""
        return tuple(held or (n,) for held, n in zip(self.layouts[value], value.type.shape, strict=True))

    def make_error(self, node: Node, names: Sequence[str] = ()) -> UnsupportedOpError:
        """The error for an op that would read padding."""
        sizes = ", ".join(sorted(set(names))) or "a symbolic size"
        return UnsupportedOpError(
            f"{node.op.name} cannot run on arrays that are padded along {sizes}", location=node.loc,
            expected=PADDING_RULES, suggestion="build for the size itself, or for llvm, which takes symbolic sizes",
        )  # fmt: skip

    def size(self, size: Size) -> Any:
        """A size as a value of the program."""
        if not isinstance(size, Dim):
            return size
        total: Any = 0
        for monomial, count in size.terms:
            product: Any = count.numerator
            for atom in monomial:
                product = product * (self.sizes[atom] if isinstance(atom, str) else self._divide(*atom))
            if count.denominator != 1:
                product = elementwise.floor_divide(product, self.as_scalar(count.denominator))
            total = total + product
        return total

    def _divide(self, sign: str, left: Size, right: Size) -> Any:
        a, b = (self.as_scalar(self.size(n)) for n in (left, right))
        quotient = elementwise.floor_divide(a, b)
        return quotient if sign == "//" else a - quotient * b

    def as_scalar(self, value: Any) -> Tensor:
        """A number or scalar as an int32 scalar."""
        return value if isinstance(value, Tensor) else basic.full(shape=(), value=value, dtype=int32)

    def fill(self, node: Node, operand: Value, axes: Sequence[int], identity: Any) -> Tensor:
        """An operand with a number in place of its padding along some axes."""
        x, layout = self.values[operand], self.get_layout(operand)
        for axis in axes:
            if _has_symbols(layout[axis]):
                keep = self._find_elements(x.type.shape, axis, layout[axis])
                x = elementwise.where(
                    keep, x, basic.full(shape=x.type.shape, value=identity, dtype=x.type.policy or x.dtype)
                )
        return x

    def _find_elements(self, sizes: Sequence[Any], axis: int, factors: Sequence[Size]) -> Tensor:
        """Which elements along an axis are not padding."""
        place = shape.iota(shape=tuple(sizes), axis=axis, dtype=int32)
        keep, stride = None, 1
        for factor in reversed(factors):
            extent = int(evaluate_shape((factor,), self.upper)[0])
            if isinstance(factor, Dim):
                digit = place // stride if stride > 1 else place
                digit = digit % extent if stride * extent < int(sizes[axis]) else digit
                own = elementwise.less(digit, basic.broadcast_to(self.as_scalar(self.size(factor)), shape=tuple(sizes)))
                keep = own if keep is None else elementwise.bitwise_and(keep, own)
            stride *= extent
        assert keep is not None, "the axis is padded"
        return keep

    def join(self, node: Node, layouts: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
        """The factors of an axis that operands share; those of a constant fit any."""
        found = [each for each in layouts if each]
        if any(each != found[0] for each in found):
            raise self.make_error(node, [n for each in found for n in symbol_names(each)])
        return found[0] if found else ()


PaddingRule = Callable[[_SizePadding, Node], None]


def _pad_pointwise(padding: _SizePadding, node: Node) -> None:
    layouts = [padding.layouts[v] for v in node.args if v.type.shape == node.out.type.shape]  # type: ignore[union-attr]
    if node.op is shape.check_index or len(layouts) != len(node.args):
        _pad_checked_index(padding, node)
        return
    joined = tuple(padding.join(node, axis) for axis in zip(*layouts, strict=True))
    padding.add(node, [padding.values[v] for v in node.args], [joined])


def _pad_checked_index(padding: _SizePadding, node: Node) -> None:
    """Indices: padding among them is 0, an index that exists; the axis that they index has a known size."""
    if node.op is not shape.check_index or isinstance(node.attrs["size"], Dim):
        raise padding.make_error(node)
    (indices,) = node.args
    layout = padding.layouts[indices]
    padding.add(node, [padding.fill(node, indices, range(len(layout)), 0)], [layout])


def _pad_iota(padding: _SizePadding, node: Node) -> None:
    along = node.attrs["axis"] % node.out.type.rank
    padding.add(node, [], [tuple((n,) if a == along else () for a, n in enumerate(node.out.type.shape))])


def _pad_constant(padding: _SizePadding, node: Node) -> None:
    padding.add(node, [], [((),) * node.out.type.rank])


def _pad_size(padding: _SizePadding, node: Node) -> None:
    value = padding.as_scalar(padding.size(node.attrs["size"]))
    padding.values[node.out], padding.layouts[node.out] = basic.cast(value, dtype=node.out.type.dtype), ()


def _pad_broadcast(padding: _SizePadding, node: Node) -> None:
    (x,) = node.args
    held, own = padding.layouts[x], x.type.shape  # type: ignore[union-attr]
    rank = node.out.type.rank
    lead = rank - len(own)
    layout = tuple(held[a - lead] if a >= lead and own[a - lead] != 1 else () for a in range(rank))
    padding.add(node, [padding.values[x]], [layout])


def _pad_permute(padding: _SizePadding, node: Node) -> None:
    held = padding.layouts[node.args[0]]
    padding.add(node, [padding.values[node.args[0]]], [tuple(held[a] for a in node.attrs["axes"])])


def _pad_reshape(padding: _SizePadding, node: Node) -> None:
    layout = split_factors(padding.get_layout(node.args[0]), node.out.type.shape)
    if not any(padding.layouts[node.args[0]]):
        layout = ((),) * node.out.type.rank
    if layout is None:
        raise padding.make_error(node, sorted(symbol_names(node.out.type.shape)))
    padding.add(node, [padding.values[node.args[0]]], [layout])


def split_factors(layout: Layout, sizes: Sequence[Size]) -> Layout | None:
    """The factors of each axis of a reshaped value; None where an axis takes a part of a symbolic factor.

    >>> B, S = Dim.of("B"), Dim.of("S")
    >>> split_factors(((B,), (S,), (8,)), (B * S, 2, 4))
    ((B, S), (2,), (4,))
    """
    factors = [f for axis in layout for f in axis if f != 1]
    if 0 in factors:  # no elements: nothing can mix with padding
        return tuple((size,) for size in sizes)
    found = []
    for size in sizes:
        taken: list[Size] = []
        need = size
        while need != 1:
            if not factors:
                return None
            factor = factors.pop(0)
            if need % factor == 0:
                taken.append(factor)
                need = need // factor
            elif isinstance(need, int) and isinstance(factor, int) and factor % need == 0:
                taken.append(need)
                factors.insert(0, factor // need)
                need = 1
            else:
                return None
        found.append(tuple(taken) or (1,))
    return None if factors else tuple(found)


def _pad_reduction(padding: _SizePadding, node: Node) -> None:
    (x,) = node.args
    axis = node.attrs["axis"]
    axes = [a % x.type.rank for a in ((axis,) if isinstance(axis, int) else axis)]  # type: ignore[union-attr]
    held, kind = padding.get_layout(x), node.op.__name__.removeprefix("arg")
    if kind != node.op.__name__ and any(len(held[a]) > 1 and _has_symbols(held[a]) for a in axes):
        raise padding.make_error(node, sorted(symbol_names([n for a in axes for n in held[a]])))  # places move
    given = padding.fill(node, x, axes, find_neutral_element(kind, x.type.dtype))  # type: ignore[arg-type]
    layout = tuple((1,) if a in axes else f for a, f in enumerate(held) if a not in axes or node.attrs["keepdims"])
    padding.add(node, [given], [layout])


def _pad_whole_product(padding: _SizePadding, node: Node) -> None:
    (x,) = node.args
    axes = [a % x.type.rank for a in node.attrs["axis"]]  # type: ignore[union-attr]
    held = padding.get_layout(x)
    layout = tuple((1,) if a in axes else f for a, f in enumerate(held) if a not in axes or node.attrs["keepdims"])
    padding.add(node, [padding.fill(node, x, axes, 1)], [layout])


def _pad_scan(padding: _SizePadding, node: Node) -> None:
    """What is added up to an element comes before the padding."""
    (x,) = node.args
    held = padding.get_layout(x)
    along = held[node.attrs["axis"] % len(held)]
    if len(along) > 1 and _has_symbols(along[1:]):
        raise padding.make_error(node, sorted(symbol_names(along)))
    padding.add(node, [padding.values[x]], [held])


def _pad_product(padding: _SizePadding, node: Node) -> None:
    a, b = node.args
    left, right = padding.get_layout(a), padding.get_layout(b)
    row = max(len(right) - 2, 0)
    padding.join(node, [left[-1], right[row]])
    batch = tuple(padding.join(node, each) for each in zip(left[:-2], right[:-2], strict=True))
    given = [padding.fill(node, a, [len(left) - 1], 0), padding.fill(node, b, [row], 0)]
    padding.add(node, given, [(*batch, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))])


def _pad_slice(padding: _SizePadding, node: Node) -> None:
    """A slice from a known start: the elements before the padding stay there."""
    (x,) = node.args
    held, attrs = padding.get_layout(x), node.attrs
    steps = attrs["step"] or (1,) * len(held)
    layout = []
    for axis, (start, stop, step) in enumerate(zip(attrs["start"], attrs["stop"], steps, strict=True)):
        whole = (start, stop, step) == (0, x.type.shape[axis], 1)  # type: ignore[union-attr]
        symbolic = _has_symbols(held[axis]) or isinstance(start, Dim) or isinstance(stop, Dim)
        if not whole and symbolic and (isinstance(start, Dim) or len(held[axis]) > 1):
            raise padding.make_error(node, sorted(symbol_names((start, stop, *held[axis]))))
        layout.append(held[axis] if whole else (node.out.type.shape[axis],))
    padding.add(node, [padding.values[x]], [tuple(layout)])


def _pad_gather(padding: _SizePadding, node: Node) -> None:
    """Rows at indices, which are those of elements; padding among the indices is 0.

    Those of a padded axis count from the end of its elements, and one behind these is outside.
    """
    x, indices = node.args
    held, own = padding.get_layout(x), padding.get_layout(indices)
    axis = node.attrs["axis"] % len(held)
    if len(held[axis]) > 1 and _has_symbols(held[axis][1:]):  # places move
        raise padding.make_error(node, sorted(symbol_names(held[axis])))
    places = padding.fill(node, indices, range(len(own)), 0)
    if _has_symbols(held[axis]):
        places = _find_places(padding, places, x.type.shape[axis])  # type: ignore[union-attr]
    padding.add(node, [padding.values[x], places], [(*held[:axis], *own, *held[axis + 1 :])])


def _find_places(padding: _SizePadding, indices: Tensor, size: Size) -> Tensor:
    """Indices from 0 on of an axis that has more elements than `size`; those of no element are outside of all."""
    places = basic.cast(indices, dtype=int64)
    end = basic.broadcast_to(basic.cast(padding.as_scalar(padding.size(size)), dtype=int64), shape=places.shape)
    zero = basic.full(shape=places.shape, value=0, dtype=int64)
    places = elementwise.where(elementwise.less(places, zero), places + end, places)
    inside = elementwise.bitwise_and(elementwise.greater_equal(places, zero), elementwise.less(places, end))
    outside = basic.full(shape=places.shape, value=int(evaluate_shape((size,), padding.upper)[0]), dtype=int64)
    return elementwise.where(inside, places, outside)


def _pad_more(padding: _SizePadding, node: Node) -> None:
    """More elements before and after: those after follow the elements, not the padding."""
    (x,) = node.args
    held, low, high = padding.get_layout(x), node.attrs["low"], node.attrs["high"]
    grown = [a for a in range(len(held)) if (low[a] or high[a]) and _has_symbols(held[a])]
    if any(len(held[a]) > 1 or isinstance(low[a], Dim) for a in grown):
        raise padding.make_error(node, sorted(symbol_names([f for a in grown for f in held[a]])))
    new = _make_layout(node.out)
    layout = tuple(new[a] if low[a] or high[a] else f for a, f in enumerate(held))
    padding.add(node, [padding.fill(node, x, grown, node.attrs["value"])], [layout])


def _pad_concatenation(padding: _SizePadding, node: Node) -> None:
    """Arrays one after the other, of which the last one alone may be padded along the axis."""
    axis, layouts = node.attrs["axis"] % node.out.type.rank, [padding.get_layout(v) for v in node.args]
    if any(_has_symbols(each[axis]) for each in layouts[:-1]) or len(layouts[-1][axis]) > 1:
        raise padding.make_error(node, sorted(symbol_names([f for each in layouts for f in each[axis]])))
    layout = [
        (node.out.type.shape[a],) if a == axis else padding.join(node, [each[a] for each in layouts])
        for a in range(node.out.type.rank)
    ]
    padding.add(node, [padding.values[v] for v in node.args], [tuple(layout)])


_RULES: dict[Any, PaddingRule] = {
    basic.full: _pad_constant, shape.iota: _pad_iota, basic.dim_value: _pad_size,
    basic.broadcast_to: _pad_broadcast, shape.permute: _pad_permute, shape.reshape: _pad_reshape,
    reduce.sum: _pad_reduction, reduce.max: _pad_reduction, reduce.min: _pad_reduction,
    reduce.argmax: _pad_reduction, reduce.argmin: _pad_reduction, contractions.dot: _pad_product,
    running_extremes.cummax: _pad_scan, running_extremes.cummin: _pad_scan,
    reduce.prod: _pad_whole_product, reduce.cumsum: _pad_scan, reduce.cumprod: _pad_scan,
    shape.slice_: _pad_slice, shape.gather: _pad_gather, shape.pad: _pad_more, shape.concatenate: _pad_concatenation,
}  # fmt: skip
