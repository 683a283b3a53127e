"""verify.numerics names the first op that leaves the numbers allowed, and its line."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ExecutionError, NonFiniteError
from tessera.stdlib.attention import attend
from tessera.tools import verify


@ts.verify.numerics(stable=True, bounded=[-100, 100])
@ts.kernel
def grown(x, out):
    block = tile.load(x[0:4])
    out[0:4] = ts.exp(block) * 0.01  # the exponential is what grows


@ts.verify.numerics()
@ts.kernel(target="llvm")
def compiled(x, out):
    out[0:4] = 1.0 / tile.load(x[0:4])


@ts.verify.numerics(bounded=[0, 10])
@ts.jit
def rooted(x):
    return ts.sqrt(x) + 1.0


def test_a_kernel_is_checked_op_by_op_before_it_writes():
    out = np.zeros(4, "f4")
    grown[(1,)](np.ones(4, "f4"), out)
    assert (out > 0.02).all()
    with pytest.raises(ExecutionError, match=r"test_verify.py:\d+:\d+: .*ts.exp leaves its bounds") as caught:
        grown[(1,)](np.full(4, 5.0, "f4"), out)
    assert "the exponential is what grows" in str(caught.value) and "148.413" in str(caught.value)
    with pytest.raises(NonFiniteError, match="ts.exp gives inf"):
        grown(np.full(4, 95.0, "f4"), out)
    with pytest.raises(NonFiniteError, match="tile.load gives nan"):
        grown(np.full(4, np.nan, "f4"), out)
    assert (out < 0.03).all()


def test_a_target_s_outputs_are_checked():
    out = np.zeros(4, "f4")
    compiled(np.ones(4, "f4"), out)
    with pytest.raises(NonFiniteError, match="output 0 of compiled gives inf"):
        compiled(np.zeros(4, "f4"), out)


def test_a_jit_function():
    assert rooted(np.full(3, 4.0, "f4")).numpy().tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(NonFiniteError, match="ts.sqrt gives nan"):
        rooted(np.array([-1.0], "f4"))
    with pytest.raises(ExecutionError, match="ts.add leaves its bounds"):
        rooted(np.array([99.0], "f4"))


def test_a_mask_s_infinities_are_no_fault(rng):
    q = rng.standard_normal((1, 2, 20, 4)).astype("f4")
    out = np.zeros_like(q)
    verify.numerics()(attend)[1, 2, 1](q, q, q, None, None, out, causal=True, scale=0.5)
    assert np.isfinite(out).all() and out.any()


def test_refusals():
    with pytest.raises(ArgumentError, match="goes around a kernel"):
        verify.numerics()(lambda x: x)
    with pytest.raises(ArgumentError, match="is no range"):
        verify.numerics(bounded=[3, 1])


def test_nan_is_counted_and_traced_to_its_op():
    rule = ts.verify.numerics()
    for target in ("interp", "llvm"):
        function = rule(ts.jit(lambda x: ts.log(x - 1.0) * 2.0, target=target))
        with pytest.raises(NonFiniteError, match="gives nan") as caught:
            function(np.float32([[3, 0.5], [0.25, 4]]))
        text = str(caught.value)
        assert "2 NaN of 4 elements, the first at [0, 1]" in text and "ts.log gives nan" in text
