"""The first NaN or infinity, wherever it is made: ops that execute at once, traced functions, gradients, threads."""

import threading

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import NonFiniteError
from tessera.ir.rules import EAGER_CALL_HOOK
from tessera.ir.tensor import RESULT_OBSERVERS

MAKERS = {
    "log": lambda: ts.log(ts.Tensor([1.0, 0.0])),
    "div": lambda: ts.Tensor([1.0, 2.0]) / 0.0,
    "dot": lambda: ts.matmul(ts.full((2, 2), 1e38), ts.full((2, 2), 1e38)),
    "normalize": lambda: ts.layer_norm([[1.0, 1.0]], eps=0.0),
    "cast": lambda: ts.full(2, 1e6).to(ts.f16),
    "sqrt": lambda: ts.jit(lambda x: ts.sqrt(x))(np.float32([-1.0])),
    "div of a derivative": lambda: ts.grad(lambda x: ts.sqrt(x))(np.float32(0.0)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_op_and_line_are_named(name):
    with ts.debug.nan_check(), pytest.raises(NonFiniteError) as info:
        MAKERS[name]()
    assert f"ts.{name.split()[0]} makes" in str(info.value) and "test_nan_check.py" in str(info.value)


def test_what_comes_in_is_no_finding():
    with ts.debug.nan_check():
        assert np.isnan(ts.exp(ts.Tensor([np.nan])).numpy()[0]) and ts.where([True], ts.full(1, np.inf), 0.0)
        assert ts.Tensor([np.inf, 1.0]).sum().item() == np.inf


def test_a_decorator_and_a_mode_that_collects():
    @ts.debug.nan_check
    def root(x):
        return ts.sqrt(x)

    assert root(4.0).item() == 2.0
    with pytest.raises(NonFiniteError):
        root(-1.0)
    with ts.debug.mode(nan=True, collect=True) as report:
        ts.log(ts.Tensor([0.0]))
        ts.exp(ts.Tensor([1000.0]))
    assert [f.message.split()[0] for f in report.findings] == ["ts.log", "ts.exp"]


def test_other_threads_and_later_calls_are_not_checked():
    before, found = EAGER_CALL_HOOK[0], []
    with ts.debug.nan_check(), ts.debug.nan_check():
        thread = threading.Thread(target=lambda: found.append(ts.log(0.0).item()))
        thread.start()
        thread.join()
    assert found == [-np.inf] and ts.log(0.0).item() == -np.inf
    assert EAGER_CALL_HOOK[0] is before and not RESULT_OBSERVERS
