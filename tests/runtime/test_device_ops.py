"""Ops on tensors of a device: which programs are kept, and which numbers of host memory they take, without a device."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.types import TensorType, f32
from tessera.interp import graph
from tessera.ir.tensor import wrap_array
from tessera.ops.tensor import elementwise as e
from tessera.runtime.launch import device_ops

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def compiled(monkeypatch):
    """The functions that are compiled for the device, which is the interpreter."""
    found = []
    monkeypatch.setattr(device_ops, "_PROGRAMS", type(device_ops._PROGRAMS)())
    monkeypatch.setattr(device_ops, "_find_common_device", lambda operands: "interp")
    monkeypatch.setattr(
        device_ops, "compile_graph", lambda f, device: found.append(f) or (lambda arrays: graph.run(f, arrays))
    )
    return found


def tensor(array):
    return wrap_array(array, TensorType(array.shape, f32))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_an_array_that_repeats_one_number_is_that_number(shape, compiled):
    repeated = np.broadcast_to(X[: shape[0], : shape[1]] + 1, (3, 4))
    for _ in range(2):
        (found,) = device_ops.run_device_op(e.add, [tensor(X), tensor(repeated)], {})
        np.testing.assert_array_equal(found.numpy(), X + repeated)
    (program,) = compiled
    assert [p.type.shape for p in program.params] == [(3, 4), () if shape == (1, 1) else (3, 4)]


def test_an_empty_array_repeats_nothing(compiled):
    (found,) = device_ops.run_device_op(e.neg, [tensor(np.broadcast_to(np.float32(3), (0, 2)))], {})
    assert found.shape == (0, 2)


def test_loops_are_compiled_each_time(compiled):
    """Their regions have no hash: the second loop is not the first one."""
    for by in (2.0, 3.0):
        traced = ts.jit(lambda x, by=by: ts.fori_loop(0, 2, lambda i, y: y * by, x)).trace(X).function
        (node,) = [n for n in traced.body.nodes if n.regions]
        known = {p: X for p in traced.params}
        given = [ts.Tensor(known[v]) if v in known else _read(traced, v) for v in node.args]
        found = device_ops.run_device_op(node.op, given, node.attrs, node.regions, node.result_types)
        assert any(np.array_equal(t.numpy(), X * by**2) for t in found)


def _read(function, value):
    from dataclasses import replace

    return ts.Tensor(graph.run(replace(function, body=replace(function.body, results=(value,))), [X])[0])


def test_the_oldest_programs_are_forgotten(compiled, monkeypatch):
    monkeypatch.setattr(device_ops, "MAX_PROGRAMS", 2)
    for op in (e.neg, e.exp, e.sin, e.sin, e.neg):
        device_ops.run_device_op(op, [tensor(X)], {})
    assert len(compiled) == 4 and len(device_ops._PROGRAMS) == 2
