"""tile.inline: the emulation and the llvm text agree, and mistakes are named."""

import numpy as np
import pytest
from engines import results

import tessera as ts
from tessera import tile
from tessera.core.errors import (
    ArgumentError,
    ExecutionError,
    UnknownNameError,
    UnsupportedOpError,
    UnsupportedSyntaxError,
)
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ops.dialects.inline_asm import EMULATIONS, find_emulation, register_emulation
from tessera.runtime.program import prepare


def larger(x, y):
    return np.fmax(x, y)


@ts.kernel
def three_ways(x, y, out, bits, N: ts.constexpr):
    i = tile.program_id(0) * N
    a, b = tile.load(x[i : i + N]), tile.load(y[i : i + N])
    vector = tile.inline(a, b, python=larger, llvm="{out} = call {t} @llvm.maxnum.{s}({t} {0}, {t} {1})")
    s = 3
    scalar = tile.inline(
        vector, python=lambda v: np.abs(v) * s,
        llvm="{out}.a = call float @llvm.fabs.f32(float {0}); {out} = fmul float {out}.a, 3.0",
    )  # fmt: skip
    out[i : i + N] = scalar
    bits[i : i + N] = tile.inline(a, python=as_bits, llvm="{out} = bitcast {t0} {0} to {t}", dtype=ts.int32)


def as_bits(v):
    return v.view(np.int32)


@pytest.mark.parametrize("n", [1, 10, 16])
def test_every_engine_runs_it(n, rng):
    x, y = rng.standard_normal((2, 2 * n)).astype("f4")
    given = {"x": x, "y": y, "out": np.zeros(2 * n, "f4"), "bits": np.zeros(2 * n, "i4"), "N": n}
    for out, bits in results(three_ways, given, grid=(2,)):
        np.testing.assert_array_equal(out, np.abs(np.fmax(x, y)) * 3)
        np.testing.assert_array_equal(bits, x.view("i4"))


@ts.kernel
def in_a_group(x, out):
    me = tile.local_id()
    if me % 2 == 0:
        out[me] = tile.inline(x[me], me, python=lambda v, m: v * m, llvm="{out}.f = sitofp {t1} {1} to {t}\n"
                                                                        "{out} = fmul {t} {0}, {out}.f")  # fmt: skip


def test_tiles_of_a_group(rng):
    x = rng.random(8, dtype="f4")
    for (out,) in results(in_a_group, {"x": x, "out": np.zeros(8, "f4")}, group=8):
        np.testing.assert_array_equal(out, np.where(np.arange(8) % 2 == 0, x * np.arange(8, dtype="f4"), 0))


@ts.kernel
def halved(x, out):
    out[...] = tile.inline(tile.load(x), python=lambda v: v / 3, llvm="{out} = fdiv {t} {0}, splat (float 3.0)", ulp=1)


def test_narrow_floats_come_as_f32_and_round_once(rng):
    x = rng.standard_normal(8).astype(ts.bf16.numpy)
    for (out,) in results(halved, {"x": x, "out": np.zeros_like(x)}):
        np.testing.assert_array_equal(out, (x.astype("f4") / np.float32(3)).astype(x.dtype))


def test_the_bound_is_that_many_units_in_the_last_place(rng):
    x = rng.uniform(1.1, 1.9, 8).astype(ts.bf16.numpy)
    (found,) = prepare(halved, {"x": x, "out": np.zeros_like(x)}, grid=(1,)).bounds()
    value = (x.astype("f4") / np.float32(3)).astype(x.dtype).astype("f8")
    unit = 2.0 ** (np.floor(np.log2(value)) - 7)
    assert np.all(found.radius >= unit) and np.all(found.radius <= 2.01 * unit)  # relative to the value, of up to 2


def test_text_holds_the_emulation_by_name():
    x = np.ones(4, "f4")
    module = prepare(three_ways, {"x": x, "y": x, "out": x, "bits": x.view("i4"), "N": 4}, grid=(1,)).levels["tile"]
    assert parse_module(print_module(module)) == module


@ts.kernel
def without_text(x):
    x[0] = tile.inline(x[0], python=np.sin)


@ts.kernel
def not_elementwise(x):
    x[0:4] = tile.inline(x[0:4], python=lambda v: v.sum(keepdims=True), llvm="{out} = bitcast {t} {0} to {t}")


@ts.kernel
def captures(x):
    a = x[0]
    x[0] = tile.inline(x[1], python=lambda v: v + a)


@ts.kernel
def bad_field(x):
    x[0] = tile.inline(x[0], python=np.sin, llvm="{out} = {nonsense}")


@pytest.mark.parametrize(
    ("entry", "engine", "error", "message"),
    [
        (without_text, ("device", "llvm"), UnsupportedOpError, "no instructions for the target llvm"),
        (not_elementwise, ("tile", "interp"), ExecutionError, "not elementwise"),
        (captures, ("tile", "interp"), UnsupportedSyntaxError, "pass it as an operand"),
        (bad_field, ("device", "llvm"), ArgumentError, "cannot be filled in"),
    ],
)
def test_mistakes_are_named(entry, engine, error, message):
    with pytest.raises(error, match=message):
        results(entry, {"x": np.ones(4, "f4")}, engines=[engine])


def forgotten(entry, arguments):
    """A program, run where its emulation has not been registered."""
    program = prepare(entry, arguments, grid=(1,))
    name = next(
        n.attrs["python"] for n in program.levels["tile"].functions[1].body.walk() if n.op.name == "tile.inline"
    )
    held = EMULATIONS.pop(name)
    try:
        return program.run("tile")
    finally:
        EMULATIONS[name] = held


@pytest.mark.parametrize("name", ["numpy:sin", "pickle:loads", "test_inline:larger"])
def test_a_text_names_no_importable(name):
    """Whoever writes a text would choose what runs: a name finds only what this process has registered."""
    with pytest.raises(UnknownNameError, match=f"the emulation {name} of tile.inline is not loaded"):
        find_emulation(f"{name}#000000000000")
    with pytest.raises(UnknownNameError, match="numpy:sin"):
        forgotten(without_text, {"x": np.ones(1, "f4")})


def test_an_emulation_of_another_process_is_asked_for(rng):
    with pytest.raises(UnknownNameError, match=r"(?s)is not loaded.*launch or build the kernel"):
        forgotten(halved, {"x": rng.random(8, dtype="f4"), "out": np.zeros(8, "f4")})


@ts.kernel
def shifted(x, by: ts.constexpr):
    x[0] = tile.inline(x[0], python=lambda v: v + by)


def test_emulations_that_differ_in_a_value_have_names_of_their_own():
    """A program that was specialised first keeps its own emulation."""
    first, second = (prepare(shifted, {"x": np.zeros(1, "f4"), "by": by}, grid=(1,)) for by in (1.0, 2.0))
    assert [p.run("tile")[0][0] for p in (first, second, first)] == [1.0, 2.0, 1.0]


def closing_over(value):
    return lambda v: v + value


@pytest.mark.parametrize("one, other", [(1, 2), (np.arange(2000), np.arange(2000)[::-1]), (object(), object())])
def test_a_name_depends_on_what_a_function_closes_over(one, other):
    names = [register_emulation(closing_over(v)) for v in (one, other, one)]
    assert names[0] == names[2] != names[1]
