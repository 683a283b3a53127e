"""Matrix instructions of a warp against NumPy, with the fragments of the ISA's figures."""

import hashlib
import itertools

import ml_dtypes
import numpy as np
import pytest

from tessera.core.errors import ExecutionError, UnsupportedOpError
from tessera.interp.target.ptx import PtxModule

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
DTYPES = {"f16": "f2", "bf16": ml_dtypes.bfloat16, "tf32": "f4", "f64": "f8", "s8": "i1", "u8": "u1"}
DTYPES |= {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f32": "f4", "s32": "i4"}
LANE = np.arange(32)
GROUP, PLACE = LANE // 4, LANE % 4


def names(prefix, n):
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(n)) + "}"


def registers(array, kind, prefix):
    """Loads of a lane's registers, which lie side by side in an array [32, n]."""
    size = 8 if kind == "b64" else 4
    return "\n".join(f"ld.global.{kind} %{prefix}{i}, [%p{prefix}+{size * i}];" for i in range(array.shape[1]))


def mma(op, a, b, c, kind="b32", kinds=None):
    """One warp's instruction on fragments [32, registers], packed; the result's fragment like C's."""
    d, size = np.zeros_like(c), {"b32": 4, "b64": 8}
    kinds = kinds or {x: kind for x in "abcd"}
    lines = ["mov.u32 %i, %tid.x;"]
    for x, v in zip("abcd", (a, b, c, d), strict=True):
        lines.append(f"ld.param.u64 %p{x}, [{x}]; mad.wide.u32 %p{x}, %i, {v.shape[1] * size[kinds[x]]}, %p{x};")
        lines.append(registers(v, kinds[x], x) if x != "d" else "")
    text = ", ".join([names("d", c.shape[1]), names("a", a.shape[1]), names("b", b.shape[1]), names("c", c.shape[1])])
    lines.append(f"{op} {text};")
    lines += [f"st.global.{kinds['d']} [%pd+{size[kinds['d']] * i}], %d{i};" for i in range(c.shape[1])]
    declared = " ".join(f".reg .{kinds[x]} %{x}<8>;" for x in "abcd") + ".reg .b64 %pa, %pb, %pc, %pd; .reg .b32 %i;"
    params = ", ".join(f".param .u64 {x}" for x in "abcd")
    module = PtxModule(f"{HEAD}.visible .entry k({params}) {{ {declared}\n" + "\n".join(lines) + "\nret; }")
    module.launch("k", block=32, args=[a, b, c, d], debug=True)
    return d


def packed(elements, word):
    """[32, elements] of a dtype as registers."""
    return np.ascontiguousarray(elements).view(word)


def random(shape, t, seed):
    rng = np.random.default_rng(seed)
    if t in ("s8", "u8"):
        return rng.integers(np.iinfo(DTYPES[t]).min, np.iinfo(DTYPES[t]).max + 1, shape).astype(DTYPES[t])
    return (rng.integers(-8, 9, shape) / 4).astype(DTYPES[t])


# Element i of a lane's fragment of A [m, k]: row and column, by (m, k, bits), from the ISA's figures.
A = {
    (16, 8, 16): lambda i: (GROUP + 8 * (i >= 2), PLACE * 2 + (i & 1)),
    (16, 16, 16): lambda i: (GROUP + 8 * (i in (2, 3, 6, 7)), PLACE * 2 + (i & 1) + 8 * (i >= 4)),
    (16, 4, 32): lambda i: (GROUP + 8 * (i == 1), PLACE),
    (16, 8, 32): lambda i: (GROUP + 8 * (i & 1), PLACE + 4 * (i >= 2)),
    (16, 16, 8): lambda i: (GROUP + 8 * (i >= 4), PLACE * 4 + (i & 3)),
    (16, 32, 8): lambda i: (GROUP + 8 * (i in range(4, 8) or i >= 12), PLACE * 4 + (i & 3) + 16 * (i >= 8)),
    (8, 16, 8): lambda i: (GROUP, PLACE * 4 + i),
    (8, 4, 64): lambda i: (GROUP, PLACE),
    (16, 8, 64): lambda i: (GROUP + 8 * (i & 1), PLACE + 4 * (i >> 1)),
}
B = {
    (8, 16): lambda i: (PLACE * 2 + i, GROUP),
    (16, 16): lambda i: (PLACE * 2 + (i & 1) + 8 * (i >= 2), GROUP),
    (4, 32): lambda i: (PLACE, GROUP),
    (8, 32): lambda i: (PLACE + 4 * i, GROUP),
    (16, 8): lambda i: (PLACE * 4 + (i & 3), GROUP),
    (32, 8): lambda i: (PLACE * 4 + (i & 3) + 16 * (i >= 4), GROUP),
    (4, 64): lambda i: (PLACE, GROUP),
    (8, 64): lambda i: (PLACE + 4 * i, GROUP),
}


def fragment(matrix, place):
    many = matrix.size // 32
    return np.stack([matrix[place(i)] for i in range(many)], axis=1)


def accumulators(m):
    return lambda i: (GROUP + 8 * (i >= 2) * (m == 16), PLACE * 2 + (i & 1))


CASES = [(16, 8, "f16", "f32"), (16, 16, "f16", "f32"), (16, 16, "bf16", "f32"), (16, 8, "bf16", "f32")]
CASES += [(16, 16, "f16", "f16"), (16, 4, "tf32", "f32"), (16, 8, "tf32", "f32"), (8, 4, "f64", "f64")]
CASES += [(16, 8, "f64", "f64"), (16, 16, "s8", "s32"), (16, 32, "s8", "s32"), (16, 32, "u8", "s32")]
CASES += [(8, 16, "s8", "s32"), (16, 32, "e4m3", "f32"), (16, 32, "e5m2", "f32")]


@pytest.mark.parametrize("m,k,t,acc", CASES, ids=lambda v: str(v))
def test_mma(m, k, t, acc):
    a, b, c = random((m, k), t, 0), random((k, 8), t, 1), random((m, 8), "s8", 2).astype(DTYPES[acc])
    bits = 8 * a.itemsize
    word = "u8" if bits == 64 else "u4"
    got = mma(
        f"mma.sync.aligned.m{m}n8k{k}.row.col.{acc}.{t}.{t}.{acc}",
        packed(fragment(a, A[m, k, bits]), word),
        packed(fragment(b, B[k, bits]), word),
        packed(fragment(c, accumulators(m)), word),
        "b64" if bits == 64 else "b32",
    ).view(DTYPES[acc])
    want = (a.astype("f8") @ b.astype("f8") + c.astype("f8")).astype(DTYPES[acc])
    assert (got == fragment(want, accumulators(m))).all()


def test_saturating_sum():
    a, b = np.full((16, 32), 127, "i1"), np.full((32, 8), 127, "i1")
    c = np.full((16, 8), 2**31 - 5, "i4")
    args = packed(fragment(a, A[16, 32, 8]), "u4"), packed(fragment(b, B[32, 8]), "u4"), c.reshape(32, 4).view("u4")
    op = "mma.sync.aligned.m16n8k32.row.col{}.s32.s8.s8.s32"
    assert (mma(op.format(".satfinite"), *args).view("i4") == 2**31 - 1).all()
    assert (mma(op.format(""), *args).view("i4") == -(2**31) - 5 + 127 * 127 * 32).all()


MATRIX = """.visible .entry k(.param .u64 x, .param .u64 y) {{
.reg .b64 %x, %y; .reg .b32 %i, %s, %a, %r<4>; .shared .align 128 .b8 buffer[512];
ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %i, %tid.x; mov.u32 %s, buffer;
mad.wide.u32 %x, %i, 16, %x; mad.wide.u32 %y, %i, 16, %y; mad.lo.u32 %a, %i, 16, %s;
{lines}
ret; }}"""
LOAD = """ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%x]; st.shared.v4.b32 [%a], {{%r0, %r1, %r2, %r3}}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4{t}.shared.b16 {{%r0, %r1, %r2, %r3}}, [%a];
st.global.v4.b32 [%y], {{%r0, %r1, %r2, %r3}};"""
STORE = """ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%x];
stmatrix.sync.aligned.m8n8.x4{t}.shared.b16 [%a], {{%r0, %r1, %r2, %r3}}; bar.sync 0;
ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%a]; st.global.v4.b32 [%y], {{%r0, %r1, %r2, %r3}};"""


def run(lines, x):
    y = np.zeros_like(x)
    PtxModule(HEAD + MATRIX.format(lines=lines)).launch("k", block=32, args=[x, y], debug=True)
    return y


@pytest.mark.parametrize("t", ["", ".trans"])
def test_load_and_store_of_matrices(t):
    """Register q of lane l: elements (l / 4, 2 (l % 4) + {0, 1}) of matrix q, or of its transpose."""
    x = np.arange(256, dtype="u2").reshape(4, 8, 8)
    held = np.swapaxes(x, 1, 2) if t else x
    want = np.stack([held[:, LANE // 4, 2 * (LANE % 4) + j] for j in (0, 1)], -1).transpose(1, 0, 2).reshape(32, 8)
    got = run(LOAD.format(t=t), x)
    assert (got.reshape(32, 8) == want).all()
    assert (run(STORE.format(t=t), got) == x).all()


@pytest.mark.parametrize("many", [1, 2])
def test_fewer_matrices_ignore_other_lanes_addresses(many):
    regs = ", ".join(f"%r{i}" for i in range(many))
    lines = f"""ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%x]; st.shared.v4.b32 [%a], {{%r0, %r1, %r2, %r3}};
    bar.sync 0; setp.ge.u32 %p, %i, {8 * many}; @%p mov.u32 %a, 0x7ffffff0;
    ldmatrix.sync.aligned.m8n8.x{many}.shared.b16 {{{regs}}}, [%a];
    st.global.v4.b32 [%y], {{%r0, %r1, %r2, %r3}};"""
    x = np.arange(256, dtype="u2")
    got = run(".reg .pred %p;" + lines, x).reshape(32, 4, 2)[:, :many]
    want = x.reshape(4, 32, 2).transpose(1, 0, 2)[:, :many]
    assert (got == want).all()


def test_transpose_across_a_warp():
    lines = "ld.global.b32 %r0, [%x]; movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0; st.global.b32 [%y], %r1;"
    x = np.zeros((32, 8), "u2")
    x[:, :2] = np.arange(64).reshape(32, 2)
    assert (run(lines, x)[:, :2].reshape(8, 8) == np.arange(64).reshape(8, 8).T).all()


def test_a_part_of_a_warp_is_an_error():
    regs = "{%r0,%r1,%r2,%r3}"
    lines = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {regs}, {regs}, {{%r0,%r1}}, {regs};"
    with pytest.raises(ExecutionError, match="whole groups of 32"):
        PtxModule(HEAD + MATRIX.format(lines=lines)).launch("k", block=20, args=[np.zeros(1), np.zeros(1)])


@pytest.mark.parametrize("out", ["f16", "f32"])
@pytest.mark.parametrize("left", ["row", "col"])
@pytest.mark.parametrize("right", ["row", "col"])
def test_four_products_of_eight_lanes(left, right, out):
    """m8n8k4: element i of each lane, by the formulas that the ISA states."""
    rng, kind = np.random.default_rng(0), DTYPES[out]
    a, b, c = (rng.integers(-4, 5, (4, *s)).astype("f2") for s in ((8, 4), (4, 8), (8, 8)))
    high, team = 4 * (LANE >= 16), LANE % 16 // 4
    lane, i = np.meshgrid(LANE, np.arange(8), indexing="ij")
    four, up = i[:, :4] % 4, high[:, None]
    spots = {"row": (PLACE[:, None] + up, four), "col": (four + up, PLACE[:, None])}
    fa = a[(team[:, None], *spots[left])]
    fb = b[(team[:, None], *spots["col" if right == "row" else "row"][::-1])]
    row, column = PLACE[:, None] + up + 0 * i, i
    if out == "f32":
        row, column = (lane & 1) + (i & 2) + up, (i & 4) + (lane & 2) + (i & 1)
    fc = c.astype(kind)[team[:, None], row, column]
    held = [np.ascontiguousarray(f).view("u4") for f in (fa, fb, fc)]
    got = mma(f"mma.sync.aligned.m8n8k4.{left}.{right}.{out}.f16.f16.{out}", *held).view(kind)
    want = (a.astype("f4") @ b.astype("f4") + c)[team[:, None], row, column]
    assert (got == want).all()


NARROW_SHAPES = {  # registers of A, B and C
    "m8n8k32": (1, 1, 2), "m16n8k32": (2, 1, 4), "m16n8k64": (4, 2, 4),
    "m8n8k128": (1, 1, 2), "m16n8k128": (2, 1, 4), "m16n8k256": (4, 2, 4),
}  # fmt: skip
# The first digits of the hash of what an H200 computed (driver 580.159): each shape with all its types.
ON_H200 = {
    "m8n8k32": "ce9515714240",
    "m16n8k32": "2ee672d967a0",
    "m16n8k64": "d82b7331476e",
    "m8n8k128": "bec1a5d4c754",
    "m16n8k128": "dbab8bbf63a8",
    "m16n8k256": "3c85d84c0103",
}


def narrow_forms(shape):
    a, b, c = (
        "{" + ",".join(f"{name}{i}" for i in range(n)) + "}"
        for name, n in zip("ABC", NARROW_SHAPES[shape], strict=True)
    )
    if int(shape.partition("k")[2]) < 128:
        signs = [f"{x}4.{y}4" for x in "su" for y in "su"]
        words = [f"{satfinite}.s32.{s}.s32" for s in signs for satfinite in ("", ".satfinite")]
    else:
        words = [f".s32.b1.b1.s32.{product}.popc" for product in ("xor", "and")]
    return [f"mma.sync.aligned.{shape}.row.col{w} {c.replace('C', 'D')},{a},{b},{c};" for w in words]


def narrow_registers():
    """Ten registers of a warp, some accumulators near the ends of their range; the same as on the GPU."""
    state, numbers = 999, []
    for i in range(320):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        extreme = (0x7FFFFFFF, 0x80000000, 0x7FFFFFF0)[i % 9 // 3]
        numbers.append(extreme if i >= 192 and i % 3 == 0 else state >> 32)
    return numbers


@pytest.mark.parametrize("shape", ON_H200)
def test_products_of_4_bits_and_of_1_bit_give_the_bits_of_a_gpu(shape):
    names = ["A0", "A1", "A2", "A3", "B0", "B1", "C0", "C1", "C2", "C3"]
    loads = "".join(f"ld.global.u32 {r}, [q+{128 * i}];\n" for i, r in enumerate(names))
    forms, count = narrow_forms(shape), NARROW_SHAPES[shape][2]
    stores = [
        f"{form} " + "".join(f"st.global.u32 [q+{1280 + 128 * (count * k + i)}], D{i};" for i in range(count))
        for k, form in enumerate(forms)
    ]
    text = f""".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p)
    {{ .reg .b32 A<4>, B<2>, C<4>, D<4>, t; .reg .b64 q, u; ld.param.u64 q, [p]; mov.u32 t, %tid.x;
    mul.wide.u32 u, t, 4; add.u64 q, q, u; {loads} {" ".join(stores)} ret; }}"""
    memory = np.array(narrow_registers() + [0] * (32 * count * len(forms)), np.uint32)
    PtxModule(text).launch("k", 1, 32, [memory])
    assert hashlib.sha256(memory[320:].tobytes()).hexdigest()[:12] == ON_H200[shape]


@pytest.mark.parametrize("words", [*itertools.permutations(("m8n8", "x4", "trans", "shared"))])
def test_matrix_copies_take_their_modifiers_in_any_order(words):
    """As ptxas does; a transposed copy there and back is the identity."""
    order = ".".join(words)
    text = f""".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p)
    {{ .shared .align 16 .b8 s[512]; .reg .b64 q, u; .reg .b32 a, t, A<4>; ld.param.u64 q, [p]; mov.u32 t, %tid.x;
    mul.wide.u32 u, t, 16; add.u64 q, q, u; ld.global.v4.u32 {{A0, A1, A2, A3}}, [q]; mad.lo.u32 a, t, 16, 0;
    stmatrix.sync.aligned.{order}.b16 [a], {{A0, A1, A2, A3}};
    ldmatrix.sync.aligned.{order}.b16 {{A3, A2, A1, A0}}, [a]; st.global.v4.u32 [q], {{A0, A1, A2, A3}}; ret; }}"""
    memory = np.arange(128, dtype=np.uint32) * 0x10003
    expected = memory.reshape(32, 4)[:, ::-1].copy()
    PtxModule(text).launch("k", 1, 32, [memory])
    np.testing.assert_array_equal(memory.reshape(32, 4), expected)


# mma.sp: type, depth, the elements of a chunk, and whether a lane's metadata has two rows (or one).
SPARSE = [("f16", 16, 4, True), ("bf16", 32, 4, True), ("tf32", 8, 2, True), ("tf32", 16, 2, True)]
SPARSE += [("s8", 32, 4, False), ("u8", 64, 4, False), ("e4m3", 64, 4, False), ("e5m2", 64, 4, False)]


def sparse_metadata(codes, selector, two_rows):
    """The metadata of 32 lanes for codes [16, chunks]; other lanes' is all ones. As an H200 reads it."""
    words, size = np.full(32, 0xFFFFFFFF, np.uint64), codes.shape[1]
    for row, chunk in np.ndindex(codes.shape):
        four = row % 8 * 4
        lane = four + selector * (size // 4) + chunk // 4 if two_rows else four + row // 8 + 2 * (selector + chunk // 8)
        bit = 16 * (row // 8) + chunk % 4 * 4 if two_rows else chunk % 8 * 4
        words[lane] ^= np.uint64((15 ^ int(codes[row, chunk])) << bit)
    return words.astype(np.uint32).reshape(32, 1)


def sparse_mma(op, a, b, c, metadata, selector):
    """One warp's mma.sp on packed fragments [32, registers]."""
    memory = np.concatenate([a, b, c, metadata], axis=1).astype(np.uint32)
    sizes, total = (a.shape[1], b.shape[1], c.shape[1]), memory.shape[1]
    starts = np.cumsum((0, *sizes))
    groups = ["{" + ",".join(f"%r{s + i}" for i in range(n)) + "}" for s, n in zip(starts, sizes, strict=False)]
    loads = " ".join(f"ld.global.b32 %r{i}, [%q+{4 * i}];" for i in range(total))
    stores = " ".join(f"st.global.b32 [%q+{4 * i}], %r{starts[2] + i};" for i in range(c.shape[1]))
    text = f"""{HEAD}.visible .entry k(.param .u64 p) {{ .reg .b32 %r<20>, %t; .reg .b64 %q;
    ld.param.u64 %q, [p]; mov.u32 %t, %tid.x; mad.wide.u32 %q, %t, {4 * total}, %q; {loads}
    {op} {groups[2]}, {groups[0]}, {groups[1]}, {groups[2]}, %r{total - 1}, {selector}; {stores} ret; }}"""
    PtxModule(text).launch("k", 1, 32, [memory], debug=True)
    return np.ascontiguousarray(memory[:, : c.shape[1]])


@pytest.mark.parametrize("variant", ["sp", "sp::ordered_metadata"])
@pytest.mark.parametrize(("t", "depth", "span", "two_rows"), SPARSE)
def test_products_with_a_sparse_matrix(variant, t, depth, span, two_rows):
    """A is made of the elements it holds and their places, one by one, then multiplied by NumPy."""
    chunks, bits, acc = depth // span, np.dtype(DTYPES[t]).itemsize * 8, "s32" if t in ("s8", "u8") else "f32"
    for selector in range(16 // chunks):
        rng = np.random.default_rng(selector)
        held, b = random((16, depth // 2), t, 0), random((depth, 8), t, 1)
        c = random((16, 8), "s8", 2).astype(DTYPES[acc])
        codes = rng.choice([4, 14] if span == 2 else [4, 8, 9, 12, 13, 14], (16, chunks))
        a = np.zeros((16, depth))
        for row, chunk in np.ndindex(codes.shape):
            places = [codes[row, chunk] // 8] if span == 2 else [codes[row, chunk] & 3, codes[row, chunk] >> 2]
            for j, place in enumerate(places):
                a[row, span * chunk + place] = held[row, span // 2 * chunk + j]
        pair = 32 // bits  # elements of a register
        at_b = lambda i: (PLACE * pair + i % pair + 4 * pair * (i // pair), GROUP)  # noqa: B023, E731
        parts = fragment(held, A[16, depth // 2, bits]), fragment(b, at_b), fragment(c, accumulators(16))
        op = f"mma.{variant}.sync.aligned.m16n8k{depth}.row.col.{acc}.{t}.{t}.{acc}"
        metadata = sparse_metadata(codes, selector, two_rows)
        got = sparse_mma(op, *(packed(x, "u4") for x in parts), metadata, selector).view(DTYPES[acc])
        want = (a @ b.astype("f8") + c).astype(DTYPES[acc])
        np.testing.assert_array_equal(got, fragment(want, accumulators(16)))


@pytest.mark.parametrize(("variant", "code"), [("sp", 0b1010), ("sp::ordered_metadata", 0b0001)])
def test_metadata_that_means_nothing_is_an_error(variant, code):
    codes = np.full((16, 4), 4)
    codes[9, 2] = code
    zeros = [np.zeros((32, n), "u4") for n in (2, 2, 4)]
    with pytest.raises(ExecutionError, match=rf"metadata 0b{code:04b} of chunk 2 in row 9: expected two"):
        op = f"mma.{variant}.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        sparse_mma(op, *zeros, sparse_metadata(codes, 1, True), 1)


@pytest.mark.parametrize("selector", [2, -1])
def test_selectors_have_a_range(selector):
    zeros = [np.zeros((32, n), "u4") for n in (4, 4, 4, 1)]
    with pytest.raises(UnsupportedOpError):
        sparse_mma("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", *zeros, selector)


@pytest.mark.parametrize(
    "words", ["sync.aligned.m16n8k16.row.col", "m16n8k16.row.aligned.col.sync", "row.sync.col.m16n8k16.aligned"]
)
def test_products_take_their_modifiers_in_any_order(words):
    """As ptxas does; the order of the types has a meaning and is kept."""
    a, b, c = random((16, 16), "s8", 0), random((16, 8), "s8", 1), random((16, 8), "s8", 2).astype("i4")
    parts = fragment(a, A[16, 16, 8]), fragment(b, B[16, 8]), fragment(c, accumulators(16))
    got = mma(f"mma.s32.{words}.s8.s8.satfinite.s32", *(packed(x, "u4") for x in parts)).view("i4")
    want = a.astype("i4") @ b.astype("i4") + c
    np.testing.assert_array_equal(got, fragment(want, accumulators(16)))
