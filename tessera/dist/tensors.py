"""Mesh tensors: whole tensors with a sharding on a mesh, on which operators run in parts (DTensor)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import as_dtype, f32
from tessera.dist.mesh import Mesh, current_mesh
from tessera.dist.partition import Partitioned
from tessera.dist.sharding import ShardSpec, check_spec, cut_array, make_spec
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.initialisation import kaiming_uniform
from tessera.ops.api.creation import zeros
from tessera.ops.tensor import elementwise
from tessera.ops.tensor.contractions import matmul


class MeshTensor:
    """A tensor with a sharding: `value` is the whole, `local(rank)` what a rank holds.

    Operators between mesh tensors (and numbers or tensors, which every rank has whole) run on the mesh in parts; the
    sharding of the result follows from those of the operands.

    >>> x = MeshTensor(np.ones((4, 2), np.float32), Mesh((2,), "x"), ShardSpec.row("x"))
    >>> (x @ np.ones((2, 3), np.float32)).spec.dims(2), x.local(1).shape
    ((('x',), ()), (2, 2))

    Raises:
        ShapeError, ArgumentError: the sharding does not fit the tensor or the mesh.
    """

    __array_priority__ = 200

    def __init__(self, value: Any, mesh: Mesh, spec: ShardSpec | None = None) -> None:
        self.value, self.mesh = as_tensor(value), mesh
        self.spec = spec or ShardSpec()
        self._dims = check_spec(self.spec, self.value.shape, mesh, "the tensor")  # type: ignore[arg-type]
        if self.spec.partial:
            raise ArgumentError(
                "a mesh tensor has whole parts", location=user_location(), received=repr(self.spec),
                expected="a sharding without partial sums", suggestion="add them up: ts.all_reduce, in a rank",
            )  # fmt: skip

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the whole tensor."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """The element type."""
        return self.value.dtype

    def local(self, rank: int) -> Tensor:
        """The part that a rank holds.

        Raises:
            ArgumentError: the mesh has no such rank.
        """
        if not 0 <= rank < self.mesh.size:
            raise ArgumentError(f"{self.mesh} has no rank {rank}", location=user_location())
        return Tensor(cut_array(self.value.numpy(), self._dims, self.mesh, rank))

    def numpy(self) -> np.ndarray:
        """The elements of the whole tensor."""
        return self.value.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.value.__array__(dtype, copy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value.type}, {self.spec}, {self.mesh})"

    def __matmul__(self, other: Any) -> MeshTensor:
        return apply(matmul, self, other)

    def __rmatmul__(self, other: Any) -> MeshTensor:
        return apply(matmul, other, self)

    def __add__(self, other: Any) -> MeshTensor:
        return apply(elementwise.add, self, other)

    def __radd__(self, other: Any) -> MeshTensor:
        return apply(elementwise.add, other, self)

    def __sub__(self, other: Any) -> MeshTensor:
        return apply(elementwise.sub, self, other)

    def __rsub__(self, other: Any) -> MeshTensor:
        return apply(elementwise.sub, other, self)

    def __mul__(self, other: Any) -> MeshTensor:
        return apply(elementwise.mul, self, other)

    def __rmul__(self, other: Any) -> MeshTensor:
        return apply(elementwise.mul, other, self)

    def __truediv__(self, other: Any) -> MeshTensor:
        return apply(elementwise.div, self, other)

    def __rtruediv__(self, other: Any) -> MeshTensor:
        return apply(elementwise.div, other, self)

    def __pow__(self, other: Any) -> MeshTensor:
        return apply(elementwise.pow, self, other)

    def __neg__(self) -> MeshTensor:
        return apply(elementwise.neg, self)


@lru_cache(maxsize=256, typed=True)
def _find_partitioned(
    function: Callable[..., Any], mesh: Mesh, specs: tuple[ShardSpec | None, ...], *numbers: float | None
) -> Partitioned:
    """A function on a mesh; `numbers` has the operands that are Python numbers, which take the type of the others."""

    def run(*tensors: Any) -> Any:
        given = iter(tensors)
        return function(*[next(given) if n is None else n for n in numbers])

    return Partitioned(run, mesh, specs)


def apply(function: Callable[..., Any], *operands: Any) -> Any:
    """A function of tensors on mesh tensors: it runs on their mesh, and gives mesh tensors.

    Raises:
        ArgumentError: the operands have other meshes, or none has one.
    """
    meshes = list(dict.fromkeys(x.mesh for x in operands if isinstance(x, MeshTensor)))
    if len(meshes) != 1:
        raise ArgumentError(
            "the operands are on other meshes" if meshes else "no operand is a mesh tensor", location=user_location(),
            expected="mesh tensors of one mesh", received=", ".join(map(repr, meshes)) or "none",
        )  # fmt: skip
    numbers = [x if isinstance(x, (int, float)) else None for x in operands]
    rest = [x for x in operands if not isinstance(x, (int, float))]
    specs = tuple(x.spec if isinstance(x, MeshTensor) else None for x in rest)
    run = _find_partitioned(function, meshes[0], specs, *numbers)
    plain = [x.value if isinstance(x, MeshTensor) else as_tensor(x) for x in rest]
    result, layouts = run(*plain), run.plan(*plain).outputs
    if isinstance(result, tuple):
        return tuple(MeshTensor(r, meshes[0], make_spec(at.dims)) for r, at in zip(result, layouts, strict=True))
    return MeshTensor(result, meshes[0], make_spec(layouts[0].dims))


def make_tensor(shape: Sequence[int], layout: ShardSpec, mesh: Mesh, dtype: Any = f32) -> MeshTensor:
    """Zeros with a sharding: `ts.dist.tensor(shape=(8, 8), layout=ts.ShardSpec(...), mesh=mesh, dtype="bf16")`.

    Raises:
        DTypeError, ShapeError, ArgumentError: there is no such element type, or the sharding does not fit.
    """
    return MeshTensor(zeros(tuple(shape), dtype=as_dtype(dtype)), mesh, layout)


class MeshParameter(MeshTensor):
    """A parameter with a sharding: `mesh_axes` gives the mesh axis for "row" and "col", or for numbers of axes.

    `init` makes the elements of a shape (default: Kaiming uniform). The mesh is by default that of the `with` block.

    Raises:
        ArgumentError: there is no mesh, or it has no such axis.
    """

    def __init__(
        self, shape: Sequence[int], mesh_axes: Mapping[Any, Any], mesh: Mesh | None = None,
        init: Callable[[tuple[int, ...]], Any] | None = None,
    ) -> None:  # fmt: skip
        around = current_mesh()
        found = mesh or (around.mesh if around else None)
        if found is None:
            raise ArgumentError(
                "a mesh parameter needs a mesh", location=user_location(),
                suggestion="pass mesh=, or make it inside `with mesh:` or a class under @ts.on_mesh(mesh)",
            )  # fmt: skip
        cut = {k: v for k, v in mesh_axes.items() if v is not None}
        super().__init__((init or kaiming_uniform)(tuple(shape)), found, ShardSpec(tuple(cut), tuple(cut.values())))


def sharded_parameter(
    shape: Sequence[int], devices: Any, axis: int = 0, init: Callable[[tuple[int, ...]], Any] | None = None
) -> MeshParameter:
    """A parameter that is cut along one axis over devices (a list, or a number).

    Raises:
        ShapeError: the devices do not divide the axis.
        ArgumentError: these are no devices.
    """
    return MeshParameter(shape, {axis: "model"}, Mesh(devices, "model"), init)


def distributed_matmul(x: Any, weight: Any) -> Tensor:
    """The whole product of a tensor with a weight that is cut over devices, which each compute a part.

    Shapes: as `ts.matmul`. In a traced or differentiated function it is the product of whole tensors.

    Raises:
        ShapeError: the shapes do not fit.
        ArgumentError: neither is a mesh tensor.
    """
    whole = [a.value if isinstance(a, MeshTensor) else as_tensor(a) for a in (x, weight)]
    if CURRENT_BUILDER.get() is not None or any(a.requires_grad for a in whole):
        return matmul(*whole)
    return apply(matmul, x, weight).value  # type: ignore[no-any-return]
