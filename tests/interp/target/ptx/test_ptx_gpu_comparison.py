"""The comparison with a GPU, on a substitute for the GPU: it continues after failures and applies its exceptions."""

import os

import compare_on_gpu
import numpy as np
import pytest

TEXT = ".visible .entry k(.param .u64 p)\n{{ {} }}\n.visible .entry other() {{ ex2.approx.f32 %a, %b; }}"


class Fake:
    """Gives back the case, raises, or ends its process."""

    def run(self, case):
        if case == "raises":
            raise RuntimeError("an error's name")
        if case == "dies":
            os._exit(3)
        return case


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")  # the second of JAX
def test_a_new_process_after_each_failure(monkeypatch):
    monkeypatch.setattr(compare_on_gpu, "Gpu", Fake)
    cases = [1, "raises", 2, "raises", "dies", 3, 4]
    got = list(compare_on_gpu.outcomes(cases))
    assert got == [1, "an error's name", 2, "an error's name", "the process ended", 3, 4]


def judged(line, ours, gpu):
    """The row of the table for one array of a launch."""
    ours, gpu = np.asarray(ours), np.asarray(gpu)
    case = {"test": "t", "entry": "k", "text": TEXT.format(line), "types": [(0, ours.nbytes, ours.dtype.str)]}
    case |= {"before": np.zeros(ours.nbytes, "u1"), "after": ours.view("u1")}
    return compare_on_gpu.judged(case, gpu.view("u1"))


X = np.array([1, 2, 3, 4], "f4")


@pytest.mark.parametrize(
    "line,factor,row",
    [
        ("ex2.approx.f32 %a, %b;", 1, "the same bits"),
        ("ex2.approx.f32 %a, %b;", 1 + 2**-22, "excused: approximate instructions"),
        ("ex2.approx.f32 %a, %b;", 1 + 2**-18, "differ without an excuse"),
        ("tanh.approx.f32 %a, %b;", 1 + 2**-12, "excused: approximate instructions"),
        ("add.f32 %a, %b, %c;", 1 + 2**-22, "differ without an excuse"),
        ("wgmma.mma_async.sync %a, %b, %c;", 1 + 2**-12, "excused: sums of tensor cores"),
    ],
)
def test_what_is_excused(line, factor, row):
    assert judged(line, X, X * np.float32(factor))[0] == row


def test_what_is_printed():
    row, lines = judged("add.f32 %a, %b, %c;", X, X + np.float32([0, 0, 1, 0]))
    assert row == "differ without an excuse"
    assert lines == "DIFFERS t k: 1 elements\n  array 0[2]: ours 3.0 (0x40400000), GPU 4.0 (0x40800000); from "
    assert compare_on_gpu.judged({"test": "t", "entry": "k"}, "an error") == ("failed to run", "FAILED t k: an error")
