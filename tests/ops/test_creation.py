"""Constants, ranges and random numbers: NumPy's values, Philox's published words, the same bits at every level."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.ir.numerics.conversion import philox_4x32


def test_ranges():
    for args in ((5,), (2, 7), (5, 0, -2), (3, 3), (0, 1, 0.1), (1, -1, -0.3), (0.5,)):
        want = np.arange(*args)
        got = ts.arange(*args)
        assert got.dtype == (ts.int64 if want.dtype.kind == "i" else ts.f32)
        np.testing.assert_allclose(got.numpy(), want.astype(got.dtype.numpy), rtol=1e-7, atol=1e-8)
    for args in ((0, 1, 7), (3, -2, 1), (0, 1, 0), (-1, 1, 2)):
        np.testing.assert_allclose(ts.linspace(*args).numpy(), np.linspace(*args, dtype=np.float32), rtol=1e-7)
    assert ts.linspace(0, 0.3, 4).tolist()[-1] == np.float32(0.3)
    np.testing.assert_array_equal(ts.eye(3, 4, -1).numpy(), np.eye(3, 4, -1))
    with pytest.raises(ArgumentError, match="step 0"):
        ts.arange(0, 1, 0)


def test_constants():
    x = ts.ones((2, 3), ts.bf16)
    assert ts.zeros_like(x).type == x.type and ts.full_like(x, 2, ts.int8).tolist() == [[2] * 3] * 2
    assert ts.empty((0, 2)).shape == (0, 2) and ts.ones_like(x).tolist() == x.tolist()


POLICIES = {
    "saturate": (ts.f16 @ ts.saturate, 1e6, 65504.0), "accumulate": (ts.bf16 @ ts.accum(ts.f64), 1.0078, 1.0078125),
    "toward zero": (ts.Policy("bf16", rounding="toward_zero"), 1.0078, 1.0), "integer": (ts.int8 @ ts.saturate, 7, 7.0),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "value", "want"), POLICIES.values(), ids=list(POLICIES))
def test_constants_keep_the_policy(policy, value, want):
    """The policy is that of the argument or of `dtype`; the value is rounded once, by it."""
    x = ts.cast(ts.ones((2, 3)), dtype=policy)
    for target in ("interp", "llvm"):
        for make in (lambda x: ts.full_like(x, value), lambda x: ts.full(x.shape, value, dtype=policy)):
            made = ts.jit(make, target=target)(x)
            assert made.type == x.type and made.tolist() == [[want] * 3] * 2
    assert ts.zeros_like(x).type == ts.ones_like(x).type == ts.empty_like(x).type == x.type
    assert ts.full_like(x, 1, ts.f32).type.policy is None


def test_a_stochastic_constant_draws_for_each_place():
    policy = ts.bf16 @ ts.stochastic_round
    found = ts.full_like(ts.cast(ts.zeros(4000), dtype=policy), 1 + 2**-9).numpy().astype(np.float64)
    assert set(found) == {1.0, 1.0078125} and abs(found.mean() - 1 - 2**-9) < 4 * 2**-7 * 0.43 / 4000**0.5


def test_philox_gives_the_published_words():
    """The known answers that Random123 ships for philox4x32-10."""
    ones = np.full(1, 0xFFFFFFFF, np.int64)
    found = [int(w[0]) for w in philox_4x32((ones,) * 4, (0xFFFFFFFF, 0xFFFFFFFF))]
    assert found == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [np.full(1, v, np.int64) for v in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    found = [int(w[0]) for w in philox_4x32(digits, (0xA4093822, 0x299F31D0))]
    assert found == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("dtype", (ts.f32, ts.f64, ts.bf16), ids=str)
def test_the_same_bits_at_every_level(dtype):
    eager = ts.rand((7, 3), dtype, generator=ts.Generator(11)).numpy()
    for target in ("interp", "llvm"):
        run = ts.jit(lambda seed: ts.rand((7, 3), dtype, generator=ts.Generator(seed)), target=target)
        assert (run(11).numpy() == eager).all() and (run(12).numpy() != eager).any()


def test_a_generator_goes_on():
    g = ts.Generator(5)
    first, second = ts.rand(100, generator=g).numpy(), ts.rand(100, generator=g).numpy()
    assert (first != second).all() and (ts.rand(100, generator=ts.Generator(5)).numpy() == first).all()


def test_distributions():
    g = ts.Generator(3)
    u, z = ts.rand(20000, generator=g).numpy(), ts.randn(20000, generator=g).numpy()
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20000)
    assert abs(z.mean()) < 5 / np.sqrt(20000) and abs(z.var() - 1) < 5 * np.sqrt(2 / 20000)
    counts = np.bincount(ts.randint(-2, 4, 12000, generator=g).numpy() + 2)
    assert counts.shape == (6,) and (abs(counts - 2000) < 5 * np.sqrt(2000)).all()
    kept = ts.dropout(ts.ones(20000), 0.3, generator=g).numpy()
    assert set(np.unique(kept)) == {np.float32(0), np.float32(1 / 0.7)} and abs((kept == 0).mean() - 0.3) < 0.02
    with pytest.raises(DTypeError):
        ts.rand(3, ts.int32)
    with pytest.raises(ArgumentError):
        ts.randint(3, 3, 2)


def test_sizes_as_arguments():
    """`zeros(3, 4)` as in PyTorch and `zeros((3, 4))` as in the reference."""
    for make in (ts.zeros, ts.ones, ts.empty, ts.rand, ts.randn):
        assert make(5).shape == (5,) and make(3, 4).shape == make((3, 4)).shape == make(shape=(3, 4)).shape == (3, 4)
        assert make(np.int64(2), 3, ts.f16).type == make(2, 3, dtype="f16").type == make((2, 3), ts.f16).type
        with pytest.raises(ArgumentError, match="a size of -1"):
            make(3, -1)
    assert ts.full(2, 3, 1.5).tolist() == ts.full((2, 3), 1.5).tolist() == ts.full(2, 3, fill_value=1.5).tolist()
    assert ts.full(3, 4).tolist() == [4.0] * 3 and ts.full(2, 3, ts.int32).tolist() == [3, 3]
    assert ts.jit(lambda x: ts.zeros(*x.shape) + x)(np.ones((2, 3), "f4")).tolist() == [[1.0] * 3] * 2


def test_a_tuple_of_ints_is_a_shape_of_a_tensor():
    """The reference: `Tensor(data)` takes an array or a shape. Ops and `tensor` take a tuple as its elements."""
    x = ts.Tensor((3, 4))
    assert x.type == ts.zeros((3, 4)).type and not x.numpy().any()
    assert ts.Tensor((2,), ts.int8).type == ts.zeros(2, ts.int8).type and ts.Tensor((0, 3)).shape == (0, 3)
    for same in (ts.Tensor([3, 4]), ts.tensor((3, 4)), ts.asarray((3, 4)), ts.Tensor(np.array((3, 4)))):
        assert same.tolist() == [3, 4]
    assert ts.sum((3, 4)).item() == 7 and ts.Tensor((1.0, 2.0)).tolist() == [1.0, 2.0]
    assert ts.Tensor(((1, 2), (3, 4))).shape == (2, 2) and ts.Tensor(()).shape == (0,)
    assert ts.Tensor((2, 3), requires_grad=True).requires_grad
    with pytest.raises(ShapeError, match="a size of -1"):
        ts.Tensor((2, -1))


def test_a_tensor_of_pytorch_that_cannot_be_shared_says_why():
    torch = pytest.importorskip("torch")
    for call in (ts.Tensor, ts.exp, ts.jit(lambda x: x * 2), ts.jit(lambda x: x * 2, target="llvm")):
        with pytest.raises(ArgumentError, match="requires gradients") as error:
            call(torch.ones(2, requires_grad=True))
        assert error.value.location.file == __file__ and "detach" in error.value.suggestion
    with pytest.raises(ArgumentError, match="cannot be shared"):
        ts.Tensor(torch.eye(2).to_sparse())


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_compiled_functions_take_pytorchs_narrow_floats(target):
    torch = pytest.importorskip("torch")
    double = ts.jit(lambda x: x * 2, target=target)
    for _ in range(2):
        assert double(torch.ones(3, dtype=torch.bfloat16)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("value", [-1.0, 255.9, 256.0, -0.5, 1e30, float("nan")])
@pytest.mark.parametrize("dtype", ["uint8", "int4", "int32", "int64"])
def test_a_fill_value_is_converted_as_a_cast_is(value, dtype):
    want = ts.cast(ts.tensor(np.float64([value])), dtype=dtype).tolist()
    assert ts.full((1,), value, dtype=dtype).tolist() == want
