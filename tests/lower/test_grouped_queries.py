"""Few queries of heads that share keys: rows of one attention program, which reads the keys once."""

import numpy as np
import pytest

import tessera as ts
from tessera.runtime import driver

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(3)

CASES = {  # heads, heads of keys, queries, keys, mask
    "no mask": ((2, 8, 1, 16), 2, 70, None),
    "some queries": ((1, 6, 5, 8), 3, 33, None),
    "one head of keys": ((3, 4, 1, 8), 1, 9, None),
    "a mask for each head": ((2, 6, 1, 8), 2, 40, (2, 6, 1, 40)),
    "a mask for all heads": ((2, 6, 1, 8), 2, 40, (1, 1, 1, 40)),
    "a mask without heads": ((2, 6, 1, 8), 2, 40, (1, 40)),
    "a mask that differs by query": ((1, 4, 3, 8), 2, 20, (1, 4, 3, 20)),
    "one query and one key": ((1, 2, 1, 4), 1, 1, None),
    "no batch": ((4, 1, 8), 2, 37, None),
}


def make(case, dtype="f4"):
    q, heads, keys, mask = CASES[case]
    held = (*q[:-3], heads, keys, q[-1])
    arrays = [RNG.standard_normal(s).astype(dtype) for s in (q, held, held)]
    return arrays if mask is None else [*arrays, RNG.standard_normal(mask).astype(dtype)]


def expected(arrays, **options):
    q, k, v, *mask = (torch.from_numpy(a).double() for a in arrays)
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, *mask, **options).numpy()


def attend(q, k, v, *mask):
    return ts.scaled_dot_product_attention(q, k, v, *mask)


@pytest.mark.parametrize("target", ["llvm", "ptx"])
@pytest.mark.parametrize("case", CASES)
def test_every_level_gives_what_pytorch_gives(case, target):
    arrays = make(case)
    levels = driver.lower(ts.jit(attend).trace(*arrays).function, target)
    for level in ("tile", "target") if target == "llvm" or case == "a mask for each head" else ("tile",):
        (found,) = driver.run_level(levels, level, arrays, target)
        np.testing.assert_allclose(found, expected(arrays), rtol=2e-5, atol=2e-6, err_msg=level)


@pytest.mark.parametrize(("case", "programs"), [("no mask", 4), ("a mask for each head", 4), ("some queries", 3)])
def test_a_group_of_heads_is_one_program(case, programs):
    module = driver.lower(ts.jit(attend).trace(*make(case)).function, "llvm")["tile"]
    (grid,) = [n.attrs["grid"] for n in module.main.body.nodes if n.op.name == "host.launch"]
    assert np.prod(grid) == programs


def test_causal_windows_and_bools_keep_their_meaning():
    q, k, v = make("some queries")
    causal = ts.jit(lambda *x: ts.scaled_dot_product_attention(*x, causal=True), target="llvm")(q, k, v).numpy()
    np.testing.assert_allclose(causal, expected([q, k, v], is_causal=True), rtol=2e-5, atol=2e-6)
    seen = np.arange(33) % 3 == 0
    masked = ts.jit(lambda *x: ts.scaled_dot_product_attention(*x), target="llvm")(q, k, v, seen[None]).numpy()
    near = ts.jit(lambda *x: ts.scaled_dot_product_attention(*x, window=2), target="llvm")(q, k, v).numpy()
    bias = np.where(seen, 0.0, -np.inf)[None]
    np.testing.assert_allclose(masked, expected([q, k, v, bias.astype("f4")]), rtol=2e-5, atol=2e-6)
    distance = np.arange(5)[:, None] - np.arange(33)[None]
    bias = np.where(distance < 2, 0.0, -np.inf).astype("f4")
    np.testing.assert_allclose(near, expected([q, k, v, bias]), rtol=2e-5, atol=2e-6)
