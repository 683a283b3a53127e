"""Textures and surfaces: fetches against those of an H100, surfaces and queries against NumPy, errors."""

from pathlib import Path

import numpy as np
import pytest

from tessera.core.errors import ArgumentError, OutOfBoundsError, UnknownNameError, UnsupportedOpError
from tessera.interp.target.ptx import PtxModule, SamplerObject, SurfaceObject, TextureObject

ON_GPU = np.load(Path(__file__).parents[3] / "fixtures/ptx_textures.npz")
# Without those of one dimension whose filter met the border above and below: their texture had one row of a plane.
CASES = sorted(
    {n.rsplit("|", 1)[0] for n in ON_GPU if n.startswith("tex|") and not ("tex|1" in n and "border|linear" in n)}
)
ENTRY = """.version 8.0
.target sm_90
.address_size 64
{variables}
.visible .entry k(.param .u64 t, .param .u64 x, .param .u64 o, .param .u32 n) {{
.reg .b64 %t, %x, %o; .reg .b32 %i, %n, %step, %r<8>; .reg .f32 %f<8>; .reg .pred %p<4>;
ld.param.u64 %t, [t]; ld.param.u64 %x, [x]; ld.param.u64 %o, [o]; ld.param.u32 %n, [n];
mov.u32 %i, %tid.x; mul.lo.u32 %step, %n, 4; setp.ge.u32 %p0, %i, %n; @%p0 ret;
mad.wide.u32 %x, %i, 4, %x; mad.wide.u32 %o, %i, 16, %o;
ld.global.b32 %r0, [%x]; mov.b32 %f0, %r0; {coordinates}
{lines}
st.global.v4.b32 [%o], {{{result}}}; ret; }}"""
NEXT = "add.s64 %x, %x, {stride}; ld.global.b32 %r{k}, [%x]; mov.b32 %f{k}, %r{k};"
FLOATS, INTEGERS = "%f4, %f5, %f6, %f7", "%r4, %r5, %r6, %r7"


def run(target, x, lines, out="f4", bind=None, variables=""):
    """The four results of each thread, which has a column of x as %f0 ... or %r0 ..."""
    n, x = x.shape[1], np.ascontiguousarray(x)
    more = " ".join(NEXT.format(stride=4 * n, k=k) for k in range(1, len(x)))
    result = INTEGERS if out != "f4" else FLOATS
    text = ENTRY.format(coordinates=more, lines=lines, result=result, variables=variables)
    module, found = PtxModule(text), np.zeros((n, 4), out)
    for name, value in (bind or {}).items():
        module.bind(name, value)
    module.launch("k", block=-(-n // 32) * 32, args=[target, x, found, n])
    return found


def fetch(dims, values="%f", words="v4.f32.f32", more="", name="tex"):
    at = ", ".join(f"{values}{k}" for k in (*range(dims), *((2,) if dims == 3 else ())))
    result = INTEGERS if ".u32." in words else FLOATS
    return f"{name}.{dims}d.{words} {{{result}}}, [%t, {{{at}}}]{more};"


def make_texture(case):
    _, dims, shape, dtype, channels, read, normalized, mode, filter = case.split("|")
    border = (0.25, 0.5, 0.75, 1.5) if mode == "border" else (0, 0, 0, 0)
    sampler = SamplerObject((mode,) * 3, filter, normalized == "1", border)
    array = ON_GPU[case + "|a"]
    return int(dims), TextureObject(array, int(channels), sampler=sampler, normalized_read=read == "norm")


def find_edges(case, x):
    """Coordinates that a GPU may round to either side of a texel's edge."""
    _, dims, shape, _, _, _, normalized, _, filter = case.split("|")
    sizes = np.array([int(n) for n in shape.split("x")][::-1])[:, None]
    at = x.astype("f8") * (sizes if normalized == "1" else 1) * (256 if filter == "linear" else 1) - 0.5 * (
        filter == "linear"
    )
    return normalized == "1" and np.any(np.abs(at - np.round(at)) < 1e-2, axis=0)


@pytest.mark.parametrize("case", CASES)
def test_fetches_are_those_of_an_h100(case):
    """A point filter bit for bit, a linear one within its fraction of 8 bits and the precision of its type."""
    dims, texture = make_texture(case)
    x, want = ON_GPU[case + "|x"], ON_GPU[case + "|o"]
    clear = ~np.broadcast_to(find_edges(case, x), x.shape[1])
    assert clear.mean() > 0.5
    got = run(texture, x, fetch(dims))
    near = {"i1": 3e-3, "u1": 2e-5, "u2": 2e-5, "f2": 2e-3}.get(case.split("|")[3], 1e-6) if "linear" in case else 0
    if dims == 3 and near:
        assert (abs(got - want)[clear] < near).mean() > 0.9
        near = (
            np.ptp(texture.array.astype("f4"))
            / 200
            / (np.iinfo(texture.array.dtype).max if texture.normalized_read else 1)
        )
    np.testing.assert_allclose(got[clear], want[clear], rtol=0, atol=near)
    for name, line in (("tld4r", "tld4.r"), ("tld4g", "tld4.g")):
        if f"{case}|{name}" in ON_GPU:
            found = run(texture, x, fetch(2, name=line))
            clear_of_half = ~np.broadcast_to(find_edges(case.replace("point", "linear"), x), x.shape[1])
            np.testing.assert_array_equal(found[clear_of_half], ON_GPU[f"{case}|{name}"][clear_of_half])
    if f"{case}|off2" in ON_GPU:
        found = run(texture, x, fetch(2, more=", {2, -1}"))
        np.testing.assert_allclose(found[clear], ON_GPU[f"{case}|off2"][clear], atol=near)
    if f"{case}|xi" in ON_GPU:
        found = run(texture, ON_GPU[f"{case}|xi"], fetch(2, "%r", "v4.f32.s32"))
        np.testing.assert_array_equal(found, ON_GPU[f"{case}|oi"])


def test_layers_samplers_and_packed_halves():
    """Independent mode: one texture through two samplers, declared and bound; layers; results in halves."""
    rng = np.random.default_rng(1)
    image = rng.standard_normal((3, 4, 5)).astype("f4")
    variables = """.global .texref image;
    .global .samplerref nearest = { addr_mode_0 = clamp_to_edge, addr_mode_1 = clamp_to_edge, filter_mode = nearest };
    .global .samplerref smooth;"""
    bound = {"image": TextureObject(image, layered=True), "smooth": SamplerObject(filter="linear")}
    x = np.stack([np.tile([0, 1, 2, 7], 8), rng.integers(0, 5, 32), rng.integers(0, 4, 32)]).astype("f4")
    line = "cvt.rzi.u32.f32 %r0, %f0; add.f32 %f1, %f1, 0f3F800000; add.f32 %f2, %f2, 0f3F000000;"
    fetches = f"""{line} tex.a2d.v4.f32.f32 {{{FLOATS}}}, [image, nearest, {{%r0, %f1, %f2, %f2}}];
    .reg .f32 %g<4>; tex.a2d.v4.f32.f32 {{%g0, %g1, %g2, %g3}}, [image, smooth, {{%r0, %f1, %f2, %f2}}];
    mov.f32 %f5, %g0;"""
    found = run(0, x, fetches, bind=bound, variables=variables)
    layer, column, row = np.minimum(x[0], 2).astype(int), x[1].astype(int), x[2].astype(int)
    after = np.minimum(column + 1, 4)
    np.testing.assert_array_equal(found[:, 0], image[layer, row, after])
    np.testing.assert_allclose(found[:, 1], (image[layer, row, column] + image[layer, row, after]) / 2, rtol=1e-6)
    line = "tex.2d.v2.f16x2.f32 {%r4, %r5}, [%t, {%f1, %f2}]; mov.b32 %r6, 0; mov.b32 %r7, 0;"
    colors = rng.standard_normal((4, 5, 4)).astype("f4")
    halves = run(TextureObject(colors, 4), x + 0.5, line, out="u4")[:, :2].copy().view("f2")
    np.testing.assert_array_equal(halves, colors[row, column].astype("f2"))


def test_queries_and_kinds():
    texture = TextureObject(
        np.zeros((5, 7, 2), "u1"), 2, sampler=SamplerObject(("wrap", "border"), "linear", True), normalized_read=True
    )
    ask = "txq.{}.b32 %r{}, [%t];".format
    lines = ask("width", 4) + ask("height", 5) + ask("channel_data_type", 6) + ask("channel_order", 7)
    assert run(texture, np.zeros((1, 4), "f4"), lines, "u4")[0].tolist() == [7, 5, 0x10D2, 0x10B2]
    lines = ask("filter_mode", 4) + ask("addr_mode_0", 5) + ask("addr_mode_1", 6) + ask("normalized_coords", 7)
    assert run(texture, np.zeros((1, 4), "f4"), lines, "u4")[0].tolist() == [1, 0, 4, 1]
    kinds = "".join(
        f"istypep.{k} %p1, %t; selp.u32 %r{4 + i}, 1, 0, %p1;"
        for i, k in enumerate(("texref", "samplerref", "surfref"))
    )
    lines = kinds + "suq.width.b32 %r7, [%t];"
    assert run(SurfaceObject(np.zeros((2, 3), "f4")), np.zeros((1, 4), "f4"), lines, "u4")[0].tolist() == [0, 0, 1, 3]


def place(surface, columns, rows, line):
    """A store or reduction by each thread at (column, row), with its number plus 100 in %r4."""
    rest = " ".join(f"mov.b32 %f{k}, 0f00000000;" for k in range(4, 8))
    more = f"mov.u32 %r4, %tid.x; add.u32 %r4, %r4, 100; {line} {rest}"
    run(surface, np.stack([columns, rows]).astype("i4").view("f4"), more)


def test_surfaces_are_read_and_written_in_place():
    at, old = np.arange(12), np.arange(35, dtype="u4").reshape(5, 7)
    surface = SurfaceObject(old.copy())
    load = "suld.b.2d.b32.{} %r4, [%t, {{%r0, %r1}}]; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0;"
    x = np.stack([(at - 2) * 4, at % 7 - 1]).astype("i4").view("f4")
    found = run(surface, x, load.format("clamp"), "u4")[:, 0]
    np.testing.assert_array_equal(found, old[np.clip(at % 7 - 1, 0, 4), np.clip(at - 2, 0, 6)])
    inside = (at >= 2) & (at < 9) & (at % 7 >= 1) & (at % 7 < 6)
    np.testing.assert_array_equal(run(surface, x, load.format("zero"), "u4")[:, 0], np.where(inside, found, 0))
    place(surface, (at - 2) * 4, at % 7 - 1, "sust.b.2d.b32.zero [%t, {%r0, %r1}], %r4;")
    want = old.copy()
    want[(at % 7 - 1)[inside], (at - 2)[inside]] = 100 + at[inside]
    np.testing.assert_array_equal(surface.array, want)
    total = SurfaceObject(np.zeros((2, 3), "u4"))
    place(total, at % 3 * 4, at % 2, "sured.b.add.2d.u32.trap [%t, {%r0, %r1}], %r4;")
    np.testing.assert_array_equal(
        total.array, [[(100 + at[(at % 3 == j) & (at % 2 == i)]).sum() for j in range(3)] for i in range(2)]
    )
    halves = SurfaceObject(np.zeros((2, 3), "f2"))
    place(
        halves,
        at % 3,
        at % 2,
        """cvt.rn.f32.u32 %f4, %r4; mul.f32 %f4, %f4, 0f3F000000; mov.b32 %r4, %f4;
        sust.p.2d.b32.trap [%t, {%r0, %r1}], {%r4};""",
    )
    np.testing.assert_array_equal(halves.array, [[(106 + 0) / 2, 110 / 2, 108 / 2], [109 / 2, 107 / 2, 111 / 2]])


@pytest.mark.parametrize(
    ("target", "line", "error", "says"),
    [
        (7, fetch(2), ArgumentError, "not the handle of a texture"),
        (TextureObject(np.zeros(4, "f4")), fetch(2), ArgumentError, "the object has 1 dimensions, the instruction 2"),
        (TextureObject(np.zeros((4, 4), "u1")), fetch(2), ArgumentError, "a texture of integers read as .f32"),
        (
            SurfaceObject(np.zeros((4, 4), "f4")),
            fetch(2),
            ArgumentError,
            "a SurfaceObject where a TextureObject is read",
        ),
        (TextureObject(np.zeros((4, 4), "f4")), fetch(2).replace("2d", "cube"), UnsupportedOpError, "tex.cube"),
        (
            TextureObject(np.zeros((4, 4), "f4")),
            fetch(2, more=", %f0"),
            UnsupportedOpError,
            "the PTX emulator has no tex.2d",
        ),
    ],
    ids=["handle", "rank", "type", "kind", "cube", "depth"],
)
def test_wrong_fetches(target, line, error, says):
    with pytest.raises(error, match=says):
        run(target, np.zeros((2, 4), "f4"), line)


def test_wrong_surfaces_and_objects():
    surface = SurfaceObject(np.zeros((5, 7), "u4"))
    with pytest.raises(OutOfBoundsError, match=r"access of a surface of \(7, 5\) at \[28, 0\]"):
        place(surface, np.array([28]), np.array([0]), "sust.b.2d.b32.trap [%t, {%r0, %r1}], %r4;")
    with pytest.raises(OutOfBoundsError, match="x is byte 2, not a multiple of 4"):
        place(surface, np.array([4, 2]), np.array([0, 0]), "sust.b.2d.b32.trap [%t, {%r0, %r1}], %r4;")
    with pytest.raises(UnknownNameError, match="no texture, sampler or surface other"):
        run(0, np.zeros((2, 4), "f4"), fetch(2), bind={"other": surface}, variables=".global .surfref s;")
    with pytest.raises(ArgumentError, match="the wrong object for s"):
        run(0, np.zeros((2, 4), "f4"), fetch(2), bind={"s": SamplerObject()}, variables=".global .surfref s;")
    linear, plane = SamplerObject(filter="linear"), np.zeros((4, 4), "f4")
    for make in (
        lambda: TextureObject(np.zeros(4, "f8")),
        lambda: TextureObject(np.zeros((4, 3), "f4"), 3),
        lambda: TextureObject(plane.T),
        lambda: TextureObject(np.zeros(4, "u1"), sampler=linear),
        lambda: TextureObject(plane, normalized_read=True),
        lambda: SurfaceObject(np.zeros((2, 2, 2, 2), "f4")),
        lambda: SurfaceObject(np.zeros((0, 2), "f4")),
        lambda: SamplerObject(("wrap",)),
        lambda: SamplerObject(("edge",)),
        lambda: SamplerObject(filter="cubic"),
        lambda: SamplerObject(border=(0, 0)),
    ):
        with pytest.raises(ArgumentError):
            make()
