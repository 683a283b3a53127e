"""Sessions: Triton's launcher on tensors of PyTorch and arrays of NumPy, for several architectures."""

import numpy as np
import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl  # noqa: E402
from triton_kernels import add, matmul, normalise  # noqa: E402

import tessera as ts  # noqa: E402

ARCHITECTURES = ["sm_80", "sm_90a"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_and_arrays(arch):
    x, y = torch.rand(1000), np.linspace(0, 1, 1000, dtype=np.float32)
    out, array = torch.empty(1000), np.zeros(1000, np.float32)
    with ts.triton.interpreted(arch=arch, debug=True) as session:
        add[(8,)](x, x, out, 1000, BLOCK=128)
        add[(8,)](y, y, array, 1000, BLOCK=128)
    assert torch.equal(out, x + x) and (array == y + y).all() and session.launches == 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("debug", [False, True])
def test_matrix_product(arch, debug):
    a, b = torch.randn(70, 100).half(), torch.randn(100, 90).half()
    c = torch.empty(70, 90)
    with ts.triton.interpreted(arch=arch, debug=debug):
        matmul[(2, 2)](a, b, c, 70, 90, 100, 100, 90, 90, BM=64, BN=64, BK=32, num_warps=4)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-4)


def test_the_device_cuda_is_the_cpu():
    with ts.triton.interpreted():
        x = torch.ones(300, device="cuda")
        copy = x.to("cuda")
        add[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](x, x, copy, 300, BLOCK=128)
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and x.is_cuda
    assert (copy == 2).all() and (x == 1).all() and not x.is_cuda


def test_the_report_counts():
    x = torch.ones(256)
    with ts.triton.interpreted(report=True) as session:
        add[(2,)](x, x, torch.empty(256), 256, BLOCK=128)
    (report,) = session.reports
    assert report.counters.bytes == {"global read": 2048, "global written": 1024}
    assert report.counters.flops == 256 and report.occupancy.share == 1.0 and report.registers
    assert report.counters.sectors.taken == report.counters.sectors.least == 96
    assert "test_triton" not in str(report) and "triton_kernels.py" in str(report)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (64, 128, 256)], key=["n"])
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def double(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x + at, 2 * tl.load(x + at))
    else:
        tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("tune,launches", [("first", 2), ("all", 4)])
def test_autotuned_kernels(tune, launches):
    double.cache.clear()
    x = torch.ones(200)
    with ts.triton.interpreted(tune=tune) as session:
        double[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, 200)
    assert (x == 2**launches).all() and session.launches == launches


def test_unknown_choices_are_refused():
    with pytest.raises(ts.errors.ArgumentError, match="sm_100"), ts.triton.interpreted(arch="sm_100"):
        pass
    with pytest.raises(ts.errors.ArgumentError, match="way to tune"), ts.triton.interpreted(tune="none"):
        pass


@pytest.mark.parametrize("block", [32, 64, 256])
def test_copies_of_elements_do_not_race(block):
    x = torch.randn(3, block)
    want = x / x.norm(dim=1, keepdim=True)
    with ts.triton.interpreted(debug=True):
        normalise[(3,)](x, BLOCK=block, num_warps=8)
    torch.testing.assert_close(x, want)
