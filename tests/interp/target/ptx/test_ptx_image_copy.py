"""Copies of images by tensor map (im2col): against copies of an H100, and against a convolution in NumPy."""

import ast
from pathlib import Path

import numpy as np
import pytest
from ptx_hopper_snippets import barrier, entry, wait

from tessera.core.errors import ArgumentError, AsyncCopyError, UnsupportedOpError
from tessera.interp.target.ptx import ImageTensorMap, PtxModule, TensorMap

ON_GPU = np.load(Path(__file__).parents[3] / "fixtures/ptx_images.npz")
OUT = """mul.lo.u32 %r0, %i, 4; add.u32 %t, %s, %r0; mad.wide.u32 %p1, %i, 4, %p1;
LOOP: ld.shared.b32 %r1, [%t]; st.global.b32 [%p1], %r1; add.u32 %t, %t, 128; add.s64 %p1, %p1, 128;
add.u32 %i, %i, 32; setp.lt.u32 %q1, %i, {n}; @%q1 bra LOOP;"""


def copy(map, at, taps, pixels, channels, mode="im2col"):
    """What shared memory holds after pixels of images were loaded."""
    out, n = np.zeros((pixels, channels), "f4"), len(at)
    opcode = f"cp.async.bulk.tensor.{n}d.shared::cluster.global.{mode}.mbarrier::complete_tx::bytes"
    where, offsets = (", ".join(str(v) for v in x) for x in (at, taps))
    load = f"""@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {out.nbytes};
    @%first {opcode} [%s], [%m0, {{{where}}}], [%bar]{offsets and f", {{{offsets}}}"};\n{wait()}"""
    text = entry(["map", "out"], barrier() + load + OUT.format(n=out.size))
    PtxModule(text).launch("k", block=32, args=[map, out], shared=max(out.nbytes, 4096) + 2048)
    return out


@pytest.mark.parametrize("case", range(9))
def test_pixels_are_those_of_an_h100(case):
    """Bit for bit: bounding boxes, steps, channels cut, swizzle, fill, and images past the last."""
    spec = ast.literal_eval(str(ON_GPU[f"im2col|{case}|spec"]))
    shape, low, high, channels, pixels, steps, swizzle, fill = spec
    x = (np.arange(np.prod(shape), dtype="f4") + 1).reshape(shape)
    map = ImageTensorMap(
        x, (pixels, channels), (0, 32, 64, 128)[swizzle], bool(fill), element_strides=steps[::-1],
        lower=low[::-1], upper=high[::-1],
    )  # fmt: skip
    for k in range(6):
        at, taps = ON_GPU[f"im2col|{case}|{k}|c"][: len(shape)], ON_GPU[f"im2col|{case}|{k}|f"][: len(shape) - 2]
        got = copy(map, at.tolist(), taps.tolist(), pixels, channels)
        assert np.array_equal(got.reshape(-1).view("u4"), ON_GPU[f"im2col|{case}|{k}|o"].view("u4"))


def test_a_convolution_by_taps():
    """Its nine products with the pixels of each tap are a convolution with padding of 1."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 5, 6, 8)).astype("f4"), rng.standard_normal((3, 3, 8, 4)).astype("f4")
    map = ImageTensorMap(x, (60, 8), lower=(-1, -1), upper=(-1, -1))
    found = sum(copy(map, (0, -1, -1, 0), (s, r), 60, 8) @ w[r, s] for r in range(3) for s in range(3))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    np.testing.assert_allclose(found.reshape(2, 5, 6, 4), np.einsum("nhwcrs,rsco->nhwo", windows, w), atol=1e-5)


def test_wrong_maps_and_modes():
    x = np.zeros((2, 5, 6, 8), "f4")
    image = ImageTensorMap(x, (16, 8), lower=(-1, -1), upper=(-1, -1))
    with pytest.raises(AsyncCopyError, match="a tensor map of boxes in a copy in im2col mode"):
        copy(TensorMap(x, (1, 4, 4, 8)), (0, 0, 0, 0), (0, 0), 16, 8)
    with pytest.raises(AsyncCopyError, match="a tensor map of images in a copy in tile mode"):
        copy(image, (0, 0, 0, 0), (), 16, 8, mode="tile")
    with pytest.raises(UnsupportedOpError, match="im2col"):
        copy(image, (0, 0, 0, 0), (0,), 16, 8)
    for bad in ({"lower": (-1,)}, {"lower": (-300, 0)}, {"box": (1025, 8)}, {"box": (16, 6)}, {"box": (16, 8, 1)}):
        with pytest.raises(ArgumentError):
            ImageTensorMap(x, bad.pop("box", (16, 8)), **{"lower": (-1, -1), "upper": (-1, -1), **bad})
