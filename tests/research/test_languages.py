"""Generated kernels, embedded languages, ops of one element type."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tessera
import tessera as ts
from tessera.errors import ArgumentError, DTypeError, ShapeError, UnsupportedSyntaxError

R = np.random.default_rng(0)
Q, K, V = (R.standard_normal((2, 3, 50, 8)).astype("f4") for _ in range(3))


def attention(q, k, v, mask):
    """PyTorch's."""
    torch = pytest.importorskip("torch")
    made = torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), torch.tensor(mask))
    return made.numpy()


@ts.dsl
class AttentionDSL:
    """DSL for attention variants"""

    def flash_attention(self, q, k, v):
        """Flash attention pattern"""
        return self.tiled_attention(q, k, v, tile_size=16, use_online_softmax=True)

    def two_pass(self, q, k, v):
        return self.tiled_attention(q, k, v, tile_size=7, use_online_softmax=False)

    def causal(self, q, k, v):
        return self.tiled_attention(q, k, v, tile_size=13, causal=True)

    def sliding_window(self, q, k, v, window=16):
        """Sliding window attention"""
        return self.windowed_attention(q, k, v, window_size=window, overlap=4)

    def compile(self):
        """Compile DSL to Tessera kernels"""
        return tessera.compile_dsl(self)


def window_mask(length, window, overlap):
    i, j = np.mgrid[:length, :length]
    start = i // window * window
    return (j >= start - overlap) & (j < start + window + overlap)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("flash_attention", np.ones((50, 50), bool)),
        ("two_pass", np.ones((50, 50), bool)),
        ("causal", np.tril(np.ones((50, 50), bool))),
        ("sliding_window", window_mask(50, 16, 4)),
    ],
)
def test_15_1_variants_of_attention_agree_with_pytorch(name, mask):
    found = getattr(AttentionDSL().compile(), name)(Q, K, V)
    np.testing.assert_allclose(found.numpy(), attention(Q, K, V, mask), rtol=1e-4, atol=1e-5)


def test_settings_of_a_program_are_static_and_targets_agree():
    made = ts.compile_dsl(AttentionDSL(), target="llvm")
    found = made.sliding_window(Q[0, 0], K[0, 0], V[0, 0], window=5).numpy()
    want = attention(Q[:1, :1], K[:1, :1], V[:1, :1], window_mask(50, 5, 4))[0, 0]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_online_softmax_survives_large_scores():
    big = ts.compile_dsl(AttentionDSL()).flash_attention(Q * 300, K, V).numpy()
    np.testing.assert_allclose(big, attention(Q * 300, K, V, np.ones((50, 50), bool)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_lengths_beside_the_tiles(length):
    q, k, v = (x[..., :length, :] for x in (Q, K, V))
    made = AttentionDSL().compile()
    ones = np.ones((length, length), bool)
    np.testing.assert_allclose(made.flash_attention(q, k, v).numpy(), attention(q, k, v, ones), rtol=1e-4, atol=1e-5)
    want = attention(q, k, v, window_mask(length, 16, 4))
    np.testing.assert_allclose(made.sliding_window(q, k, v).numpy(), want, rtol=1e-4, atol=1e-5)


def test_what_a_language_refuses():
    program = AttentionDSL()
    with pytest.raises(ShapeError):
        program.tiled_attention(Q, K[..., :4], V)
    with pytest.raises(ShapeError):
        program.windowed_attention(Q, K[..., :9, :], V[..., :9, :])
    for size in (0, -1, 2.5, True):
        with pytest.raises(ArgumentError):
            program.tiled_attention(Q, K, V, tile_size=size)
    with pytest.raises(ArgumentError):
        ts.compile_dsl(object())
    with pytest.raises(ArgumentError):
        ts.dsl(3)
    with pytest.raises(ArgumentError, match="no method"):
        ts.compile_dsl(ts.dsl(type("Empty", (), {}))())


# Generated kernels


@tessera.meta.generate
def generate_optimized_kernel(config):
    """Generate kernel code from configuration"""
    code = tessera.meta.Template("""
    @tessera.kernel
    def generated_kernel_{name}(
        input: Tile[{tile_m}, {tile_k}],
        weight: Tile[{tile_k}, {tile_n}],
        output: Tile[{tile_m}, {tile_n}]
    ):
        # Generated code
        {body}
    """)
    if config.use_tensor_cores:
        body = "output[:] = tile.dot(input[:], weight[:])"
    else:
        body = "acc = tile.zeros(({m}, {n}), f32)\nfor k in range({k}):\n"
        body += "    acc += input[:, k:k+1] * weight[k:k+1, :]\noutput[:] = acc"
        body = tessera.meta.Template(body).render(m=config.tile_m, n=config.tile_n, k=config.tile_k)
    return code.render(name=config.name, tile_m=config.tile_m, tile_k=config.tile_k, tile_n=config.tile_n, body=body)


@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_15_1_kernels_from_configurations(matrix, target, monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    config = SimpleNamespace(name="small", use_tensor_cores=matrix, tile_m=8, tile_k=16, tile_n=4)
    kernel = generate_optimized_kernel(config)
    a, b, out = R.standard_normal((8, 16)).astype("f4"), R.standard_normal((16, 4)).astype("f4"), np.zeros((8, 4), "f4")
    with ts.device("cpu" if target == "llvm" else "interp"):
        kernel[1,](a, b, out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-5, atol=1e-5)
    assert kernel.__name__ == "generated_kernel_small" and generate_optimized_kernel(config) is kernel


def test_templates():
    make = tessera.meta.Template
    assert make("if x:\n    {body}").render(body="a\nb") == "if x:\n    a\n    b"
    assert make("{{a}} {b}").render(b=1) == "{a} 1" and make("{a}{b}{a}").fields == ("a", "b")
    for values in ({}, {"a": 1, "b": 2}):
        with pytest.raises(ArgumentError, match="do not fit"):
            make("{a}").render(**values)
    with pytest.raises(ArgumentError):
        make(3)


def test_errors_of_generated_source_show_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedSyntaxError, match="no Python") as caught:
        tessera.meta.generate(lambda: "def f(:\n  pass")()
    assert caught.value.location.line == 1 and caught.value.location.file.startswith(str(tmp_path))
    monkeypatch.setenv("TESSERA_CACHE", "/dev/null/cache")  # where no folder can be made
    with pytest.raises(UnsupportedSyntaxError, match="no Python") as caught:
        tessera.meta.generate(lambda: "def f(:\n  pass")()
    assert Path(caught.value.location.file).read_text() == "def f(:\n  pass"
    with pytest.raises(ArgumentError, match="gives no source"):
        tessera.meta.generate(lambda: 3)()
    with pytest.raises(ArgumentError, match="defines nothing"):
        tessera.meta.generate(lambda: "1 + 1")()


# Ops of one element type


def test_15_1_polymorphic_functions():
    @tessera.polymorphic
    def polymorphic_add(x, y):
        """Works for any tensor type T"""
        return x + y

    @polymorphic_add.specialize(ts.Tensor[ts.f32])
    def add_f32(x, y):
        return tessera.f32.add(x, y)

    @polymorphic_add.specialize(ts.Tensor[ts.int8])
    def add_i8(x, y):
        return tessera.i8.saturating_add(x, y)

    x = ts.Tensor([100, -100, 3], dtype=ts.int8)
    assert polymorphic_add(x, x).tolist() == [127, -128, 6]
    assert ts.jit(polymorphic_add)(x, x).tolist() == [127, -128, 6]
    assert polymorphic_add(ts.ones(2), ts.ones(2)).tolist() == [2.0, 2.0]
    assert polymorphic_add(ts.ones(2).to(ts.f64), ts.ones(2).to(ts.f64)).dtype == ts.f64


@pytest.mark.parametrize("dtype", [ts.int8, ts.uint8, ts.int16, ts.uint16, ts.int32])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_integers_against_python(dtype, name):
    info = np.iinfo(dtype.numpy)
    edges = [info.min, info.min + 1, -1, 0, 1, 2, 7, info.max - 1, info.max]
    values = [v for v in edges if info.min <= v <= info.max]
    x, y = (np.array(v) for v in zip(*[(a, b) for a in values for b in values], strict=True))
    run = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}[name]
    exact = [run(int(a), int(b)) for a, b in zip(x, y, strict=True)]
    a, b = ts.Tensor(x.astype(dtype.numpy)), ts.Tensor(y.astype(dtype.numpy))
    assert getattr(dtype, f"saturating_{name}")(a, b).tolist() == [min(max(v, info.min), info.max) for v in exact]
    wrapped = [(v - info.min) % (1 << dtype.bits) + info.min for v in exact]
    assert getattr(dtype, f"wrapping_{name}")(a, b).tolist() == wrapped
    result, fits = getattr(dtype, f"checked_{name}")(a, b)
    assert result.tolist() == wrapped and fits.tolist() == [info.min <= v <= info.max for v in exact]


def test_types_of_operands_are_checked():
    with pytest.raises(DTypeError, match="another element type"):
        ts.f32.add(ts.ones(2), ts.Tensor([1, 2]))
    assert ts.f32.add(ts.ones(2), 1).tolist() == [2.0, 2.0] and ts.f16.exp(ts.zeros(1).to(ts.f16)).dtype == ts.f16
    for dtype, name in (
        (ts.f32, "saturating_add"),
        (ts.int8, "exp"),
        (ts.int64, "saturating_add"),
        (ts.f32, "nothing"),
    ):
        with pytest.raises(AttributeError, match=name):
            getattr(dtype, name)
    assert not hasattr(ts.f32, "__array__")
