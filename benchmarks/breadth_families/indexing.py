"""Families of gathers, scatters, convolutions, pools and resampling."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tessera as ts
from benchmarks.breadth_families import Case, Draw, family


@family("gather of rows")
def _(d: Draw) -> Case:
    rows, width = d.shape((64, 151936), (16, 8192))
    (count,) = d.shape((16, 65536), item=4 * width, floor=0)
    x, i = d.normal(rows, width), d.ints(rows, count)
    return Case(
        f"embedding {count} of {rows}x{width}", ts.embedding, lambda x, i: F.embedding(i, x), (x, i), exact=True
    )


@family("take along an axis")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 16384), (17, 65536), item=8)
    k = d.size(1, n)
    axis = d.pick(0, 1)
    x, i = d.normal(m, n), d.ints((m, n)[axis], *((m, k) if axis == 1 else (m, n)))
    return Case(
        f"take_along_axis {axis} {m}x{n} {tuple(i.shape)}", lambda x, i: ts.take_along_axis(x, i, axis=axis),
        lambda x, i: torch.gather(x, axis, i), (x, i), exact=True,
    )  # fmt: skip


@family("embedding gradient")
def _(d: Draw) -> Case:
    rows, width = d.shape((64, 65536), (16, 4096))
    (count,) = d.shape((16, 16384), item=4 * width, floor=0)
    x, i, g = d.normal(rows, width), d.ints(rows, count), d.normal(count, width)
    return Case(
        f"embedding gradient {count} of {rows}x{width}",
        ts.embedding,
        lambda x, i: F.embedding(i, x),
        (x, i, g),
        wrt=(0,),
    )


@family("scatter add")
def _(d: Draw) -> Case:
    rows = d.size(64, 65536)
    (count,) = d.shape((1024, 1 << 24), item=16)
    x, i, u = d.normal(rows), d.ints(rows, count), d.normal(count)
    return Case(
        f"scatter_add {count} into {rows}", ts.scatter_add, lambda x, i, u: x.scatter_add(0, i, u), (x, i, u),
        tolerance=1e-5,
    )  # fmt: skip


@family("index add")
def _(d: Draw) -> Case:
    rows, width = d.shape((64, 65536), (16, 4096))
    (count,) = d.shape((16, 16384), item=4 * width, floor=0)
    x, i, u = d.normal(rows, width), d.ints(rows, count), d.normal(count, width)
    return Case(
        f"index_add {count} into {rows}x{width}", lambda x, i, u: ts.index_add(x, 0, i, u),
        lambda x, i, u: x.index_add(0, i, u), (x, i, u),
    )  # fmt: skip


@family("scatter of rows")
def _(d: Draw) -> Case:
    rows, width = d.shape((64, 65536), (16, 4096))
    count = d.size(1, rows)
    x, u = d.normal(rows, width), d.normal(count, width)
    i = torch.randperm(rows, generator=d.random)[:count]
    return Case(
        f"scatter {count} into {rows}x{width}", ts.scatter, lambda x, i, u: x.index_copy(0, i, u), (x, i, u), exact=True
    )


@family("one hot")
def _(d: Draw) -> Case:
    m, n = d.shape((8, 65536), (8, 32768))
    i = d.ints(n, m)
    return Case(f"one_hot {m}x{n}", lambda i: ts.one_hot(i, n), lambda i: F.one_hot(i, n).float(), (i,), exact=True)


def _image(d: Draw, channels: tuple[int, int], work: float, low: int = 7) -> tuple[int, int, int, int]:
    """Batch, channels and sizes of an image on which a convolution of `work` operations a position is affordable."""
    for _ in range(200):
        b, c, h, w = d.shape((1, 32), channels, (low, 256), (low, 256), floor=1 / 256)
        if b * h * w * c * work <= d.work:
            return b, c, h, w
    return 1, channels[0], 14, 14


def _convolution(name: str, kernel: int, stride: int, groups: str, dilation: int = 1) -> None:
    @family(name)
    def _(d: Draw) -> Case:
        k = d.size(8, 512)
        b, c, h, w = _image(d, (3, 512), 2 * kernel * kernel * (1 if groups == "c" else k) / stride**2, 7 * dilation)
        g = {"1": 1, "c": c, "4": 4}[groups]
        c, k = (c, c) if groups == "c" else (-(-c // g) * g, -(-k // g) * g)
        x, weight, bias = d.normal(b, c, h, w), d.normal(k, c // g, kernel, kernel), d.normal(k)
        pad = kernel // 2 * dilation
        how = {"stride": stride, "padding": pad, "dilation": dilation, "groups": g}
        flops = 2.0 * b * k * (c // g) * kernel**2 * (-(-h // stride)) * (-(-w // stride))
        return Case(
            f"{b}x{c}x{h}x{w} to {k}, {kernel}x{kernel} / {stride}, groups {g}",
            lambda x, w, b: ts.conv2d(x, w, b, **how), lambda x, w, b: F.conv2d(x, w, b, **how), (x, weight, bias),
            flops,
        )  # fmt: skip


_convolution("convolution 3x3", 3, 1, "1")
_convolution("convolution 3x3 stride 2", 3, 2, "1")
_convolution("convolution 1x1", 1, 1, "1")
_convolution("convolution 7x7", 7, 2, "1")
_convolution("convolution dilated", 3, 1, "1", dilation=2)
_convolution("convolution depthwise", 3, 1, "c")
_convolution("convolution grouped", 3, 1, "4")


@family("convolution 1-D")
def _(d: Draw) -> Case:
    kernel = d.pick(3, 4, 7)
    k, c, n = d.product((16, 1024), (64, 16384), (16, 1024))
    k, n, c = k, max(c // kernel, kernel), n
    x, w = d.normal(2, c, n), d.normal(k, c, kernel)
    return Case(
        f"conv1d 2x{c}x{n} to {k}, {kernel}", lambda x, w: ts.conv1d(x, w, padding=1),
        lambda x, w: F.conv1d(x, w, padding=1), (x, w), 4.0 * k * c * n * kernel,
    )  # fmt: skip


@family("convolution 3-D")
def _(d: Draw) -> Case:
    k, c, s = d.size(8, 64), d.size(3, 64), d.size(8, 40)
    x, w = d.normal(1, c, s, s, s), d.normal(k, c, 3, 3, 3)
    return Case(
        f"conv3d 1x{c}x{s}^3 to {k}", lambda x, w: ts.conv3d(x, w, padding=1), lambda x, w: F.conv3d(x, w, padding=1),
        (x, w), 54.0 * k * c * s**3,
    )  # fmt: skip


@family("convolution transposed")
def _(d: Draw) -> Case:
    k = d.size(8, 256)
    b, c, h, w = _image(d, (8, 256), 2 * 16 * k)
    x, weight = d.normal(b, c, h, w), d.normal(c, k, 4, 4)
    return Case(
        f"conv_transpose2d {b}x{c}x{h}x{w} to {k}", lambda x, w: ts.conv_transpose2d(x, w, stride=2, padding=1),
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), (x, weight), 32.0 * b * c * h * w * k,
    )  # fmt: skip


@family("convolution gradient")
def _(d: Draw) -> Case:
    k = d.size(8, 256)
    b, c, h, w = _image(d, (8, 256), 6 * 9 * k)
    x, weight, g = d.normal(b, c, h, w), d.normal(k, c, 3, 3), d.normal(b, k, h, w)
    return Case(
        f"conv2d gradient {b}x{c}x{h}x{w} to {k}", lambda x, w: ts.conv2d(x, w, padding=1),
        lambda x, w: F.conv2d(x, w, padding=1), (x, weight, g), 54.0 * b * c * h * w * k, wrt=(0, 1),
    )  # fmt: skip


@family("convolution NHWC")
def _(d: Draw) -> Case:
    k = d.size(8, 512)
    b, c, h, w = _image(d, (8, 256), 2 * 9 * k)
    x, weight = d.normal(b, h, w, c), d.normal(k, c, 3, 3)

    def own(x, w):  # type: ignore[no-untyped-def]
        return ts.permute(ts.conv2d(ts.permute(x, (0, 3, 1, 2)), w, padding=1), (0, 2, 3, 1))

    def theirs(x, w):  # type: ignore[no-untyped-def]
        return F.conv2d(x.permute(0, 3, 1, 2), w, padding=1).permute(0, 2, 3, 1)

    return Case(f"conv2d NHWC {b}x{h}x{w}x{c} to {k}", own, theirs, (x, weight), 18.0 * b * c * h * w * k)


def _pool(name: str, own: str, theirs: str, wrt: bool = False) -> None:
    @family(name)
    def _(d: Draw) -> Case:
        b, c, h, w = d.shape((1, 64), (3, 512), (8, 256), (8, 256))
        kernel, stride, pad = d.pick((2, 2, 0), (3, 2, 1), (3, 1, 1))
        x, g = d.normal(b, c, h, w), ()
        if wrt:  # equal extremes share a gradient, which PyTorch gives to the first: no window has equal elements
            x = (torch.arange(x.numel()) * 9176263 % (1 << 24)).view_as(x) / (1 << 23) - 1
            g = (d.normal(b, c, (h + 2 * pad - kernel) // stride + 1, (w + 2 * pad - kernel) // stride + 1),)
        return Case(
            f"{own} {kernel}/{stride} {b}x{c}x{h}x{w}" + " gradient" * wrt,
            lambda x: getattr(ts, own)(x, kernel, stride, pad), lambda x: getattr(F, theirs)(x, kernel, stride, pad),
            (x, *g), wrt=(0,) if wrt else (),
        )  # fmt: skip


_pool("max pool", "max_pool2d", "max_pool2d")
_pool("average pool", "avg_pool2d", "avg_pool2d")
_pool("max pool gradient", "max_pool2d", "max_pool2d", wrt=True)
_pool("average pool gradient", "avg_pool2d", "avg_pool2d", wrt=True)


@family("adaptive average pool")
def _(d: Draw) -> Case:
    b, c, h, w = d.shape((1, 64), (16, 2048), (7, 128), (7, 128))
    size = d.pick(1, 7, (3, 5))
    x = d.normal(b, c, h, w)
    return Case(
        f"adaptive {size} of {b}x{c}x{h}x{w}", lambda x: ts.adaptive_avg_pool2d(x, size),
        lambda x: F.adaptive_avg_pool2d(x, size), (x,),
    )  # fmt: skip


@family("interpolate")
def _(d: Draw) -> Case:
    b, c, h, w = d.shape((1, 32), (3, 512), (7, 128), (7, 128), item=16)
    mode = d.pick("nearest", "bilinear")
    x = d.normal(b, c, h, w)
    return Case(
        f"interpolate {mode} {b}x{c}x{h}x{w}", lambda x: ts.interpolate(x, scale_factor=2, mode=mode),
        lambda x: F.interpolate(x, scale_factor=2, mode=mode), (x,),
    )  # fmt: skip
