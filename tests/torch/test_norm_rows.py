"""Rows of norms on a GPU: PyTorch's values, with no more passes over the tensor than its statistics need."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.runtime import driver  # noqa: E402
from tessera.torch.aten import ATEN  # noqa: E402
from tessera.torch.tensors import from_torch  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def draw(*shape, dtype=torch.float32, low=-1.0):
    return (
        torch.empty(shape)
        .uniform_(low, 2.0, generator=torch.Generator().manual_seed(int(sum(shape) - 8 * low)))
        .to(dtype)
    )


def run_row(name, *args, level="tile", **named):
    """The results of a row, and how many launches read its largest operand."""
    arrays = [from_torch(a).numpy() for a in args if isinstance(a, torch.Tensor)]
    row = ATEN[f"aten.{name}"]

    def program(*tensors):
        left = iter(tensors)
        return [v for v in row(*(next(left) if isinstance(a, torch.Tensor) else a for a in args), **named)]

    lowered = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    module, most = lowered["tile"], max(a.size for a in arrays)
    launches = [n for n in module.main.body.nodes if n.op.name == "host.launch"]
    passes = sum(1 for n in launches if any(np.prod(v.type.shape) == most for v in n.args[:-1]))
    return driver.run_level(lowered, level, arrays, "ptx"), passes


def check(name, *args, level="tile"):
    """Compare with PyTorch in f64."""
    found, passes = run_row(name, *args, level=level)
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    packet, overload = name.split(".")
    for ours, want in zip(found, getattr(getattr(torch.ops.aten, packet), overload)(*wide), strict=True):
        bound = TOLERANCE[args[0].dtype]
        np.testing.assert_allclose(
            ours.astype("f8"), want.numpy(), rtol=bound, atol=bound * max(1, float(want.abs().max()))
        )
    return passes


@pytest.mark.parametrize("level", ["tile", "target"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (1, 2, 33), (16, 3)])
def test_batch_norm_in_training(shape, dtype, level):
    x, c = draw(*shape, dtype=dtype), shape[1]
    weight, bias, mean, var = (draw(c), draw(c), draw(c), draw(c, low=0.5))
    args = (x, weight, bias, mean, var, True, 0.1, 1e-5)
    check("_native_batch_norm_legit_functional.default", *args, level=level)


def test_batch_norm_reads_its_tensor_for_its_statistics_and_its_result():
    args = (draw(8, 2, 64, 64), draw(2), draw(2), draw(2), draw(2, low=0.5), True, 0.1, 1e-5)
    assert check("_native_batch_norm_legit_functional.default", *args) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "groups"), [((2, 6, 96, 128), 2), ((1, 4, 40000), 4), ((2, 3, 181, 182), 1)])
def test_norms_of_long_rows_read_their_tensor_twice(shape, groups, dtype):
    """Once for the moments of parts, once for the result."""
    x, c, level = draw(*shape, dtype=dtype), shape[1], "target" if groups == 2 else "tile"
    size = x.numel() // shape[0] // c
    args = (x, draw(c, dtype=dtype), draw(c, dtype=dtype), shape[0], c, size, groups, 1e-5)
    assert check("native_group_norm.default", *args, level=level) == 2
    batch = (x, draw(c), draw(c), draw(c), draw(c, low=0.5), True, 0.1, 1e-5)
    assert check("_native_batch_norm_legit_functional.default", *batch, level=level) == 2


@pytest.mark.parametrize("level", ["tile", "target"])
def test_a_layer_norm_stores_its_statistics_where_it_reads_the_rows(level):
    assert check("native_layer_norm.default", draw(40, 96), [96], draw(96), draw(96), 1e-5, level=level) == 1


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "groups"), [((2, 6, 5, 7), 3), ((3, 4, 9), 1), ((1, 4, 33), 4)])
def test_gradients_of_group_norm(shape, groups, dtype, weighted):
    n, c = shape[:2]
    x, g = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, low=-2.0)
    weight = draw(c, dtype=dtype) if weighted else None
    grouped = x.double().reshape(n, groups, -1)
    mean = grouped.mean(-1).to(dtype)
    rest = (grouped.var(-1, correction=0) + 1e-5).rsqrt().to(dtype)
    args = (g, x, mean, rest, weight, n, c, x.numel() // n // c, groups, [True, weighted, weighted])
    (by_x, *others), _ = run_row("native_group_norm_backward.default", *args)
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    want = torch.ops.aten.native_group_norm_backward(*wide)
    for ours, theirs in zip((by_x, *others), (v for v in want if v is not None), strict=False):
        bound = 4 * TOLERANCE[dtype]
        np.testing.assert_allclose(
            ours.astype("f8"), theirs.numpy(), rtol=bound, atol=bound * float(theirs.abs().max())
        )


def test_gradients_of_group_norm_read_each_tensor_in_three_launches():
    x, g = draw(4, 8, 64, 64), draw(4, 8, 64, 64, low=-2.0)
    mean, rest, weight = draw(4, 2), draw(4, 2, low=0.5), draw(8)
    args = (g, x, mean, rest, weight, 4, 8, 4096, 2, [True, True, True])
    assert run_row("native_group_norm_backward.default", *args)[1] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "dim"), [((5, 33), [1]), ((3, 4, 5, 7), [0, 2, 3]), ((40,), None)])
def test_a_variance_with_its_mean(shape, dim, dtype):
    x = draw(*shape, dtype=dtype)
    found, passes = run_row("var_mean.correction", x, dim, correction=1)
    for ours, want in zip(found, torch.var_mean(x.double(), dim, correction=1), strict=True):
        np.testing.assert_allclose(ours.astype("f8"), want.numpy(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert passes <= 2


def test_the_running_variance_has_no_epsilon():
    args = (draw(4, 3, 5), None, None, draw(3), draw(3, low=0.5), True, 0.1, 0.5)
    check("_native_batch_norm_legit_functional.default", *args)


def test_distances_of_rows_without_elements():
    for x, y in ((torch.zeros(2, 3, 0), torch.zeros(2, 4, 0)), (torch.zeros(3, 0), torch.zeros(5, 4, 0))):
        found = ATEN["aten._cdist_forward.default"](from_torch(x), from_torch(y), 2.0, None)
        np.testing.assert_array_equal(found.numpy(), torch.cdist(x, y))


BY_DEFAULT, BY_PRODUCT, DIRECT = None, 1, 2  # ATen's modes of distances


def measure(x, y, mode, p=2.0, level="graph"):
    """The distances of a row, those of PyTorch, and those of f64, from the differences."""
    (found,), _ = run_row_of_one("_cdist_forward.default", x, y, p, mode, level=level)
    wanted = torch.ops.aten._cdist_forward(x, y, p, mode)
    return torch.tensor(found), wanted, torch.ops.aten._cdist_forward(x.double(), y.double(), p, DIRECT)


def run_row_of_one(name, *args, level):
    """As `run_row`, for a row with one result."""
    own = ATEN[f"aten.{name}"]
    arrays = [from_torch(a).numpy() for a in args if isinstance(a, torch.Tensor)]
    program = ts.jit(lambda x, y: own(x, y, *args[2:]))
    lowered = driver.lower(program.trace(*arrays).function, "ptx")
    launches = [n for n in lowered["tile"].main.body.nodes if n.op.name == "host.launch"]
    return driver.run_level(lowered, level, arrays, "ptx"), launches


@pytest.mark.parametrize("level", ["graph", "tile"])
@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("mode", [BY_DEFAULT, BY_PRODUCT, DIRECT])
@pytest.mark.parametrize(("rows", "others"), [(3, 25), (26, 5), (2, 40)])
def test_distances(rows, others, mode, p, level):
    x, y = draw(2, rows, 7), draw(1, others, 7)
    found, wanted, true = measure(x, y, mode, p, level)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-5)


def test_distances_of_many_rows_to_themselves_are_as_far_off_as_those_of_pytorch():
    x = draw(40, 64) + 3.0
    found, wanted, true = measure(x, x, BY_DEFAULT)
    assert not found.isnan().any() and (found - true).abs().max() <= 2 * (wanted - true).abs().max() + 1e-3
    assert measure(x, x, DIRECT)[0].diagonal().eq(0).all()


def test_distances_of_special_rows():
    x = draw(30, 3)
    x[0, 0], x[1, 1], x[2] = float("nan"), float("inf"), 1e20
    found, wanted, _ = measure(x, draw(5, 3), BY_DEFAULT)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_distances_of_many_rows_are_a_product_with_an_epilogue():
    _, launches = run_row_of_one("_euclidean_dist.default", draw(512, 128), draw(1024, 128), level="tile")
    made = [n for n in launches if any(np.prod(v.type.shape) == 512 * 1024 for v in n.args)]
    assert len(made) == 1 and len(launches) <= 5
