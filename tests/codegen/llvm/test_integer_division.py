"""Floor quotients and remainders by literals: shifts, masks and one division, for every integer type and sign."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm.text.builder import LlvmBuilder
from tessera.runtime.program import prepare

TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
LITERALS = (1, 2, 3, 7, 8, 64, 100, 127)


def list_numbers(dtype):
    """The ends of a type, and the small numbers around its multiples."""
    limits = np.iinfo(dtype)
    ends = [limits.min, limits.min + 1, limits.max - 1, limits.max]
    return np.array(
        sorted({*ends, *range(max(limits.min, -18), 19), *(n for n in (100, 101) if n < limits.max)}), dtype
    )


def divide_by_all(literals):
    return lambda x: tuple(r for n in literals for r in (x // n, x % n))


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_by_literals(dtype):
    x = list_numbers(dtype)
    literals = (*LITERALS, -1, -2, -3) if dtype[0] == "i" else (*LITERALS, 128, 200)
    with np.errstate(all="ignore"):
        wanted = divide_by_all(literals)(x)
    program = prepare(ts.jit(divide_by_all(literals)), (x,), "interp")
    for engine in ("target", "device"):
        for number, (got, want) in enumerate(zip(program.run(engine, "llvm"), wanted, strict=True)):
            np.testing.assert_array_equal(got, want, err_msg=f"{engine} {literals[number // 2]}")


@pytest.mark.parametrize(("literal", "dtype", "words"), [
    (8, "i4", ("ashr", "and")), (8, "u4", ("lshr", "and")), (7, "u4", ("udiv", "urem")),
    (7, "i4", ("sdiv srem icmp sext add", "srem icmp add select")),
])  # fmt: skip
def test_a_literal_takes_few_instructions(literal, dtype, words):
    for call, expected in zip((lambda x: x // literal, lambda x: x % literal), words, strict=True):
        artifact = prepare(ts.jit(call), (np.ones(16, dtype),), "interp").emit("llvm", {"vector_bytes": 64})
        text = artifact.text("kernels.ll")
        body = text[text.index("load <16 x i32>") : text.index("store <16 x i32>")]
        assert [w for w in re.findall(r"= (\w+)", body) if w != "getelementptr"] == expected.split()


def test_a_block_computes_an_index_once():
    text = LlvmBuilder()
    first = text.add("%a", text.mul("%b", 3))
    assert text.add("%a", text.mul("%b", 3)) == first != text.add("%b", text.mul("%b", 3))
    assert text.multiply("%a", "%b") == text.multiply("%a", "%b")
    section = text.new_section()
    with text.insert_into(section):  # ahead of what this block has computed
        assert text.mul("%b", 3) != "%i1" and len(section) == 1
    assert text.mul("%b", 3) == "%i1"
    text.branch_to("next")
    assert text.mul("%b", 3) != "%i1"
