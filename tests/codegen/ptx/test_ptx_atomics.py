"""Atomic updates of every element type: native atomics, and compare-and-swap loops on 16 bits or more."""

from dataclasses import replace

import numpy as np
import pytest
from ptxcheck import emit_checked, numbers, run
from tilekernels import Kernel

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.core.types import BY_NAME, SHARED, bool_, f16, f32, f64, int32, int64
from tessera.ir.core import Attrs, Module
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

FLOATS = ("f64", "f32", "tf32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp6", "fp6_e2m3", "fp4")
WHOLE = ("int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
ORDERED = ("max", "min", "exchange")


def bins(k, count, mask=3):
    return k(e.bitwise_and, k(shape.iota, shape=(count,), axis=0), k.const(mask, int64, (count,)))


def updated(k, x, out, kind):
    """Each element into one of four places; for a swap, one into each."""
    if kind == "swap":
        k(tile.compare_exchange, out, k.load(x), k.load(out), bins(k, 5, 7))
    else:
        k(tile.atomic, out, k.load(x), bins(k, 96), kind=kind)


@pytest.mark.parametrize("name", (*FLOATS, *WHOLE, "bool"))
def test_max_and_min(name):
    """Of five elements, an odd number of bytes where they are one each."""
    dtype = BY_NAME[name]
    for kind in ("max", "min"):
        run(lambda k, x, out, kind=kind: updated(k, x, out, kind), numbers(dtype, 96), numbers(dtype, 5, seed=1))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", ["add", "and", "or", "xor", "swap"])
def test_integers(name, kind):
    dtype = BY_NAME[name]
    count = 5 if kind == "swap" else 96
    run(lambda k, x, out: updated(k, x, out, kind), numbers(dtype, count), numbers(dtype, 5, seed=1))


@pytest.mark.parametrize("name", FLOATS)
def test_sums(name):
    """One summand for each place, so that rounding leaves nothing open."""
    dtype = BY_NAME[name]

    def build(k, x, out):
        k(tile.atomic, out, k.load(x), bins(k, 5, 7), kind="add")

    run(build, numbers(dtype, 5), numbers(dtype, 5, seed=1))


def test_bools():
    run(lambda k, x, out: updated(k, x, out, "add"), numbers(bool_, 96), np.zeros(5, bool))


@pytest.mark.parametrize("name", ["int8", "int16", "fp8_e4m3", "bf16"])
def test_shared_memory_of_a_group(name):
    dtype = BY_NAME[name]

    def build(k, x, out):
        me = k(tile.local_id)
        room = k(tile.alloc, shape=(7,), dtype=dtype, space=SHARED)
        seven = k(e.remainder, me, k.const(7))
        k.store(room, k.load(out, seven, shape=(1,)), seven)
        k(tile.barrier)
        k(tile.atomic, room, k.load(x, me, shape=(1,)), k.broadcast(seven, 1), kind="max")
        k(tile.barrier)
        k.store(out, k.load(room, seven, shape=(1,)), seven)

    run(build, numbers(dtype, 40), numbers(dtype, 7, seed=1), group=40, arch="sm_90a")


@pytest.mark.parametrize("kind", ["add", "max", "min"])
@pytest.mark.parametrize("dtype", (f32, f64, int32, int64, f16), ids=str)
def test_duplicate_indices(dtype, kind):
    def build(k, x, out):
        bins = k(e.bitwise_and, k(shape.iota, shape=(96,), axis=0), k.const(3, int64, (96,)))
        k(tile.atomic, out, k(basic.cast, k(basic.cast, k.load(x), dtype=int32), dtype=dtype), bins, kind=kind)

    run(build, numbers(dtype, 96), np.zeros(4, dtype.numpy))


def test_a_result_that_atomics_add_to_begins_at_zero():
    """New memory of the emulated GPU is not zero."""
    x, out = np.arange(96, dtype=np.int32), np.zeros(4, np.int32)
    k = Kernel(x, out)
    updated(k, *k.params, "add")
    main, body = k.module((1,)).functions
    program = BACKEND.runtime(emit_checked(Module("tile", (replace(main, attrs=Attrs({"outputs": 1})), body))))
    for _ in range(2):
        (found,) = program.call([ts.Tensor(x).to("ptx").data])
        np.testing.assert_array_equal(ts.Tensor(found).numpy(), x.reshape(-1, 4).sum(0))
