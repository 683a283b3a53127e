"""DLPack both ways without a copy: with NumPy for all its types, with PyTorch where it is installed."""

import numpy as np
import pytest

import tessera as ts
from tessera.ir.array_interchange import DLPACK_CODES

TYPES = [
    ts.f64,
    ts.f32,
    ts.f16,
    ts.bf16,
    ts.fp8_e4m3,
    ts.fp8_e5m2,
    ts.int8,
    ts.int16,
    ts.int32,
    ts.int64,
    ts.uint8,
    ts.bool,
]


@pytest.mark.parametrize("dtype", [*TYPES, *DLPACK_CODES], ids=str)
def test_between_tensors(dtype):
    x = ts.Tensor([1.0, 0.0, 1.0], dtype)
    y = ts.from_dlpack(x)
    assert y.dtype is dtype and y.tolist() == x.tolist() and np.shares_memory(x.numpy(), y.numpy())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_with_pytorch(dtype):
    torch = pytest.importorskip("torch")
    x = ts.Tensor([1.0, 0.0], dtype)
    out = torch.from_dlpack(x)
    assert out.data_ptr() == x.numpy().ctypes.data and out.to(torch.float32).tolist() == [1.0, 0.0]
    for back in (ts.from_dlpack(out), ts.Tensor(out)):
        assert back.dtype is dtype and np.shares_memory(back.numpy(), x.numpy())


def test_memory_that_may_not_be_written_is_copied():
    x = ts.full(shape=(2,), value=3.0, dtype=ts.bf16)
    y = ts.from_dlpack(x)
    assert y.tolist() == [3.0, 3.0] and not np.shares_memory(x.numpy(), y.numpy())
    array = np.arange(3.0)
    array.flags.writeable = False
    assert ts.from_dlpack(array).tolist() == [0.0, 1.0, 2.0]
