"""Video instructions: against what an H100 computed, and the scalar ones against the definitions of the ISA."""

import hashlib
import itertools

import numpy as np
import pytest

from tessera.interp.target.ptx import PtxModule

HEAD = """.version 7.8
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) { .reg .b32 A, B, C, D, t; .reg .b64 q, u;
ld.param.u64 q, [p]; mov.u32 t, %tid.x; mul.wide.u32 u, t, 4; add.u64 q, q, u;
ld.global.u32 A, [q]; ld.global.u32 B, [q+512]; ld.global.u32 C, [q+1024];
"""
EXTREMES = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x80FF7F01, 0x7F80FF00, 0x8000FFFF]
SIGNS = ("s32", "u32")


def sources():
    """384 numbers, a fifth of them extreme; the same as on the GPU."""
    state, numbers = 12345, []
    for i in range(384):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(EXTREMES[(state >> 40) % 8] if i % 5 == 0 else state >> 32)
    return numbers


def run(forms):
    """The sources A, B and C, and a row of results D for each form."""
    stores = "".join(f"{form} st.global.u32 [q+{1536 + 512 * i}], D;\n" for i, form in enumerate(forms))
    memory = np.array(sources() + [0] * (128 * len(forms)), np.uint32)
    PtxModule(f"{HEAD}{stores}ret; }}").launch("k", 1, 128, [memory])
    rows = memory.reshape(-1, 128)
    return rows[:3], rows[3:]


def simd_forms(name):
    """Every combination of types, saturated or not, with selectors, masks and accumulation."""
    width = name[-1]
    mask, one, other = {"2": ("h1", "h32", "h01"), "4": ("b31", "b7520", "b1365")}[width]
    for types in itertools.product(SIGNS, repeat=3):
        op = ".".join((name, *types))
        yield from (f"{op} D, A, B, C;", f"{op}.sat D, A, B, C;", f"{op}.sat D.{mask}, A.{one}, B.{other}, C;")
        yield from (f"{op}.add D, A.{other}, B, C;", f"{op}.add D.{mask}, A, B.{one}, C;")


# The first digits of the hash of what an H100 computed (driver 580.159).
ON_H100 = {
    "vadd2": "7a548c3c2389",
    "vadd4": "c5d857889a58",
    "vsub2": "46daca6105ce",
    "vsub4": "1b0d59816352",
    "vabsdiff2": "591a60ccd9a4",
    "vabsdiff4": "490fd6d31761",
    "vmin2": "ebb13624f305",
    "vmin4": "2009b43d2d1c",
    "vmax2": "5aba1a5db6f1",
    "vmax4": "c07c93e83463",
    "vavrg2": "01ec7704da8d",
    "vavrg4": "470697b50806",
}


@pytest.mark.parametrize("name", ON_H100)
def test_simd_instructions_give_the_bits_of_a_gpu(name):
    rows = run([*simd_forms(name)])[1]
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:12] == ON_H100[name]


def part(word, selector, signed):
    """A byte, half or word of a register as a number."""
    bits = {"b": 8, "h": 16}.get(selector[:1], 32)
    low = word >> bits * int(selector[1:] or 0) & (1 << bits) - 1
    return low - (low >> bits - 1 << bits) if signed else low


def finish(value, target, signed, words, c):
    """Saturation, then the merge or the second operation (PTX ISA, optSaturate, optMerge and optSecondaryOp)."""
    bits = {"b": 8, "h": 16}.get(target[:1], 32)
    if "sat" in words:
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        value = min(max(value, low), high)
    if target:
        field = (1 << bits) - 1 << bits * int(target[1:])
        return value << bits * int(target[1:]) & field | c & ~field
    second = {"add": int.__add__, "min": min, "max": max}
    found = next((second[w] for w in words if w in second), None)
    value = part(value & 0xFFFFFFFF, "", signed)
    return (found(value, part(c, "", signed)) if found else value) & 0xFFFFFFFF


OPERATIONS = {
    "vadd": int.__add__, "vsub": int.__sub__, "vabsdiff": lambda a, b: abs(a - b), "vmin": min, "vmax": max,
}  # fmt: skip
SELECTORS = ["", "b0", "b3", "h0", "h1"]
TARGETS = [
    ("", ()),
    ("", ("sat",)),
    ("", ("sat", "add")),
    ("", ("max",)),
    ("b2", ("sat",)),
    ("h1", ()),
    ("h0", ("sat",)),
]


def spell(name, selector):
    return f"{name}.{selector}" if selector else name


def check(form, compute, target, types, words, selectors):
    (a, b, c), (got,) = run([form])
    for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        left, right = (part(n, s, t == "s32") for n, s, t in zip((x, y), selectors, types[1:], strict=True))
        assert found == finish(compute(left, right), target, types[0] == "s32", words, z), (form, hex(x), hex(y))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("target", "words"), TARGETS)
def test_scalar_instructions_follow_the_isa(name, target, words, rng):
    for types in itertools.product(SIGNS, repeat=3):
        s, t = rng.choice(SELECTORS, 2)
        third = ", C" if target or set(words) - {"sat"} else ""
        op = ".".join((name, *types, *words))
        check(f"{op} {spell('D', target)}, {spell('A', s)}, {spell('B', t)}{third};", OPERATIONS[name], target, types,
              words, (s, t))  # fmt: skip


@pytest.mark.parametrize("name", ["vshl", "vshr"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("words", [(), ("sat",)])
def test_shifts(name, mode, words):
    def shift(a, n):
        n = n & 31 if mode == "wrap" else min(n, 32)
        return a << n if name == "vshl" else a >> n

    for result, source in itertools.product(SIGNS, repeat=2):
        op = ".".join((name, result, source, "u32", *words, mode))
        check(f"{op} D, A, B.b1;", shift, "", (result, source, "u32"), words, ("", "b1"))


@pytest.mark.parametrize(("compare", "function"), [("lt", int.__lt__), ("ne", int.__ne__), ("ge", int.__ge__)])
def test_comparisons(compare, function):
    for a, b in itertools.product(SIGNS, repeat=2):
        types = (a, a, b)
        check(f"vset.{a}.{b}.{compare} D, A.h0, B.h1;", function, "", types, (), ("h0", "h1"))
        check(f"vset.{a}.{b}.{compare}.add D, A.b1, B, C;", function, "", types, ("add",), ("b1", ""))


@pytest.mark.parametrize("scale", ["", ".shr7", ".shr15"])
@pytest.mark.parametrize("form", ["{} D, A, B.b0, C;", "{} D, -A, B, C;", "{} D, A.h1, B, -C;", "{}.po D, A, B, C;"])
def test_multiply_and_add(form, scale):
    """One of the product and the third source may be negated; the sum has more bits than any register."""
    (a, b, c), (got,) = run([form.replace("{}", "vmad.s32.s32.s32").replace(" D", f"{scale} D", 1)])
    for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        left, right = part(x, "h1" if "A.h1" in form else "", True), part(y, "b0" if "B.b0" in form else "", True)
        value = left * right * (-1 if "-A" in form else 1) + part(z, "", True) * (-1 if "-C" in form else 1)
        assert found == (value + (".po" in form) >> int(scale[4:] or 0)) & 0xFFFFFFFF
