"""The library `<kernels/fft/fft3d_layout>`: 3D transforms compared with NumPy's, and the errors of wrong programs."""

import numpy as np
import pytest

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.libraries.fft import transform_pencils
from tessera.interp.target.csl.simulation import Simulation
from tessera.interp.target.csl.text.diagnostics import CslError

LAYOUT = """
const memcpy = @import_module("<memcpy/get_params>", .{ .width = COLUMNS, .height = ROWS });
const fft = @import_module("<kernels/fft/fft3d_layout>", .{ .width = WIDTH, .memcpy = memcpy });
layout { @set_rectangle(COLUMNS, ROWS); fft.FFT_kernel(ARGS); REST }
"""
OTHER = """for (@range(i16, COLUMNS)) |x| {
  @set_tile_code(x, 0, "pe.csl", .{ .memcpy_params = memcpy.get_params(x) }); }"""
OTHER_CODE = """
param memcpy_params; const sys = @import_module("<memcpy/memcpy>", memcpy_params);
fn both(norm: i16, inverse: i16) void { sys.unblock_cmd_stream(); }
fn one(norm: i16) void { sys.unblock_cmd_stream(); }
comptime { @export_symbol(both, "csfftExecC2C"); @export_symbol(one, "csfftExecR2C");
  @export_symbol(one, "csfftExecC2R"); }"""


def compiled(folder, size, width, args="", at=(0, 0), element="f32", rest="", **options):
    columns, rows = at[0] + width, at[1] + width
    text = LAYOUT.replace("ARGS", args or f"{width}, {size}, {element}").replace("REST", rest)
    for name, value in (("WIDTH", width), ("COLUMNS", columns), ("ROWS", rows)):
        text = text.replace(name, str(value))
    (folder / "layout.csl").write_text(text)
    return compile_program(folder / "layout.csl", arch=options.pop("arch", "wse3"), **options)


def transform(layout, size, width, values, function, args, at=(0, 0), dtype=np.float32):
    """The spectrum of values[y, x, z], as the host of the vendor's example packs and unpacks it; and the cycles."""
    run, side = Simulation(layout), size // width
    run.boot()
    angles = np.pi * np.arange(size // 2) / (size // 2)
    places = [(x + at[0], y + at[1]) for x in range(width) for y in range(width)]
    factors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(dtype).reshape(-1)
    run.copy_in("twiddle_array", dict.fromkeys(places, factors))
    blocks = values.reshape(width, side, width, side, size).transpose(2, 0, 4, 1, 3)  # [px, py, z, ty, tx]
    pairs = np.stack([blocks.real, blocks.imag], axis=-1).astype(dtype)
    run.copy_in("X", {p: pairs[p[0] - at[0], p[1] - at[1]].reshape(-1) for p in places})
    run.wait(run.launch(function, *args))
    found = np.empty((width, width, size, side, side), complex)
    for x, y in places:
        cells = run.pes[x, y].get_variable("X").reshape(size, side, side, 2).astype(float)
        found[x - at[0], y - at[1]] = cells[..., 0] + 1j * cells[..., 1]
    time = run.pes[places[0]].get_variable("fft_time")
    return found.transpose(1, 3, 0, 4, 2).reshape(size, size, size), int(time[0]) + (int(time[1]) << 16)


def draw(size, real=False):
    rng = np.random.default_rng(size)
    values = rng.standard_normal((size, size, size)) + 1j * rng.standard_normal((size, size, size))
    return values.real.astype(complex) if real else values


@pytest.mark.parametrize("size, width", [(2, 1), (2, 2), (4, 4), (8, 2), (16, 4)])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_complex_transforms(size, width, inverse, norm, tmp_path):
    layout, values = compiled(tmp_path, size, width), draw(size)
    expected = (np.fft.ifftn if inverse else np.fft.fftn)(values, norm=norm)
    args = (["backward", "ortho", "forward"].index(norm), inverse)
    found, cycles = transform(layout, size, width, values, "csfftExecC2C", args)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * abs(expected).max())
    assert cycles > 0


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("function, reference", [("csfftExecR2C", np.fft.fftn), ("csfftExecC2R", np.fft.ifftn)])
def test_real_transforms(arch, function, reference, tmp_path):
    layout, values = compiled(tmp_path, 8, 4, arch=arch), draw(8, real=True)
    found, _ = transform(layout, 8, 4, values, function, (0,))
    np.testing.assert_allclose(found, reference(values), rtol=0, atol=1e-5)


@pytest.mark.parametrize("element, dtype", [("f16", np.float16), ("@fp16()", np.float16)])
def test_half_precision(element, dtype, tmp_path):
    layout, values = compiled(tmp_path, 8, 2, element=element), draw(8)
    found, _ = transform(layout, 8, 2, values, "csfftExecC2C", (1, 0), dtype=dtype)
    np.testing.assert_allclose(found, np.fft.fftn(values, norm="ortho"), rtol=0, atol=0.02)


def test_each_operation_rounds_to_the_element_type():
    block = np.array([[1.0, 0.0], [2.0**-11, 0.0]], np.float16)
    found = transform_pencils(block, np.array([[1, 0]], np.float16), False)
    assert found.dtype == np.float16 and found[:, 0].tolist() == [1.0, 1 - 2.0**-11]


def test_a_square_beside_other_code(tmp_path):
    """The form with five arguments; both runs of one program use the same state."""
    (tmp_path / "pe.csl").write_text(OTHER_CODE)
    layout, values = compiled(tmp_path, 4, 2, "0, 1, 2, 4, f32", at=(0, 1), rest=OTHER), draw(4)
    found, _ = transform(layout, 4, 2, values, "csfftExecC2C", (0, 0), at=(0, 1))
    np.testing.assert_allclose(found, np.fft.fftn(values), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size, width, published", [(32, 8, 224394), (64, 16, 519341)])
def test_cycles_of_the_vendors_program(size, width, published, tmp_path):
    values = np.zeros((size, size, size))
    values[0, 0, 0] = 1
    found, cycles = transform(compiled(tmp_path, size, width), size, width, values, "csfftExecC2C", (0, 0))
    assert (found == 1).all() and cycles == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    "args, message",
    [
        ("2, 1, f32", "power of two"),
        ("2, 4, bf16", "elements are f16 or f32"),
        ("-1, 0, 2, 4, f32", "do not fit"),
        ("2, 4", "expects 5 arguments, 2 provided"),
        ("f32, f32, f32", "does not accept these arguments"),
        ("2, 4, 4", "elements are f16 or f32"),
    ],
)
def test_errors_of_the_layout(args, message, tmp_path):
    with pytest.raises(CslError, match=message):
        compiled(tmp_path, 4, 2, args)


def test_sizes_that_exceed_the_memory_of_a_pe(tmp_path):
    with pytest.raises(CslError, match="memory"):
        compiled(tmp_path, 32, 2)
