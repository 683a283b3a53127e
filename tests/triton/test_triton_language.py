"""Triton's language in the emulator, against PyTorch and NumPy; the sanitizer finds nothing."""

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import language_kernels as kernels  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import tessera as ts  # noqa: E402

FLOATS = torch.linspace(-3, 3, 128)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
BYTES = (torch.arange(128) * 37 % 128).to(torch.uint8)
BINS = (torch.arange(128) ** 2 % 16).to(torch.int32)


def expect_recurrence(x):
    total, out = 0.0, []
    for value in x.tolist():
        total = total * 0.5 + value
        out.append(total)
    return torch.tensor(out)


def expect_atomics(x):
    out, at = torch.zeros(11, dtype=torch.int32), torch.arange(128)
    for i in range(4):
        out[i] = x[at % 4 == i].sum()
    out[4], out[5], out[6] = x[::2].max(), x[1::2].max(), 0
    for value, i in zip(x.tolist(), at.tolist(), strict=True):
        out[7] |= value
        out[8 + i % 3] ^= value
    return out


# Kernel: its argument, its result's zeros, and what it should store.
CASES = {
    "sort": (FLOATS, FLOATS, lambda x: x.sort(descending=True).values),
    "recurrence": (FLOATS, FLOATS, expect_recurrence),
    "cumulative": (FLOATS, FLOATS, lambda x: x.flip(0).cumsum(0).flip(0)),
    "histogram": (BINS, BINS[:16], lambda x: torch.bincount(x, minlength=16).int()),
    "joined": (FLOATS, torch.cat([FLOATS, FLOATS]), lambda x: torch.cat([x, -x])),
    "interleaved": (FLOATS, torch.cat([FLOATS, FLOATS]), lambda x: torch.stack([x, -x], 1).reshape(-1)),
    "gathered": (FLOATS, FLOATS, lambda x: x[torch.arange(128) * 37 % 128]),
    "maximum": (FLOATS, FLOATS[:2], lambda x: torch.stack([x.max(), x.argmax().float()])),
    "flipped": (FLOATS, FLOATS, lambda x: x.flip(0)),
    "special_functions": (FLOATS, FLOATS, lambda x: x.erf() + x.sigmoid().exp2() + (x + 9) ** (-1 / 6)),
    "assembly": (BYTES, BYTES, lambda x: x ^ (torch.arange(128) % 50).to(torch.uint8)),
    "atomics": (BINS, torch.zeros(11, dtype=torch.int32), expect_atomics),
}


@pytest.mark.parametrize("name", CASES)
def test_language(name):
    x, like, expect = CASES[name]
    out = torch.zeros_like(like)
    with ts.triton.interpreted(debug=True):
        getattr(kernels, name)[(1,)](x.clone(), out)
    torch.testing.assert_close(out, expect(x), rtol=1e-5, atol=1e-5)


PRODUCTS = [
    (torch.float16, torch.float32, "ieee", 1e-3, 64), (torch.bfloat16, torch.float32, "ieee", 1e-2, 64),
    (torch.float32, torch.float32, "ieee", 1e-5, 16), (torch.float32, torch.float32, "tf32", 2e-2, 64),
    (torch.float32, torch.float32, "tf32x3", 1e-4, 32), (torch.int8, torch.int32, "ieee", 0, 64),
    (torch.float8_e5m2, torch.float32, "ieee", 1e-3, 64), (torch.float64, torch.float64, "ieee", 1e-12, 16),
]  # fmt: skip


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype,result,precision,bound,n", PRODUCTS, ids=lambda v: str(v).rpartition(".")[2])
def test_products(dtype, result, precision, bound, n, arch):
    generator = torch.Generator().manual_seed(0)
    draw = (
        torch.randn if dtype.is_floating_point else lambda *n, generator: torch.randint(-9, 9, n, generator=generator)
    )
    a, b = draw(n, n, generator=generator).to(dtype), draw(n, n, generator=generator).to(dtype)
    c = torch.empty(n, n, dtype=result)
    with ts.triton.interpreted(arch=arch, debug=True):
        kernels.dot[(1,)](a, b, c, n, n, precision)
    torch.testing.assert_close(c, (a.to(torch.float64) @ b.to(torch.float64)).to(result), rtol=bound, atol=bound * 10)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tensor_descriptors(where, arch):
    x, y = torch.randn(50, 128).half(), torch.full((50, 128), 7.0).half()
    shape, strides, box = [50, 100], [128, 1], [16, 64]
    source, target = (TensorDescriptor(t, shape, strides, box) if where == "host" else t for t in (x, y))
    with ts.triton.interpreted(arch=arch, debug=True):
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        kernel = kernels.descriptors if where == "host" else kernels.device_descriptors
        kernel[(2,)](source, target, 50, 100, 128, 2.0, BM=16, BK=64)
    assert (y[:, :100] == x[:, :100] * 2).all() and (y[:, 100:] == 7).all()


def test_device_print(capsys):
    with ts.triton.interpreted():
        kernels.printing[(1,)](BINS.clone(), torch.empty_like(BINS), num_warps=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.endswith(f"value: {BINS.sum()}") for line in lines) and "pid (0, 0, 0)" in lines[0]
