"""The pages for those who come from other systems: the idioms run, in the interpreter and compiled."""

import ast
import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera import tile

DOCS = Path(__file__).parents[1] / "docs"
N, BLOCK, BM, BK = 50, 16, 4, 8
X = np.random.default_rng(0).standard_normal(N).astype("f4") + 4  # all positive
A = np.arange(6 * 12, dtype="f4").reshape(6, 12)
W = np.linspace(0.5, 2, BLOCK, dtype="f4")
E = np.exp(W - W.max())
INDEX = np.array([3, 1, 4, 1], np.int64)
PRELUDE = """
import tessera as ts
from tessera import tile

@ts.kernel
def idiom(x, y, a, w_, index_, seed, n, *, BLOCK, BM, BK):
    pid = tile.program_id(0)
    i, m, k = pid * BLOCK, pid, 8
    offs = i + tile.arange(0, BLOCK)
    w, index = tile.load(w_[0:BLOCK]), tile.load(index_[0:4])
    p, q, acc = tile.load(a[0:BM, 0:BK]), tile.load(a[0:BK, 0:BM], other=0.0), tile.zeros((BM, BM))
    v = w
"""


def last_block(array, start, size):
    found = np.zeros(size, array.dtype)
    found[: max(0, len(array) - start)] = array[start : start + size]
    return found


# What `v` is in the last of four programs, or the array that the idiom writes.
OFFSETS = 3 * BLOCK + np.arange(BLOCK)
ROWS = np.pad(A, ((0, 8), (0, 8)))
WANTED = {
    "index of the program": 3,
    "size of the grid": 4,
    "division rounded up": 4,
    "offsets": OFFSETS,
    "load with a mask": last_block(X, 48, BLOCK),
    "load at the edge": last_block(X, 48, BLOCK),
    "load a row": A[3, :BK],
    "load a block of a matrix": ROWS[3:7, 8:16],
    "tensor descriptor": ROWS[3:7, 8:16],
    "gather": X[INDEX],
    "block of zeros": np.zeros((BM, BK)),
    "conversion": W.astype("f2"),
    "product": A[:BM, :BK] @ ROWS[:BK, :BM],
    "transposition": A[:BM, :BK].T,
    "new axis": W[:, None],
    "reshape": W.reshape(4, 4),
    "two blocks interleaved": np.stack([W, -W], 1).ravel(),
    "reduction": W.sum() + W.max(),
    "reduction by a function": W.max(),
    "scan": np.cumsum(W),
    "choice": W,
    "functions": 1 / (1 + np.exp(-W)) + E / E.sum() + np.vectorize(math.erf)(W),
    "random numbers": ts.rand((64,), generator=ts.Generator(7)).numpy()[48:],
    "unrolled loop": W + 3,
}
WRITTEN = {
    "store with a mask": np.tile(W, 4)[:N],
    "store at the edge": np.tile(W, 4)[:N],
    "update": np.where(np.arange(N) < 4, 1, 0),
    "atomic update": np.tile(W, 4)[:N],
}
SILENT = {"assertion while compiling", "assertion at run time", "print", "barrier of a block"}


def read_idioms(page):
    rows = re.findall(r"^\| \d+ \| ([^|]+) \| (.+) \| `([^`]+)` \|$", (DOCS / page).read_text(), re.MULTILINE)
    return {title: (other, ours) for title, other, ours in rows}


TRITON = read_idioms("from-triton.md")


def load_kernel(folder, line):
    path = folder / "idiom.py"
    result = "w" if line.startswith("for") else "v"
    path.write_text(f"{PRELUDE}    {line}\n    return {result}\n")
    spec = importlib.util.spec_from_file_location("idiom", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.idiom


@pytest.mark.parametrize("device", ["interp", "cpu"])
@pytest.mark.parametrize("title", TRITON)
def test_idioms_of_triton(title, device, tmp_path, capfd):
    kernel, y = load_kernel(tmp_path, TRITON[title][1]), np.zeros(N, "f4")
    with ts.device(device):
        found = kernel[4,](X, y, A, W, INDEX, 7, N, BLOCK=BLOCK, BM=BM, BK=BK)
    if title in WANTED:
        np.testing.assert_allclose(np.asarray(found[3]), WANTED[title], rtol=2e-3 if title == "conversion" else 1e-5)
    elif title in WRITTEN:
        np.testing.assert_allclose(y, WRITTEN[title], rtol=1e-6)
    else:
        assert title in SILENT
    if title == "print":
        printed = capfd.readouterr().out
        assert all(f"pid {number}" in printed for number in range(4))


def test_every_idiom_has_an_answer():
    assert len(TRITON) >= 25 and set(TRITON) == {*WANTED, *WRITTEN, *SILENT}
    for other, _ in TRITON.values():
        assert [ast.parse(code) for code in re.findall(r"`([^`]+)`", other)]


def test_the_matrix_product_of_triton(tmp_path, rng, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "tuned"))
    (text,) = re.findall(r"```python\n(.*?)```", (DOCS / "from-triton.md").read_text(), re.DOTALL)
    path = tmp_path / "product.py"
    path.write_text(f"import tessera as ts\nfrom tessera import tile\n{text}")
    a, b = rng.standard_normal((70, 40)).astype("f2"), rng.standard_normal((40, 90)).astype("f2")
    scope = {"a": a, "b": b, "c": np.zeros((70, 90), "f2"), "__name__": "product"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    np.testing.assert_allclose(scope["c"].astype("f8"), a.astype("f8") @ b.astype("f8"), rtol=1e-3, atol=1e-2)
    (theirs,) = re.findall(r"```text\n(.*?)```", (DOCS / "from-triton.md").read_text(), re.DOTALL)
    ast.parse(theirs)
    assert tile.cdiv(70, 64) == 2


# CUDA: the last of two groups of 64 tiles, and what it writes.
LANES = np.arange(64)
CUDA = read_idioms("from-cuda.md")
GROUP_PRELUDE = """
import tessera as ts
from tessera import tile

@ts.kernel
def idiom(x, y, n, out):
    t, i = tile.local_id(), tile.linear_id()
    s = tile.alloc_shared((64,), ts.f32)
    v = 0
"""
EVEN = sum(1 << lane for lane in range(0, 32, 2))
GROUP_WANTED = {
    "thread in the block": LANES,
    "block": 1,
    "size of the block": 64,
    "size of the grid": 2,
    "index of the thread": LANES + 64,
    "lane and warp": LANES // 32 * 100 + LANES % 32,
    "shuffle": LANES // 32 * 32 + 5,
    "shuffle with xor": LANES ^ 1,
    "vote": 1,
    "ballot": EVEN,
    "sum of a warp": np.repeat([LANES[:32].sum(), LANES[32:].sum()], 32),
    "sum of a block": LANES.sum(),
    "fused multiply-add": 2 * (LANES + 64) + 1,
}
GROUP_WRITTEN = {"atomic": ("y", [32] * 4), "compare and swap": ("n", [7]), "guard": ("y", [0, 1, 2, 3])}
GROUP_SILENT = {
    "shared memory", "registers", "barrier", "barrier of a warp", "grid-wide barrier", "asynchronous copy", "print",
    "assertion",
}  # fmt: skip


@pytest.mark.parametrize("device", ["interp", "cpu"])
@pytest.mark.parametrize("title", CUDA)
def test_idioms_of_cuda(title, device, tmp_path):
    path = tmp_path / "idiom.py"
    path.write_text(f"{GROUP_PRELUDE}    {CUDA[title][1]}\n    out[i] = tile.cast(v, ts.f32)\n")
    spec = importlib.util.spec_from_file_location("idiom", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arrays = {"x": np.arange(128, dtype="f4"), "y": np.zeros(128, "f4"), "n": np.zeros(1, "i4")}
    out = np.zeros(128, "f4")
    with ts.device(device):
        module.idiom[(2,), 64](*arrays.values(), out)
    if title in GROUP_WANTED:
        np.testing.assert_array_equal(out[64:], np.broadcast_to(GROUP_WANTED[title], 64).astype("f4"))
    elif title in GROUP_WRITTEN:
        name, want = GROUP_WRITTEN[title]
        np.testing.assert_array_equal(arrays[name][: len(want)], want)
    else:
        assert title in GROUP_SILENT


def test_every_idiom_of_cuda_has_an_answer():
    assert set(CUDA) == {*GROUP_WANTED, *GROUP_WRITTEN, *GROUP_SILENT}


@pytest.mark.parametrize("device", ["interp", "cpu"])
def test_the_sums_of_the_cuda_page(device, tmp_path):
    text = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / "from-cuda.md").read_text(), re.DOTALL))
    path = tmp_path / "sums.py"
    path.write_text(f"import tessera as ts\nfrom tessera import tile\n{text}")
    x = np.arange(1000, dtype="f4")
    total = np.zeros(1, "f4")
    with ts.device(device):
        exec(compile(path.read_text(), str(path), "exec"), {"x": x, "total": total, "__name__": "sums"})
    assert total[0] == 2 * x.sum()
    assert ts.debug.check  # the page names the checked runs
    racy = path.read_text().replace("    tile.barrier()  # __syncthreads();\n", "")
    path.with_name("racy.py").write_text(racy)
    with ts.debug.checked(), pytest.raises(ts.errors.RaceError, match="the shared memory `partial`"):
        exec(compile(racy, str(path.with_name("racy.py")), "exec"), {"x": x, "total": total, "__name__": "racy"})
