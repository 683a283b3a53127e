"""Rasterisation: the order in which a persistent kernel works through the grid, as a function attribute."""

from __future__ import annotations

from tessera.codegen.ptx.attributes import PREFETCHING, WARP_SPECIALISED, LaunchFacts, get_fact, set_facts
from tessera.codegen.ptx.passes.tile_scheduler import RasterOrder, choose_raster_order
from tessera.ir.core import Function


def choose_order(function: Function) -> Function:
    """The function with `ptx.raster`, if its kernel is persistent and another order than the default pays."""
    order = _find_order(function)
    if order is None:
        return function
    return set_facts(function, raster=(order.axes, order.falling, order.section))


def _find_order(function: Function) -> RasterOrder | None:
    kind, grid = get_fact(function, "kernel"), LaunchFacts.of(function).grid
    if kind == WARP_SPECIALISED:
        return choose_raster_order(function, grid)
    return RasterOrder(tuple(reversed(range(len(grid))))) if kind == PREFETCHING and len(grid) > 1 else None


def read_order(function: Function) -> RasterOrder | None:
    """The order that `choose_order` recorded; None: bands of neighbouring programs (the default)."""
    held = get_fact(function, "raster")
    return None if held is None else RasterOrder(*held)
