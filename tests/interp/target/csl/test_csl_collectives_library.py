"""Collective operations on a grid agree with NumPy: every operation, every root, in sequence, with any timing."""

from pathlib import Path

import numpy as np
import pytest

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.simulation import Simulation

PROGRAM = Path(__file__).parent / "programs" / "lines" / "layout.csl"
N = 5


@pytest.fixture(scope="module")
def layout():
    params = {"width": 4, "height": 3, "n": N}
    return compile_program(str(PROGRAM), params=params, arch="wse3", fabric_dims=(11, 5), fabric_offsets=(4, 1))


def place_rows(array):
    return {(x, y): array[y, x] for y in range(array.shape[0]) for x in range(array.shape[1])}


def expected(kind, send, root, before):
    """The contents of `receive` along axis 1 after an operation; `before` where the operation does not write."""
    want = before.copy()
    if kind == 0:
        others = [x for x in range(send.shape[1]) if x != root]
        want[:, others, :N] = send[:, root : root + 1, :N]
    elif kind == 1:
        want[..., :N] = send[:, root, : send.shape[1] * N].reshape(send.shape[0], -1, N)
    elif kind == 2:
        want[:, root, : send.shape[1] * N] = send[..., :N].reshape(send.shape[0], -1)
    else:
        want[:, root, :N] = send[..., :N].sum(1)
    return want


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_every_operation_with_every_root(layout, seed):
    run = Simulation(layout, seed)
    run.boot()
    rng = np.random.default_rng(0)
    receive = np.zeros((3, 4, N * 12), np.float32)
    for name, roots in (("row", range(4)), ("column", range(3))):
        for kind in range(4):
            for root in roots:
                send = rng.integers(0, 99, receive.shape).astype(np.float32)
                run.copy_in("send", place_rows(send))
                run.launch(name, kind, root)
                flip = (lambda a: a) if name == "row" else (lambda a: a.swapaxes(0, 1))
                receive = flip(expected(kind, flip(send), root, flip(receive)))
                got = np.zeros_like(receive)
                run.wait(run.copy_out("receive", place_rows(got)))
                np.testing.assert_array_equal(got, receive, err_msg=f"{name} {kind} {root}")
    assert not run.fabric.describe_stuck()
