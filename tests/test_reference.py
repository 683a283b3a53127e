"""The API reference, name by name: every function takes the arguments it lists, every property and method is there."""

import numpy as np
import pytest

import tessera as ts
from tessera import stdlib
from tessera.core.errors import DeviceUnavailable
from tessera.lazy_exports import EXTRAS

f32, g = ts.f32, ts.Generator(1)
x, y, v = ts.rand((4, 4), generator=g), ts.rand((4, 4), generator=g), ts.rand((4,), generator=g)
spd, image = x @ x.T + 4.0 * ts.eye(4), ts.rand((1, 2, 5, 5), generator=g)
OVER = {"axis": (0, 1), "keepdims": True}
UNARY = "sin cos tan sinh cosh tanh exp log log2 log10 sqrt rsqrt relu gelu silu sigmoid svd qr".split()
CALLS = {
    "zeros": {"shape": (2,), "dtype": f32, "device": "cpu"},
    "ones": {"shape": (2,), "dtype": f32, "device": "cpu"},
    "full": {"shape": (2,), "fill_value": 3.0, "dtype": f32, "device": "cpu"},
    "arange": {"start": 0, "end": 4, "step": 1, "dtype": f32, "device": "cpu"},
    "linspace": {"start": 0, "end": 1, "steps": 3, "dtype": f32, "device": "cpu"},
    "randn": {"shape": (2,), "dtype": f32, "device": "cpu", "generator": g},
    "rand": {"shape": (2,), "dtype": f32, "device": "cpu", "generator": None},
    "randint": {"low": 0, "high": 3, "shape": (2,), "dtype": ts.int32, "device": "cpu"},
    **{name: {"x": x, "y": y} for name in ("add", "sub", "mul", "div")},
    "pow": {"x": x, "exponent": 2.0},
    **{name: {"x": x, **OVER} for name in ("sum", "mean", "max", "min", "var", "std")},
    **{name: {"x": x} for name in UNARY},
    "cholesky": {"x": spd},
    "eig": {"x": spd},
    "matmul": {"a": x, "b": y},
    "gemm": {"a": x, "b": y, "c": y, "alpha": 1.0, "beta": 0.5, "trans_a": True, "trans_b": False},
    "dot": {"a": v, "b": v},
    "transpose": {"x": x, "dim0": -2, "dim1": -1},
    "permute": {"x": x, "dims": (1, 0)},
    "reshape": {"x": x, "shape": (16,)},
    "flatten": {"x": x, "start_dim": 0, "end_dim": -1},
    "softmax": {"x": x, "dim": -1},
    "log_softmax": {"x": x, "dim": -1},
    "layer_norm": {"x": x, "normalized_shape": (4,), "weight": v, "bias": v, "eps": 1e-5},
    "batch_norm": {
        "x": x, "running_mean": v, "running_var": v, "weight": v, "bias": v, "training": True, "momentum": 0.1,
        "eps": 1e-5,
    },
    "rms_norm": {"x": x, "weight": v, "eps": 1e-5},
    "conv2d": {
        "input": image, "weight": ts.ones((4, 1, 3, 3)), "bias": v, "stride": (1, 1), "padding": (0, 0),
        "dilation": (1, 1), "groups": 2,
    },
    "max_pool2d": {"input": image, "kernel_size": (2, 2), "stride": None, "padding": (0, 0)},
    "avg_pool2d": {"input": image, "kernel_size": (2, 2), "stride": None, "padding": (0, 0)},
    "dropout": {"x": x, "p": 0.5, "training": True},
    "mse_loss": {"input": x, "target": y, "reduction": "mean"},
    "cross_entropy": {"input": x, "target": ts.Tensor([0, 1, 2, 3]), "weight": v, "reduction": "mean"},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_functions_take_what_the_reference_lists(name):
    out = getattr(ts, name)(**CALLS[name])
    assert all(isinstance(part, ts.Tensor) for part in (out if isinstance(out, tuple) else (out,)))


def test_einsum_and_dot():
    assert ts.allclose(ts.einsum("ij,jk->ik", x, y), x @ y, rtol=1e-6)
    assert ts.dot(v, v).shape == () and ts.allclose(ts.dot(v, v), (v * v).sum(), rtol=1e-6)
    assert ts.jit(ts.dot.__call__, target="llvm")(v, v).shape == ()


def test_the_tensor_class():
    made = ts.Tensor(data=[1.0], dtype=f32, device="cpu", requires_grad=True, layout="row_major")
    assert (made.shape, made.dtype, made.device, made.grad, made.requires_grad) == ((1,), f32, "cpu", None, True)
    assert made.to(device="cpu").item() == made.cpu().numpy()[0] == made.detach().item() == 1.0
    (made * 3.0).sum().backward()
    assert made.grad.tolist() == [3.0]
    with pytest.raises(DeviceUnavailable):
        made.cuda()


@pytest.mark.parametrize("name", "float32 float16 bfloat16 float64 fp8_e4m3 fp8_e5m2 fp6 fp4".split())
def test_float_types_by_name(name):
    known = {"float32": ts.f32, "float16": ts.f16, "bfloat16": ts.bf16, "float64": ts.f64}
    assert ts.DType(name) == known.get(name, getattr(ts, name, None)) and ts.zeros(2, ts.DType(name)).shape == (2,)


@pytest.mark.parametrize("name", "int8 int16 int32 int64 uint8 bool".split())
def test_other_types_by_name(name):
    assert ts.DType(name) == getattr(ts, name) and hash(ts.DType(name)) == hash(getattr(ts, name))


def test_a_star_import_needs_no_extra():
    assert not set(EXTRAS) & set(ts.__all__)


def test_dir_shows_public_names_alone():
    shown = [n for n in dir(ts) if not n.startswith("__")]
    assert (
        sorted(shown) == sorted([*ts.__all__, *EXTRAS])
        and "Any" not in shown
        and "math" not in shown
        and "zeros" in shown
    )
    assert [n for n in dir(stdlib) if not n.startswith("__")] == stdlib.__all__


def test_the_routines_that_the_goals_import():
    names = "flash_attention_2 efficient_layernorm stable_softmax fused_adam rotary_embedding".split()
    assert set(names) <= set(stdlib.__all__)
    step = stdlib.fused_adam.with_schedule(ts.Schedule(warps=8))
    param, m, v = ts.ones(3), ts.zeros(3), ts.zeros(3)
    step(param, ts.ones(3), m, v, step=1, lr=0.5)
    assert np.allclose(param, 0.5, rtol=1e-4)


def test_remat_is_checkpoint():
    assert ts.remat is ts.checkpoint
    assert ts.grad(ts.remat(lambda x: ts.sin(x) * x))(0.0).item() == 0.0
