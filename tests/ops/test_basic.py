"""Constants, casts and broadcasts."""

import numpy as np
import pytest

from tessera.core.errors import DTypeError, ShapeError
from tessera.core.types import bf16, bool_, f16, f32, int8, int32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to, cast, full


def test_full():
    assert full(shape=(2, 3), value=1.5).numpy().tolist() == [[1.5] * 3] * 2 and full(shape=3, value=1).dtype == f32
    assert full(shape=(), value=2.7, dtype=int32).numpy() == 2 and full(shape=(0,), value=0.0).shape == (0,)
    assert full(shape=(1,), value=0.1, dtype=bf16).numpy().astype(float)[0] == 0.10009765625
    assert full(shape=(1,), value=True, dtype="bool").dtype == bool_


def test_cast():
    x = Tensor([1.9, -1.9, 300.0, np.nan])
    assert cast(x, dtype=int8).numpy().tolist() == [1, -1, 127, 0] and x.to("f16").dtype == f16
    assert cast(x, dtype=float).dtype == f32
    with pytest.raises(DTypeError, match="is not an element type"):
        cast(x, dtype="f17")


def test_broadcast():
    x = Tensor([[1.0], [2.0]])
    assert broadcast_to(x, shape=(3, 2, 2)).numpy()[2].tolist() == [[1, 1], [2, 2]]
    with pytest.raises(ShapeError, match=r"\(2, 1\) does not broadcast to \(2,\)"):
        broadcast_to(x, shape=(2,))
