"""Kernels of symbolic sizes: one Tile module of a kernel for every size of the axes that its builder names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.shapes import find_size_constraints, find_stated_values, use_size_constraints
from tessera.core.symbolic_dim import Dim, Size, symbol_names
from tessera.core.types import RefType, TensorType, Type
from tessera.frontend.jit.dynamic_shapes import SizeRules, SizeVariant, name_axes, trace_symbols
from tessera.frontend.kernel.kernel_function import Kernel
from tessera.frontend.kernel.python_ast.source import read_source
from tessera.frontend.kernel.signature import KernelArguments
from tessera.frontend.kernel.specialisation import find_mentioned_names
from tessera.frontend.kernel.tile_api.ids import GRID_COUNT_IDS, GRID_IDS
from tessera.ir.core import Attrs, Module, find_size_names


@dataclass(frozen=True)
class SymbolicKernel:
    """A kernel's Tile module of symbolic sizes, and what it requires of them."""

    module: Module
    rules: SizeRules


MakeGrid = Callable[[Mapping[str, Type]], Any]


def specialise_for_sizes(
    kernel: Kernel,
    found: KernelArguments,
    make_grid: MakeGrid,
    group: int | None,
    dynamic: Any,
    variant: SizeVariant | None = None,
) -> SymbolicKernel:
    """The Tile module of a kernel for all sizes of the axes that `dynamic` names (`name_axes`).

    `make_grid(types)` gives the grid for these types of arguments. What the kernel's source
    compares is decided by the sizes of its arguments, or by those of a `variant`, and becomes a constraint.

    Raises:
        ArgumentError: the grid is a number, and the kernel asks for its place in the grid.
        UnknownSizeError: the kernel needs a size as a number.
    """
    names = [n for n, t in found.types.items() if isinstance(t, RefType)]
    annotated = [a if isinstance(a := kernel.parameters.annotations.get(n), TensorType) else None for n in names]
    shapes = tuple(found.types[n].shape for n in names)
    patterns = name_axes(names, shapes, annotated, dynamic)
    patterns, own = (variant.fix(patterns), variant.constraints) if variant else (patterns, ())
    types = dict(found.types)
    for name, pattern in zip(names, patterns, strict=True):
        types[name] = replace(types[name], shape=tuple(pattern))
    symbols: dict[str, Size] = {n: Dim.of(n) for p in patterns for n in symbol_names(p)}
    values = find_stated_values(own)
    rules = SizeRules.of((*find_size_constraints(kernel), *own), kernel.parameters.sizes(types) | values)
    example = variant.sizes if variant else None
    with trace_symbols(patterns, shapes, example) as noted, use_size_constraints(rules.constraints):
        types = {n: t.evaluate({}) if isinstance(t, RefType) else t for n, t in types.items()}  # exact quotients
        grid = make_grid(types)
        if not callable(grid):
            _check_grid_follows(kernel, grid)
        plan = kernel.plan(found._replace(types=types), _with_sizes(grid, symbols | values), group)
        module = kernel.specialize(types, found.constants, *plan)
    rules = rules.add_guards(noted)
    main = module.main
    names_left = find_size_names(main)
    kept = {"sizes": names_left, "constraints": rules.texts} if names_left else {}
    main = replace(main, attrs=Attrs({**main.attrs, **kept}))
    return SymbolicKernel(module.replace(main, *module.functions[1:]), rules)


def _with_sizes(grid: Any, symbols: Mapping[str, Size]) -> Any:
    """A grid function of the constants, which also knows the symbols by name."""
    return (lambda constants: grid({**symbols, **constants})) if callable(grid) else grid


def _check_grid_follows(kernel: Kernel, grid: Any) -> None:
    """Refuse a grid of numbers for a kernel whose programs each have a place: it would serve the example's sizes.

    Raises:
        ArgumentError: as said.
    """
    listed = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    if grid is None or any(isinstance(n, Dim) for n in listed):
        return
    mentioned = find_mentioned_names(read_source(kernel.kernel_function).body)
    has_place = kernel.options.tile_shape or mentioned & (GRID_IDS - {"lane_id"})
    if has_place and not mentioned & GRID_COUNT_IDS:
        raise ArgumentError(
            f"the grid {grid!r} of {kernel.parameters.name} does not follow its symbolic sizes",
            location=user_location(), expected="a function of the arguments, or of the constants and sizes",
            suggestion='grid=lambda x, *_: (tile.cdiv(x.shape[0], 64),), or kernel[lambda c: (tile.cdiv(c["B"], 64),)]',
        )  # fmt: skip
