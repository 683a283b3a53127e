"""Run a few lines of PTX on arrays: thread i has element i of each array in %a, %b, %c and leaves its result in %d."""

import numpy as np

from tessera.interp.target.ptx import PtxModule

LETTERS = "abcefghj"


def text_of(lines, sizes, out, version="8.6", target="sm_90a"):
    """The module: one entry that loads, runs the lines and stores; sizes are bytes of an element."""
    registers = "\n".join(
        f".reg .b{max(8 * n, 16)} %{x};" for x, n in zip([*LETTERS[: len(sizes)], "d"], [*sizes, out], strict=True)
    )
    loads = "\n".join(
        f"ld.param.u64 %base, [p{i}]; mad.wide.u32 %base, %i, {n}, %base; ld.global.b{8 * n} %{x}, [%base];"
        for i, (x, n) in enumerate(zip(LETTERS, sizes, strict=False))
    )
    params = ", ".join(f".param .u64 p{i}" for i in range(len(sizes) + 1))
    return f"""
.version {version}
.target {target}
.address_size 64
.visible .entry k({params})
{{
.reg .b64 %base; .reg .b32 %i, %n, %s<8>; .reg .pred %p, %q, %r; .reg .b64 %l<8>; .reg .b16 %h<8>;
{registers}
mov.u32 %i, %tid.x; mov.u32 %n, %ctaid.x; mad.lo.u32 %i, %n, 256, %i;
{loads}
{lines}
ld.param.u64 %base, [p{len(sizes)}]; mad.wide.u32 %base, %i, {out}, %base; st.global.b{8 * out} [%base], %d;
ret;
}}
"""


def one(lines, *arrays, out):
    """What the lines leave in %d, as an array of dtype `out`."""
    arrays = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    many = max([len(a) for a in arrays], default=32)
    padded = -(-many // 256) * 256 if many > 256 else many
    given = [np.concatenate([a, np.zeros(padded - len(a), a.dtype)]) for a in arrays]
    result = np.zeros(padded, out)
    module = PtxModule(text_of(lines, [a.itemsize for a in arrays], result.itemsize))
    module.launch("k", grid=-(-padded // 256), block=min(padded, 256), args=[*given, result])
    return result[:many]


def bits(dtype, n=512, seed=0):
    """Random bits of a type, with small and extreme values among them."""
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize
    raw = rng.integers(0, 256, (n, size), "u1").view(f"u{size}").reshape(-1)
    small = rng.integers(0, 70, n).astype(raw.dtype)
    special = np.array([0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1], raw.dtype)
    kind = rng.integers(0, 8, n)
    return np.where(kind == 0, rng.choice(special, n), np.where(kind < 3, small, raw)).view(dtype)


def same(got, want):
    """Bit for bit, but that any NaN equals any."""
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype.kind in "fV" and got.dtype.itemsize > 1:
        with np.errstate(invalid="ignore"):
            both = np.isnan(got.astype("f8")) & np.isnan(want.astype("f8"))
        got, want = got[~both], want[~both]
    raw = f"u{got.dtype.itemsize}"
    wrong = np.flatnonzero(got.view(raw) != want.astype(got.dtype).view(raw))
    assert not len(wrong), (got[wrong[:4]], want[wrong[:4]], wrong[:4])
