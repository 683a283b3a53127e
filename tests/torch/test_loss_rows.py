"""Losses of distributions and classes: PyTorch's values, with what they ignore, and no more memory than they need."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.torch.aten import ATEN  # noqa: E402
from tessera.torch.tensors import from_torch  # noqa: E402

F = torch.nn.functional
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def lower(function, *tensors):
    arrays = [from_torch(t).numpy() for t in tensors]
    lowered = driver.lower(ts.jit(function).trace(*arrays).function, "ptx")
    return lowered, arrays


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.in_turn("weighted")
@pytest.mark.parametrize("level", ["tile", "target"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "shape"), [(d, (13, 37)) for d in TOLERANCE] + [(torch.float32, (2, 33, 3, 5))])
def test_cross_entropy(dtype, shape, weighted, reduction, level):
    x, weight = draw(*shape, dtype=dtype), draw(shape[1]).abs().to(dtype) if weighted else None
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(7))
    target[0], target[-1] = -100, 0
    code = {"none": 0, "mean": 1, "sum": 2}[reduction]

    def loss(x, target, *weights):
        return ATEN["aten.cross_entropy_loss.default"](x, target, *(weights or (None,)), code)

    lowered, arrays = lower(loss, x, target, *(() if weight is None else (weight,)))
    launches = [n for n in lowered["tile"].main.body.nodes if n.op.name == "host.launch"]
    assert all(np.prod(n.args[-1].type.shape) < x.numel() for n in launches)
    (ours,) = driver.run_level(lowered, level, arrays, "ptx")
    wide = None if weight is None else weight.double()
    want = F.cross_entropy(x.double(), target, wide, reduction=reduction)
    np.testing.assert_allclose(ours.astype("f8"), want.numpy(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", ["tile", "target"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_with_logarithms(dtype, level):
    """0 · log(0) is 0; a NaN stays one, and so does the logarithm of what is negative."""
    values = [0.0, -0.0, 1e-3, 0.5, 1.0, 2.0, float("inf"), float("nan"), -1.0, -float("inf")]
    x = torch.tensor(values, dtype=dtype)
    pairs = torch.cartesian_prod(x, x)
    xlogy = ATEN["aten.xlogy.Tensor"]
    for function, tensors in ((lambda t: xlogy(t, t), (x,)), (xlogy, (pairs[:, 0].clone(), pairs[:, 1].clone()))):
        lowered, arrays = lower(function, *tensors)
        with np.errstate(all="ignore"):
            (ours,) = driver.run_level(lowered, level, arrays, "ptx")
        want = torch.xlogy(*(tensors * 2)[:2]).double().numpy()
        np.testing.assert_allclose(ours.astype("f8"), want, rtol=TOLERANCE[dtype])


def test_divergence_of_distributions():
    x, y = (draw(9, 70).softmax(1), draw(9, 70).flip(0).softmax(1))
    y[2, 3] = 0.0

    def divergence(x, y):
        log, xlogy = ATEN["aten.log.default"], ATEN["aten.xlogy.Tensor"]
        return ts.sum(xlogy(y, y) - y * log(x)) / 9.0

    lowered, arrays = lower(divergence, x, y)
    want = F.kl_div(x.double().log(), y.double(), reduction="batchmean")
    for level in ("tile", "target"):
        np.testing.assert_allclose(driver.run_level(lowered, level, arrays, "ptx")[0], want.numpy(), rtol=1e-5)


def test_the_derivative_of_smooth_l1_keeps_a_nan():
    x = torch.tensor([float("nan"), 0.5, -3.0], requires_grad=True)
    F.smooth_l1_loss(x, torch.zeros(3), reduction="sum").backward()
    row = ts.jit(lambda g, x, y: ATEN["aten.smooth_l1_loss_backward.default"](g, x, y, 2, 1.0))
    found = row(*(from_torch(t) for t in (torch.tensor(1.0), x.detach(), torch.zeros(3))))
    np.testing.assert_array_equal(found.numpy(), x.grad.numpy())
