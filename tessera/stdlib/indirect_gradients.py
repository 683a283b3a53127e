"""Gradients of weights of convolutions, whose windows are read in place (`tessera.stdlib.indirect_convolution`).

The gradient of weights is the product of the results' gradient and of the transposed windows, summed over the images. A
program contracts the windows of several images, so that no product of one image is in memory: its rows are elements of
windows, its lanes outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import TensorType, f32, f64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.stdlib.convolution import WindowProduct, find_stacked_windows
from tessera.stdlib.gemm import zero_accumulator
from tessera.stdlib.indirect_convolution import (
    MOST_INDEXED,
    IndirectConvolution,
    choose_places,
    count_first,
    divide_depth,
    find_places,
    pack_rows,
)

# mypy: disable-error-code="operator, attr-defined, index"


@kernel
def multiply_elements(image, gradient, depths, out, *, windows, BR, BK):
    """out [S, G, O, K] = the sums over each of S parts of the images of gradient [B · G, blocks of O, P, BO] times the
    transposed windows of image [elements], on the grid (S · G, blocks of K, blocks of O)."""
    groups, places, images = out.shape[1], gradient.shape[2], windows["images"]
    part, group = tile.program_id(0) // groups, tile.program_id(0) % groups
    k, block = tile.program_id(1) * BR, tile.program_id(2)
    elements = tile.load(depths[k : k + BR], edge="clip") + group * windows["group"]
    rest = count_first(places, BK)
    total = zero_accumulator(gradient, (BR, gradient.shape[3]))
    for z in tile.range(part * images, tile.minimum(part * images + images, windows["count"]), 1):
        first = elements + z * windows["image"]
        if rest:
            total = total + multiply_windows_at(image, gradient, first, z * groups + group, block, 0, windows, rest)
        for p in tile.range(rest, places, BK):
            total = total + multiply_windows_at(image, gradient, first, z * groups + group, block, p, windows, BK)
    o = block * gradient.shape[3]
    tile.store(out[part, group, o : o + gradient.shape[3], k : k + BR], tile.transpose(total), edge="clip")


def multiply_windows_at(image, gradient, elements, matrix, block, p, windows, BK):
    """The products of the windows p to p + BK."""
    seen = tile.load(image[elements[:, None] + find_places(p, windows, BK)[None, :]])
    return tile.dot(seen, gradient[matrix, block, p : p + BK, :])


PROGRAMS = 16  # parts of the images are summed apart where there are fewer programs


@dataclass(frozen=True)
class WindowGradient:
    """The product of a gradient [B, G, O, P] and of transposed windows, summed over the images if `whole`."""

    convolution: IndirectConvolution
    gradient: Value
    whole: bool

    @property
    def operands(self) -> tuple[Value, Value]:
        """The image and the gradient."""
        return self.convolution.product.windows.image, self.gradient

    def compute(self, image: Tensor, gradient: Tensor) -> Tensor:
        """The product as [B, G, O, C · taps], or its sum over B as [G, O, C · taps]."""
        own = self.convolution
        batch, groups, outputs, places = own.product.result
        sizes = (1, 1, *(int(n) for n in image.shape[2:]))[-3:]
        steps = math.prod(sizes), sizes[1] * sizes[2], sizes[2], 1
        rows = choose_places(own.window)
        packed = pack_rows(shape.reshape(gradient, shape=(batch * groups, outputs, places)), own.output_block)
        across = ceil_divide(own.window, rows), packed.shape[1]
        images = ceil_divide(batch, ceil_divide(PROGRAMS, groups * math.prod(across))) if self.whole else 1
        parts = ceil_divide(batch, images)
        size = math.prod(image.shape[1:])
        windows = {"counts": (1, *own.counts), "images": images, "count": batch, "image": size}
        windows |= {"group": own.channels * steps[0]}
        windows["moves"] = size, *(a * b for a, b in zip(own.strides, steps[1:], strict=True))
        memory = OutputMemory(TensorType((parts, groups, outputs, own.window), image.dtype))
        depths = basic.fusion_barrier(own.find_window_depths(steps))  # each program would compute them
        image = shape.reshape(image, shape=(-1,))
        grid = parts * groups, *across
        blocks = {"BR": rows, "BK": divide_depth(places)}
        sums = launch(multiply_elements, grid, image, packed, depths, memory, windows=windows, **blocks)
        return reduce.sum(sums, axis=(0,), keepdims=False) if self.whole else sums


def match_window_gradient(uses: UseDef, node: Node) -> WindowGradient | None:
    """A sum over images of a product with transposed windows, or such a product, as a gradient; or None."""
    whole = node.op is reduce.sum
    dot = uses.find(node.args[0], contractions.dot) if whole else node
    if dot is None or (whole and not _sums_images(node)):
        return None
    types = [get_tensor_type(v) for v in (*dot.args, dot.out, node.out)]
    if any(t.policy is not None or t.dtype != types[0].dtype for t in types) or types[0].dtype not in (f32, f64):
        return None
    turned = uses.find(dot.args[1], shape.permute)
    sizes = [get_shape(v) for v in (*dot.args, dot.out)]
    if turned is None or tuple(turned.attrs["axes"]) != (0, 1, 3, 2) or any(len(s) != 4 for s in sizes):
        return None
    windows = find_stacked_windows(uses, turned.args[0])
    if windows is None or not all(isinstance(n, int) and n for s in (*sizes, get_shape(windows.image)) for n in s):
        return None
    batch, groups, outputs, places = (int(n) for n in sizes[0])
    if get_shape(windows.image)[0] != batch or math.prod(map(int, get_shape(windows.image))) >= MOST_INDEXED:
        return None
    product = WindowProduct(windows, dot.out, groups, (batch, groups, outputs, places), None)
    return WindowGradient(IndirectConvolution(product, None), dot.args[0], whole)


def _sums_images(node: Node) -> bool:
    """Whether a sum of four axes is one over the first."""
    axes = tuple(a % len(get_shape(node.args[0])) for a in node.attrs["axis"])
    return axes == (0,) and not node.attrs["keepdims"]
