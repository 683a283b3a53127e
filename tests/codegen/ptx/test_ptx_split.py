"""Products of f32 by the tensor cores where one side was bf16; attention through them; small blocks of left rows."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked
from tilekernels import Kernel

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.ops import truncate_bf16
from tessera.codegen.ptx.passes.instruction_selection import split_products
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import bf16, f16, f32, fp8_e4m3, fp8_e5m2
from tessera.interp.bound import compare_with_bound
from tessera.ops.tensor import attention, basic, contractions, shape
from tessera.runtime.program import prepare


def product(a, b, turned=False):
    """out = a b with both sides cast to f32 before."""
    out = np.zeros((a.shape[0], b.shape[0] if turned else b.shape[1]), np.float32)
    k = Kernel(a, b, out)
    left, right = (k.load(p, shape=x.shape) for p, x in zip(k.params, (a, b), strict=False))
    left, right = (k(basic.cast, v, dtype=f32) if x.dtype != np.float32 else v for v, x in ((left, a), (right, b)))
    right = k(shape.permute, right, axes=(1, 0)) if turned else right
    k.store(k.params[2], k(contractions.dot, left, right, dtype=f32))
    return k.module(), out


def kinds(module):
    found = split_products(module.functions[1])
    return [n.args[0].type.dtype for n in found.body.walk() if n.op is contractions.dot]


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_with_what_was_bf16_is_as_good_as_one_of_f32(turned):
    random = np.random.default_rng(0)
    a = random.standard_normal((32, 48)).astype(np.float32) * 10.0 ** random.integers(-20, 15, (32, 1))
    b = random.standard_normal((16, 48) if turned else (48, 16)).astype(bf16.numpy)
    module, out = product(a.astype(np.float32), b, turned)
    assert kinds(module) == [bf16] * 3
    artifact = emit_checked(module)
    BACKEND.interpreter(artifact)([a.astype(np.float32), b, out])
    x, y = a.astype(np.float32).astype(np.float64), b.astype(np.float64)
    y = y.T if turned else y
    assert "mma.sync" in artifact.text(TEXT_FILE)
    assert (np.abs(out - x @ y) <= 48 * 2.0**-24 * (np.abs(x) @ np.abs(y))).all()


def test_infinities_and_nan_come_through():
    a, b = np.ones((16, 16), np.float32), np.ones((16, 16), bf16.numpy)
    a[0, 0], a[1, 1], a[2, 2] = np.inf, -np.inf, np.nan
    module, out = product(a, b)
    BACKEND.interpreter(emit_checked(module))([a, b, out])
    assert (out[0] == np.inf).all() and (out[1] == -np.inf).all() and np.isnan(out[2]).all() and (out[3:] == 16).all()


def test_which_products_are_split():
    wide, narrow, half = (np.zeros((16, 16), d) for d in (np.float32, bf16.numpy, f16.numpy))
    assert kinds(product(narrow, narrow)[0]) == [bf16]
    assert kinds(product(half, half)[0]) == [f16]
    assert kinds(product(wide, half)[0]) == kinds(product(wide, wide)[0]) == [f32]


def test_numbers_of_8_bits_are_multiplied_as_16():
    a, b = np.full((16, 16), 1.5, fp8_e4m3.numpy), np.full((16, 16), -0.25, fp8_e5m2.numpy)
    module, out = product(a, b)
    assert kinds(module) == [bf16] and kinds(product(a, b.astype(f16.numpy))[0]) == [f16]
    BACKEND.interpreter(emit_checked(module))([a, b, out])
    assert (out == -6.0).all()


def test_the_upper_half():
    x = np.array([1.0, -3.14159274, np.inf, 1e-40], np.float32)
    assert (truncate_bf16.ref(x).view(np.uint16) == x.view(np.uint32) >> 16).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_with_heads_after_positions_is_one_launch(arch):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 40, 3, 32)).astype(bf16.numpy) for _ in range(3))
    mask = np.where(random.random((2, 1, 1, 40)) < 0.2, -1e4, 0).astype(bf16.numpy)

    def program(q, k, v, mask):
        found = attention.scaled_dot_product_attention(*(x.permute(0, 2, 1, 3) for x in (q, k, v)), mask)
        return found.permute(0, 2, 1, 3)

    ready = prepare(ts.jit(program), (q, k, v, mask), "ptx")
    launches = [n for n in ready.levels["tile"].main.body.nodes if n.op.name == "host.launch"]
    assert len(launches) == 1
    (found,) = BACKEND.interpreter(emit_checked(ready.levels["tile"], arch))([q, k, v, mask])
    assert compare_with_bound(found, ready.bounds()[0]).ok


@pytest.mark.parametrize(("depth", "weights", "rows"), [(64, None, 128), (128, None, 128), (64, "f32", 64)])
def test_attention_of_a_graph_is_streamed(depth, weights, rows):
    q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 130, depth)).astype(bf16.numpy) for i in range(3))
    attend = ts.jit(lambda q, k, v: attention.scaled_dot_product_attention(q, k, v, causal=True, weights=weights))
    ready = prepare(attend, (q, k, v), "ptx")
    artifact = emit_checked(ready.levels["tile"], "sm_90a")
    (entry,) = artifact.manifest["plan"]["entries"].values()
    assert "wgmma" in artifact.text(TEXT_FILE) and entry["threads"] == 2 * rows + 128
    assert compare_with_bound(BACKEND.interpreter(artifact)([q, k, v])[0], ready.bounds()[0]).ok


@pytest.mark.in_turn("turned")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 20}, {"softcap": 2.0}])
def test_attention_of_grouped_queries_is_one_launch(options, target, turned):
    q, k, v = (np.random.default_rng(h).standard_normal((2, h, 40, 32)).astype(bf16.numpy) for h in (6, 2, 2))
    turn = lambda x: x.permute(0, 2, 1, 3) if turned else x  # noqa: E731
    given = [np.ascontiguousarray(x.swapaxes(1, 2)) if turned else x for x in (q, k, v)]
    program = ts.jit(lambda *x: turn(attention.scaled_dot_product_attention(*map(turn, x), **options)), target=target)
    ready = prepare(program, tuple(given), target)
    launches = [n for n in ready.levels["tile"].main.body.nodes if n.op.name == "host.launch"]
    assert len(launches) == 1 and ready.levels["tile"].functions[1].name == "attend"
    assert compare_with_bound(program(*given).numpy(), ready.bounds()[0]).ok
