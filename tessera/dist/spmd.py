"""SPMD functions: one program that all ranks of a mesh run, each on its part of the arguments (JAX's shard_map)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import (
    ArgumentError,
    CollectiveError,
    Location,
    TesseraError,
    TraceError,
    hides_internal_frames,
    user_location,
)
from tessera.core.pytree import flatten
from tessera.dist.collectives import join_tensor
from tessera.dist.engines import choose_engine, load_world, run_ranks
from tessera.dist.mesh import Mesh, current_mesh
from tessera.dist.ranks import CURRENT_RANK
from tessera.dist.sharding import Dims, ShardSpec, check_spec, cut_array
from tessera.frontend.jit.tracing import Jit, locate_definition
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.collectives import all_reduce
from tessera.transforms.autodiff.gradients import value_and_grad

RANKS = "ranks"  # as out_specs: the results of all ranks, in a list


def match_specs(value: Any, specs: Any, name: str) -> list[tuple[str, Any, Any]]:
    """The leaves of a container with their names and specs: one spec for all of it, or a container like it.

    Raises:
        ArgumentError: the containers differ.
    """
    if specs is None or isinstance(specs, ShardSpec):
        return [(n, leaf, specs) for n, leaf in flatten(value, name, empty=True)[0]]
    if isinstance(value, Mapping) and isinstance(specs, Mapping) and value.keys() == specs.keys():
        parts = [(f"{name}.{k}", value[k], specs[k]) for k in sorted(value)]
    elif isinstance(value, (list, tuple)) and isinstance(specs, (list, tuple)) and len(value) == len(specs):
        parts = [(f"{name}.{i}", v, s) for i, (v, s) in enumerate(zip(value, specs, strict=True))]
    else:
        raise ArgumentError(
            f"the sharding of {name} does not fit it", location=user_location(), received=repr(specs),
            expected="a spec, None, or a container of them like the value",
        )  # fmt: skip
    return [found for part, v, s in parts for found in match_specs(v, s, part)]


def check_mesh(mesh: Any, what: str) -> None:
    """Refuse what is no mesh.

    Raises:
        ArgumentError: it is none.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(
            f"the mesh of {what} is a {type(mesh).__name__}", location=user_location(), received=repr(mesh),
            expected='a ts.Mesh, as ts.Mesh((4,), "data")',
        )  # fmt: skip


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))


class Spmd:
    """A function that all ranks of a mesh run. A call outside of ranks starts them; in one it is the function.

    >>> import tessera as ts
    >>> total = Spmd(lambda x: ts.all_reduce(x), mesh=Mesh(4), in_specs=ts.dist.P("ranks"))
    >>> total(ts.Tensor([1.0, 2.0, 3.0, 4.0]))
    Tensor([10.], f32)
    """

    def __init__(
        self, function: Callable[..., Any], mesh: Mesh | None = None, in_specs: Any = None, out_specs: Any = None,
        jit: bool = False, target: str | None = None,
    ) -> None:  # fmt: skip
        check_function(function, "spmd")
        check_mesh(mesh, "spmd")
        functools.update_wrapper(self, function)
        self.function, self.mesh = function, mesh
        self.name = getattr(function, "__name__", "the function")  # in errors
        self.in_specs, self.out_specs = in_specs, out_specs
        self.body: Callable[..., Any] = Jit(function, target=target) if jit or target else function

    @hides_internal_frames
    def __call__(self, *args: Any, **named: Any) -> Any:
        if CURRENT_RANK.get() is not None:
            return self.function(*args, **named)
        if CURRENT_BUILDER.get() is not None:
            raise TraceError(
                f"{self.name} starts ranks inside a program that is being traced", location=user_location(),
                expected="ranks outside, and what is traced inside",
                suggestion=f"ts.spmd(ts.jit({self.name}), mesh=mesh), and the same with ts.vmap; ts.grad of an SPMD "
                "function is one itself",
            )  # fmt: skip
        mesh = self.find_mesh(args, named)
        leaves, tree = flatten([list(args), named], empty=True)
        cuts = self._find_cuts(args, named, leaves, mesh)
        try:
            by_rank = run_ranks(mesh, lambda: self._run_rank(mesh, leaves, cuts, tree))
        except TesseraError as error:
            if error.location is not None and error.location.file == threading.__file__:
                error.location = user_location()  # no line of the user's is below this call in the rank
            raise
        return self._join(mesh, by_rank)

    def find_mesh(self, args: Sequence[Any], named: Mapping[str, Any]) -> Mesh:
        """The mesh of a call: an argument, that of the decorator, or that of the `with` block.

        Raises:
            ArgumentError: there is none.
        """
        current = current_mesh()
        given = [x for x in (*args, *named.values()) if isinstance(x, Mesh)]
        found = given[0] if given else self.mesh or (current.mesh if current else None)
        if found is None:
            raise ArgumentError(
                f"{self.name} has no mesh to run on", location=user_location(),
                suggestion="pass one: ts.spmd(function, mesh=ts.Mesh((4,), 'data')), an argument, or `with mesh:`",
            )  # fmt: skip
        return found

    def _find_cuts(self, args: Any, named: Any, leaves: list[tuple[str, Any]], mesh: Mesh) -> list[Dims | None]:
        """For each leaf of the arguments how it is cut; None for one that all ranks get as it is."""
        specs = self.in_specs
        if isinstance(specs, (list, tuple)):
            # A mesh among the arguments needs no spec.
            plain = iter(specs)
            listed = [None if isinstance(a, Mesh) else next(plain, None) for a in args]
            if next(plain, plain) is not plain or len(specs) != sum(not isinstance(a, Mesh) for a in args):
                raise ArgumentError(
                    f"{self.name} has {len(specs)} in_specs", location=user_location(),
                    expected=f"one for each of {sum(not isinstance(a, Mesh) for a in args)} arguments",
                )  # fmt: skip
        else:
            listed = [specs] * len(args)
        matched = [m for a, s, i in zip(args, listed, range(len(args)), strict=True) for m in self._match(a, s, i)]
        for_named = specs if isinstance(specs, ShardSpec) else None
        matched += [(n, leaf, for_named) for n, leaf in flatten(named, empty=True)[0]]
        return [
            None if spec is None or not _is_array(leaf) else check_spec(spec, np.shape(leaf), mesh, name)
            for name, leaf, spec in matched
        ]

    def _match(self, value: Any, specs: Any, number: int) -> list[tuple[str, Any, Any]]:
        return match_specs(value, specs, f"argument {number} of {self.name}")

    def _run_rank(self, mesh: Mesh, leaves: list[tuple[str, Any]], cuts: list[Dims | None], tree: Any) -> Any:
        context = CURRENT_RANK.get()
        assert context is not None
        own = [
            leaf if dims is None else Tensor(cut_array(as_tensor(leaf).numpy(), dims, mesh, context.rank))
            for (_, leaf), dims in zip(leaves, cuts, strict=True)
        ]
        args, named = tree.build(iter(own))
        result = self.body(*args, **named)
        if self.out_specs is None or self.out_specs == RANKS:
            return result
        joined = [
            join_tensor(as_tensor(x), *_read_out_spec(spec, x, n, mesh), mesh, n)
            for n, x, spec in match_specs(result, self.out_specs, f"the result of {self.name}")
        ]
        return flatten(result, empty=True)[1].build(iter(joined))

    def _join(self, mesh: Mesh, by_rank: dict[int, Any]) -> Any:
        if self.out_specs == RANKS:
            if choose_engine(mesh) == "simulated":
                return [by_rank[r] for r in range(mesh.size)]
            return load_world(choose_engine(mesh), mesh.debug).gather_objects(next(iter(by_rank.values())))
        if len(by_rank) > 1:
            check_replicas(by_rank, self.name, locate_definition(self.function))
        return by_rank[min(by_rank)]

    def __value_and_grad__(self, argnums: Any, has_aux: bool) -> Callable[..., Any]:
        """Value and gradient of the whole program: ranks run the gradient of theirs, and sum what they share.

        The results of the ranks are one result: each has 1/n of its cotangent.
        """

        def call(*args: Any, **named: Any) -> Any:
            mesh = self.find_mesh(args, named)
            run = value_and_grad(self.body, argnums, has_aux)
            chosen = getattr(self.function, "differentiated", 0) if argnums is None else argnums
            specs = self._list_specs(args, chosen)

            def program(*own: Any, **keywords: Any) -> Any:
                value, grads = run(*own, **keywords)
                found = (grads,) if isinstance(chosen, int) else grads
                summed = tuple(sum_shared(g, s, mesh) for g, s in zip(found, specs, strict=True))
                return value, summed[0] if isinstance(chosen, int) else summed

            out = (None, specs[0] if isinstance(chosen, int) else tuple(specs))
            functools.update_wrapper(program, self.function)
            made = Spmd(program, mesh, self.in_specs, out)
            made.name = self.name
            return made(*args, **named)

        functools.update_wrapper(call, self.function)
        return call

    def _list_specs(self, args: Sequence[Any], chosen: Any) -> list[Any]:
        if not isinstance(self.in_specs, (list, tuple)):
            return [self.in_specs] * (1 if isinstance(chosen, int) else len(chosen))
        plain = iter(self.in_specs)
        listed = [None if isinstance(a, Mesh) else next(plain) for a in args]
        return [listed[i] for i in ((chosen,) if isinstance(chosen, int) else chosen)]


def _read_out_spec(spec: ShardSpec | None, x: Any, name: str, mesh: Mesh) -> tuple[Dims, tuple[str, ...]]:
    if spec is None:
        return ((),) * as_tensor(x).ndim, ()
    dims = spec.dims(as_tensor(x).ndim)
    for axes in (*dims, spec.partial):
        if axes:
            mesh.find_axes(axes)
    return dims, spec.partial


def sum_shared(grads: Any, specs: Any, mesh: Mesh) -> Any:
    """The gradient of an argument: the sum over the ranks that have the same part of it, divided by all ranks."""

    def total(g: Tensor, spec: ShardSpec | None) -> Tensor:
        used = {n for axes in (spec.mesh_axes if spec else ()) for n in ((axes,) if isinstance(axes, str) else axes)}
        shared = tuple(n for n in mesh.axis_names if n not in used)
        g = all_reduce(g, kind="sum", groups=mesh.groups(shared), site="the gradient") if shared else g
        return g / float(mesh.size)

    found = [total(g, spec) for _, g, spec in match_specs(grads, specs, "the gradient")]
    return flatten(grads, empty=True)[1].build(iter(found))


def check_replicas(by_rank: dict[int, Any], name: str, place: Location) -> None:
    """Refuse results that should be one: replicas that differ, or partial sums.

    Raises:
        CollectiveError: two ranks have other results.
    """
    first = min(by_rank)
    wanted = flatten(by_rank[first], empty=True)[0]
    for rank, value in by_rank.items():
        found = flatten(value, empty=True)[0]
        if [path for path, _ in found] != [path for path, _ in wanted]:
            raise CollectiveError(
                f"the results of {name} are other containers on rank {first} and rank {rank}", location=place,
                expected=f"rank {first}: {_show_paths(wanted)}", received=f"rank {rank}: {_show_paths(found)}",
                suggestion="out_specs='ranks' gives all results",
            )  # fmt: skip
        for (path, a), (_, b) in zip(wanted, found, strict=True):
            if not _is_array(a) and not isinstance(a, (int, float)):
                continue  # an object that cannot be compared
            x, y = np.asarray(as_tensor(a).numpy()), np.asarray(as_tensor(b).numpy())
            if x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes():
                continue
            raise CollectiveError(
                f"the result{f' {path}' if path else ''} of {name} differs between rank {first} and rank {rank}",
                location=place, expected=f"rank {first}: {_show_difference(x, y)}",
                received=f"rank {rank}: {_show_difference(y, x)}",
                suggestion="a part of a tensor needs out_specs, e.g. ts.dist.P('data'); a partial sum needs "
                "ts.all_reduce, or ts.ShardSpec.sums('data') as out_specs; out_specs='ranks' gives all results",
            )  # fmt: skip


def _show_paths(leaves: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(path or "one value" for path, _ in leaves) or "nothing"


def _show_difference(x: np.ndarray, other: np.ndarray) -> str:
    if x.shape != other.shape or x.dtype != other.dtype or not x.shape:
        return f"{x.dtype} of shape {x.shape}" if x.shape != other.shape or x.dtype != other.dtype else str(x)
    same = (x == other) | ((x != x) & (other != other))
    at = tuple(int(i) for i in np.argwhere(~same)[0]) if not same.all() else (0,) * x.ndim
    return f"{x[at]} at {list(at)}"


def spmd(
    function: Callable[..., Any] | None = None, *, mesh: Mesh | None = None, in_specs: Any = None,
    out_specs: Any = None, jit: bool = False, target: str | None = None,
) -> Any:  # fmt: skip
    """A function that all ranks of a mesh run, each on its part of the arguments.

    `mesh` may also be an argument of the call, or that of a `with mesh:` block. `in_specs` is a sharding for all
    arguments, or one for each that is given by position (None: every rank gets it whole, as those by keyword),
    `out_specs` one for the results; without it all ranks
    return the same result, which is checked. `out_specs="ranks"` gives the list of all results. With `jit` or `target`
    each rank compiles the function. `ts.grad` of such a function is one itself.

    >>> import tessera as ts
    >>> mesh = ts.Mesh((2, 2), ("dp", "tp"))
    >>> @ts.spmd(mesh=mesh, in_specs=(ts.dist.P("dp"), ts.dist.P(None, "tp")), out_specs=ts.dist.P("dp", "tp"))
    ... def product(x, w):
    ...     return x @ w
    >>> product(ts.ones((4, 3)), ts.ones((3, 2))).shape
    (4, 2)

    Raises:
        ArgumentError: there is no mesh, or specs do not fit.
        ShapeError: an axis has no equal parts.
        CollectiveError, DeadlockError: the ranks disagree (simulated engine).
        DeviceUnavailable: the program has another number of processes than the mesh has ranks.
    """
    if function is None:
        return functools.partial(spmd, mesh=mesh, in_specs=in_specs, out_specs=out_specs, jit=jit, target=target)
    return Spmd(function, mesh, in_specs, out_specs, jit, target)


def on_mesh(mesh: Mesh, **options: Any) -> Callable[[Any], Any]:
    """A decorator: a function runs as the ranks of this mesh (`spmd`); the methods of a class run in `with mesh:`.

    Raises:
        ArgumentError: it is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentError("on_mesh takes a mesh", location=user_location(), received=repr(mesh))

    def decorate(function: Any) -> Any:
        if not isinstance(function, type):
            return Spmd(function, mesh, **options)
        for name, method in list(vars(function).items()):
            if callable(method) and not isinstance(method, (type, staticmethod, classmethod)):
                setattr(function, name, _run_on_mesh(method, mesh))
        return function

    return decorate


def _run_on_mesh(method: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        with mesh:
            return method(*args, **named)

    return call


manual_spmd = distributed = hierarchical_collective = overlap_communication = spmd
mesh_view = on_mesh
