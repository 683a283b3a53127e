"""Constant propagation: a traced program with its weights as known arrays, folded and rewritten product by product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.core.types import TensorType, as_dtype
from tessera.ir.builder import Builder, Evaluation, evaluate_block, override_numerics
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import eliminate_common_subexpressions, eliminate_dead_code
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to, full
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.shape import transpose

FOLD_BYTES = 1 << 16  # a folded result may be as large as its operands, or this


@dataclass(frozen=True)
class Constant:
    """A known array, broadcast to a shape where it is used."""

    array: np.ndarray
    shape: tuple[int, ...]

    def expand(self) -> np.ndarray:
        """The array with all its elements; no memory is copied."""
        return np.broadcast_to(self.array, self.shape)


@dataclass(frozen=True)
class ConstantProduct:
    """A matrix product with a constant matrix on one side: its place among such products, and where it is written.

    `matrix` has a row for each output and a column for each element that is summed; `right` is whether it stands on the
    right, transposed. `x` is the other operand.
    """

    number: int
    matrix: np.ndarray
    right: bool
    x: Tensor
    node: Node

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return _read_shape(self.node.out)

    def multiply(self, operand: Any, dtype: Any = None, x: Any = None) -> Tensor:
        """The product with another matrix [outputs, summed] in place of the constant."""
        x = self.x if x is None else x
        operand = transpose(operand) if self.right else operand
        operand = broadcast_to(operand, shape=(*x.shape[:-2], *operand.shape))
        return dot(x, operand, dtype=dtype) if self.right else dot(operand, x, dtype=dtype)

    def spread(self, values: Any) -> np.ndarray:
        """One value for each output, in the shape in which it meets the result."""
        values = np.asarray(values)
        return values if self.right else values[:, None]


# rule(product) gives the result, traced, or None to leave the product as it is.
ProductRule = Callable[[ConstantProduct], "Tensor | None"]


@dataclass(frozen=True)
class ConstantProgram:
    """A Graph function whose last parameters are the constants; `names` are those of its inputs."""

    function: Function
    constants: tuple[np.ndarray, ...]
    names: tuple[str, ...]

    @property
    def constant_bytes(self) -> int:
        """The bytes of all constants."""
        return sum(a.nbytes for a in self.constants)

    @property
    def nodes(self) -> int:
        """The number of ops."""
        return sum(1 for _ in self.function.body.walk())

    def rewrite(self, rule: ProductRule | None = None, skip: Callable[[str], None] | None = None) -> ConstantProgram:
        """Fold what depends on constants alone, and replace products with constant matrices as the rule says.

        `skip(reason)` hears of products with constants that are no matrix.
        """
        return _Rewriting(rule, skip).run(self)

    def observe(self, read: Callable[[ConstantProduct], Tensor]) -> ConstantProgram:
        """A program whose results are what `read` makes of each product with a constant matrix, in order."""
        found: list[Value] = []

        def rule(product: ConstantProduct) -> None:
            found.append(read(product).data)

        return _Rewriting(rule).run(self, found)

    def replace_matrices(self, change: Callable[[int, np.ndarray], np.ndarray | None]) -> ConstantProgram:
        """Replace the constant matrices of products: `change(number, matrix)` gives another one, or None."""

        def rule(product: ConstantProduct) -> Tensor | None:
            found = change(product.number, product.matrix)
            return None if found is None else product.multiply(Tensor(found), product.node.attrs["dtype"])

        return self.rewrite(rule)


def _read_shape(value: Value) -> tuple[int, ...]:
    return tuple(int(n) for n in value.type.shape)


def is_plain(types: Sequence[Any]) -> bool:
    """Whether all are tensor types of known sizes without a policy."""
    return all(isinstance(t, TensorType) and t.policy is None and all(type(n) is int for n in t.shape) for t in types)


@dataclass
class _Rewriting:
    """One walk over a program; values are `Constant`s where they are known, else values of the new function."""

    rule: ProductRule | None
    skip: Callable[[str], None] | None = None
    builder: Builder = field(default_factory=Builder)
    products: int = 0
    folded: dict[Any, list[Constant]] = field(default_factory=dict)
    matrices: dict[tuple[int, bool], np.ndarray] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # what is known by its address stays in memory

    def run(self, program: ConstantProgram, instead: list[Value] | None = None) -> ConstantProgram:
        """The program after the walk, perhaps with other results; constants that nothing uses are gone."""
        function, count = program.function, len(program.names)
        params = tuple(Value(p.type, p.hint) for p in function.params[:count])
        known = [Constant(a, a.shape) for a in program.constants]
        with self.builder.active(), override_numerics(None):
            found = evaluate_block(function.body, [*params, *known], self.fold)
            results = [self.materialise(v) for v in found] if instead is None else instead
        made = replace(function, body=self.builder.block(params, results))
        made = eliminate_dead_code(eliminate_common_subexpressions(made))
        arrays = [array for array, _ in self.builder.captures.values()]
        used = {v for n in made.body.walk() for v in n.args} | set(made.body.results)
        kept = [i for i, p in enumerate(made.params[count:]) if p in used]
        block = replace(made.body, params=(*made.params[:count], *(made.params[count + i] for i in kept)))
        return ConstantProgram(replace(made, body=block), tuple(arrays[i] for i in kept), program.names)

    def materialise(self, value: Any) -> Value:
        """A value of the new function: a constant becomes a parameter, or a literal where it is one number."""
        if not isinstance(value, Constant):
            return value  # type: ignore[no-any-return]
        array = value.array
        if array.size == 1:
            attrs = {"shape": (), "value": array.reshape(()).item(), "dtype": as_dtype(array.dtype)}
            inner = self.builder.add(full, [], attrs).out
            if value.shape == ():
                return inner
            return self.builder.add(broadcast_to, [inner], {"shape": value.shape}).out
        self.kept.append(array)
        inner = self.builder.capture(array)
        return (
            inner if array.shape == value.shape else self.builder.add(broadcast_to, [inner], {"shape": value.shape}).out
        )

    def fold(self, node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
        """The semantics of the walk: fold, rewrite or copy a node."""
        known = all(isinstance(a, Constant) for a in args)
        plain = not node.regions and not node.op.effects and is_plain([*node.types, *node.result_types])
        if known and plain and (found := self.compute(node, args)) is not None:
            return found
        if node.op is dot and plain and (made := self.multiply(node, args)) is not None:
            return [made.data]
        return self.copy(node, args, walk)

    def compute(self, node: Node, args: list[Constant]) -> list[Constant] | None:
        """The results of a node on constants; None where they are much larger than these."""
        shapes = [_read_shape(v) for v in node.results]
        if node.op is broadcast_to:
            return [Constant(args[0].array, shapes[0])]
        size = sum(math.prod(s) * v.type.dtype.numpy.itemsize for s, v in zip(shapes, node.results, strict=True))
        if node.op is full:
            return [Constant(np.asarray(node.attrs["value"]).astype(node.out.type.dtype.numpy), shapes[0])]
        if size > max(sum(a.array.nbytes for a in args), FOLD_BYTES):
            return None
        key = (node.op.name, tuple((id(a.array), a.shape) for a in args), repr(node.attrs), repr(node.result_types))
        if key not in self.folded:
            arrays = node.op.execute(node.types, node.result_types, node.attrs, [a.expand() for a in args])
            self.folded[key] = [Constant(_strip(np.asarray(a)), s) for a, s in zip(arrays, shapes, strict=True)]
            self.kept += args
        return self.folded[key]

    def multiply(self, node: Node, args: list[Any]) -> Tensor | None:
        """What the rule makes of a product with one constant matrix; None to copy it."""
        places = [i for i, a in enumerate(args) if isinstance(a, Constant)]
        if len(places) != 1 or self.rule is None:
            return None
        right = places[0] == 1
        matrix = self.take_matrix(args[places[0]], right)
        if matrix is None:
            if self.skip is not None:
                self.skip("its weights are a batch of matrices")
            return None
        number, self.products = self.products, self.products + 1
        product = ConstantProduct(number, matrix, right, Tensor(args[0 if right else 1]), node)
        with self.builder.at(node.loc):
            made = self.rule(product)
        if made is not None and (tuple(made.shape) != product.out_shape or made.dtype != node.out.type.dtype):
            raise AssertionError(f"a rule made {made.type} of a product {node.out.type}")
        return made

    def take_matrix(self, constant: Constant, right: bool) -> np.ndarray | None:
        """The constant operand as [outputs, summed]; None where it is a batch of matrices."""
        array = constant.array
        if array.ndim < 2 or array.shape[-2:] != constant.shape[-2:] or math.prod(array.shape[:-2]) != 1:
            return None
        key = (id(array), right)
        if key not in self.matrices:
            self.kept.append(array)
            matrix = array.reshape(array.shape[-2:])
            self.matrices[key] = np.ascontiguousarray(matrix.T if right else matrix)
        return self.matrices[key]

    def copy(self, node: Node, args: list[Any], walk: Any) -> Sequence[Value]:
        """A copy of a node; in its regions nothing is rewritten."""
        values = [self.materialise(a) for a in args]
        inner = Evaluation(self.copy, walk.env)
        regions = tuple(self.copy_region(region, inner) for region in node.regions)
        types = tuple(v.type for v in node.results)
        return self.builder.add(node.op, values, node.attrs, types=types, regions=regions, loc=node.loc).results

    def copy_region(self, region: Block, walk: Evaluation) -> Block:
        """A region with fresh parameters."""
        params = tuple(Value(p.type, p.hint) for p in region.params)
        with self.builder.region() as nodes:
            results = [self.materialise(v) for v in walk(region, *params)]
        return Block(params, tuple(nodes), tuple(results))


def _strip(array: np.ndarray) -> np.ndarray:
    """An array without what broadcasting repeats: axes of stride 0 have the size 1."""
    repeats = [stride == 0 and n > 1 for n, stride in zip(array.shape, array.strides, strict=True)]
    found = array[tuple(slice(0, 1) if r else slice(None) for r in repeats)]
    return np.ascontiguousarray(found).reshape(found.shape)
