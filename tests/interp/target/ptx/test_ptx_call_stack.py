"""Recursive calls, function pointers and alloca."""

import math

import numpy as np
import pytest

from tessera.core.errors import ExecutionError, UnsupportedOpError
from tessera.interp.target.ptx import PtxModule

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# Of each call a local variable, which the next one writes through a pointer: n! = n * (n-1)!
FACTORIAL = """
.func f(.param .u64 out, .param .u32 n)
{ .local .u64 inner; .reg .b64 %out, %mine, %v, %w; .reg .b32 %n; .reg .pred %p; .param .u64 a; .param .u32 b;
  ld.param.u64 %out, [out]; ld.param.u32 %n, [n]; setp.gt.u32 %p, %n, 1; @%p bra DEEPER;
  st.u64 [%out], 1; ret;
DEEPER: mov.u64 %mine, inner; cvta.local.u64 %mine, %mine; st.param.u64 [a], %mine; sub.u32 %n, %n, 1;
  st.param.u32 [b], %n; call f, (a, b); add.u32 %n, %n, 1; ld.u64 %v, [%mine];
  cvt.u64.u32 %w, %n; mul.lo.u64 %v, %v, %w; st.u64 [%out], %v; ret; }
.visible .entry k(.param .u64 p)
{ .reg .b64 %p; .reg .b32 %i; .param .u64 a; .param .u32 b;
  ld.param.u64 %p, [p]; mov.u32 %i, %tid.x; mad.wide.u32 %p, %i, 8, %p;
  st.param.u64 [a], %p; st.param.u32 [b], %i; call f, (a, b); ret; }
"""


@pytest.mark.parametrize("debug", [False, True])
def test_frames_lie_apart_and_lanes_go_to_depths_of_their_own(debug):
    out = np.zeros(20, "u8")
    PtxModule(HEAD + FACTORIAL).launch("k", block=20, args=[out], debug=debug)
    assert out.tolist() == [math.factorial(i) for i in range(20)]


# Whether a number is even, by two functions that call each other, one of them through a register.
PARITY = """
.func (.param .u32 r) odd(.param .u32 n);
.func (.param .u32 r) even(.param .u32 n)
{ .reg .b32 %n, %r; .reg .pred %p; .param .u32 x, y; ld.param.u32 %n, [n]; st.param.u32 [r], 1;
  setp.eq.u32 %p, %n, 0; @%p ret; sub.u32 %n, %n, 1; st.param.u32 [x], %n; call (y), odd, (x);
  ld.param.u32 %r, [y]; st.param.u32 [r], %r; ret; }
.func (.param .u32 r) odd(.param .u32 n)
{ .reg .b32 %n, %r; .reg .b64 %f; .reg .pred %p; .param .u32 x, y; ld.param.u32 %n, [n]; st.param.u32 [r], 0;
  setp.eq.u32 %p, %n, 0; @%p ret; sub.u32 %n, %n, 1; st.param.u32 [x], %n; mov.u64 %f, even;
  P: .callprototype (.param .u32 _) _ (.param .u32 _); call (y), %f, (x), P;
  ld.param.u32 %r, [y]; st.param.u32 [r], %r; ret; }
.visible .entry k(.param .u64 p)
{ .reg .b64 %p; .reg .b32 %i, %r; .param .u32 x, y; ld.param.u64 %p, [p]; mov.u32 %i, %tid.x;
  mad.wide.u32 %p, %i, 4, %p; st.param.u32 [x], %i; call (y), even, (x); ld.param.u32 %r, [y];
  st.global.u32 [%p], %r; ret; }
""".replace(".param .u32 x, y;", ".param .u32 x; .param .u32 y;")


def test_functions_that_call_each_other():
    out = np.zeros(40, "u4")
    PtxModule(HEAD + PARITY).launch("k", block=40, args=[out])
    assert out.tolist() == [1 - i % 2 for i in range(40)]


def test_a_stack_has_an_end():
    text = HEAD + ".func f() { call f; ret; }\n.visible .entry k() { call f; ret; }"
    with pytest.raises(ExecutionError, match=r":4:13.*call: a stack of more than \d+ bytes.*thread \(0,0,0\)"):
        PtxModule(text).launch("k")


# Binomial coefficients by Pascal's rule: two calls, whose results and arguments are registers of the same names.
PASCAL = """
.func (.reg .u32 r) choose(.reg .u32 n, .reg .u32 k)
{ .reg .u32 a, b; .reg .pred %p, %q; setp.eq.u32 %p, k, 0; setp.eq.or.u32 %q, k, n, %p; mov.u32 r, 1; @%q ret;
  sub.u32 n, n, 1; call (a), choose, (n, k); sub.u32 k, k, 1; call (b), choose, (n, k); add.u32 r, a, b; ret; }
.visible .entry k(.param .u64 p)
{ .reg .b64 %p; .reg .b32 %i, %r; ld.param.u64 %p, [p]; mov.u32 %i, %tid.x; mad.wide.u32 %p, %i, 4, %p;
  call (%r), choose, (7, %i); st.global.u32 [%p], %r; ret; }
"""


@pytest.mark.parametrize("debug", [False, True])
def test_recursion_with_registers_as_parameters(debug):
    out = np.zeros(8, "u4")
    PtxModule(HEAD + PASCAL).launch("k", block=8, args=[out], debug=debug)
    assert out.tolist() == [math.comb(7, i) for i in range(8)]


def test_recursion_with_vectors_as_parameters_is_named():
    vector = ".reg .v2 .b32 %a"
    text = f"{HEAD}.func f({vector}) {{ call f, (%a); ret; }}\n.visible .entry k() {{ {vector}; call f, (%a); ret; }}"
    with pytest.raises(UnsupportedOpError, match="recursive call of f with vectors"):
        PtxModule(text).launch("k")


ALLOCATED = """
.visible .entry k(.param .u64 p)
{ .reg .b64 %p, %n, %a, %b, %top, %q; .reg .b32 %i, %v, %w; .reg .pred %c;
  ld.param.u64 %p, [p]; mov.u32 %i, %tid.x; mad.wide.u32 %p, %i, 4, %p; cvt.u64.u32 %n, %i; shl.b64 %n, %n, 2;
  add.u64 %n, %n, 4; stacksave.u64 %top; alloca.u64 %a, %n; alloca.u64 %b, 8, 32; and.b64 %q, %b, 31;
  cvt.u32.u64 %w, %q; mov.u32 %v, 0;
L: mad.wide.u32 %q, %v, 4, %a; st.local.u32 [%q], %v; add.u32 %v, %v, 1; setp.le.u32 %c, %v, %i; @%c bra L;
  st.local.u32 [%b], 100; ld.local.u32 %v, [%q]; add.u32 %v, %v, %w; ld.local.u32 %w, [%b]; add.u32 %v, %v, %w;
  stackrestore.u64 %top; st.global.u32 [%p], %v; ret; }
"""


@pytest.mark.parametrize("debug", [False, True])
def test_memory_as_it_is_needed(debug):
    out = np.zeros(50, "u4")
    PtxModule(HEAD + ALLOCATED).launch("k", block=50, args=[out], debug=debug)
    assert (out == np.arange(50) + 100).all()


def run_lines(lines, functions="", count=4):
    """What a kernel stores at `%p`; the registers of its body are declared."""
    out = np.zeros(count, "u4")
    head = ".reg .b64 %p, %q; .reg .b32 %r<8>; .reg .f32 %f<8>; .reg .v2 .f32 %v; ld.param.u64 %p, [p];"
    PtxModule(f"{HEAD}{functions}\n.visible .entry k(.param .u64 p) {{ {head}\n{lines}\nret; }}").launch(
        "k", args=[out]
    )
    return out.tolist()


BOTH = """.func (.reg .u32 sum, .reg .u32 left) both(.reg .u32 a, .reg .u32 b)
{ add.u32 sum, a, b; add.u32 a, a, 100; mov.u32 left, a; ret; }"""


@pytest.mark.parametrize("arguments", ["%r1, %r2", "5, %r2", "5, 7"])
def test_registers_are_passed_by_value_and_several_come_back(arguments):
    """A function may write its parameters, and a result may be the register of an argument."""
    lines = f"mov.u32 %r1, 5; mov.u32 %r2, 7; call (%r2, %r3), both, ({arguments});"
    stored = "st.global.v4.u32 [%p], {%r1, %r2, %r3, %r3};"
    assert run_lines(lines + stored, BOTH) == [5, 12, 105, 105]


def test_a_function_in_another_s_arguments_and_early_returns():
    functions = """.func (.reg .u32 r) least(.reg .u32 a, .reg .u32 b)
    { .reg .pred %q; mov.u32 r, a; setp.le.u32 %q, a, b; @%q ret; mov.u32 r, b; ret; }
    .func (.reg .u32 r) least3(.reg .u32 a, .reg .u32 b, .reg .u32 c)
    { .reg .u32 t; call (t), least, (a, b); call (r), least, (t, c); ret; }"""
    lines = "".join(f"call (%r{i}), least3, ({a});" for i, a in enumerate(("3, 2, 1", "1, 2, 3", "2, 1, 3", "9, 9, 9")))
    assert run_lines(lines + "st.global.v4.u32 [%p], {%r0, %r1, %r2, %r3};", functions) == [1, 1, 1, 9]


def test_parameters_in_memory_take_registers_and_numbers():
    function = """.func (.param .b32 x) twice(.param .b32 a)
    { .reg .b32 %t; ld.param.b32 %t, [a]; add.u32 %t, %t, %t; st.param.b32 [x], %t; ret; }"""
    lines = "mov.u32 %r1, 21; call (%r2), twice, (%r1); call (%r3), twice, (4);"
    assert run_lines(lines + "st.global.v2.u32 [%p], {%r2, %r3};", function)[:2] == [42, 8]


def test_elements_of_vector_parameters():
    function = ".func (.reg .f32 r) dot(.reg .v2 .f32 a) { mul.f32 r, a.x, a.x; fma.rn.f32 r, a.g, a.y, r; ret; }"
    lines = "mov.v2.f32 %v, {0f40400000, 0f40800000}; call (%f1), dot, (%v); st.global.f32 [%p], %f1;"
    assert run_lines(lines, function)[0] == np.float32(25).view("u4")


BODY_VARIABLES = """.func (.reg .u32 r) count() { .global .u32 calls = 10; atom.global.add.u32 r, [calls], 1; ret; }
.global .b8 table[16] = {1, 2, 3, 4, 5};"""


def test_variables_of_a_body_in_global_memory_exist_once():
    """They keep their values between calls and between launches, and are not those of another scope."""
    text = f"""{HEAD}{BODY_VARIABLES}
    .visible .entry k(.param .u64 p) {{ .reg .b64 %p; .reg .b32 %r<4>; ld.param.u64 %p, [p];
    .global .u32 calls; .const .u32 seven = 7; st.global.u32 [calls], 1; call (%r0), count, (); call (%r1), count, ();
    ld.global.u32 %r2, [calls]; ld.const.u32 %r3, [seven]; st.global.v4.u32 [%p], {{%r0, %r1, %r2, %r3}}; ret; }}"""
    module, out = PtxModule(text), np.zeros(4, "u4")
    for first in (10, 12):
        module.launch("k", args=[out])
        assert out.tolist() == [first, first + 1, 1, 7]


def test_addresses_as_values_and_in_initial_values():
    """`table + 1` as a source, and single bytes of an address in an array."""
    masks = ", ".join(f"0xFF{'00' * k}(table + 2)" for k in range(8))
    functions = f"{BODY_VARIABLES}\n.global .align 8 .u8 bytes[8] = {{{masks}}};"
    lines = """.global .u64 kept; st.global.u64 [kept], table + 1 - 2 + 2; ld.global.u64 %q, [kept];
    ld.global.u8 %r0, [%q]; ld.global.u64 %q, [bytes]; ld.u8 %r1, [%q]; mov.u64 %q, table + 3;
    ld.global.u8 %r2, [%q + 1]; st.global.v4.u32 [%p], {%r0, %r1, %r2, %r2};"""
    assert run_lines(lines, functions) == [2, 3, 5, 5]


def test_printf_gives_the_number_of_its_arguments(capsys):
    head = """.global .b8 form[7] = {37, 100, 32, 37, 100, 10, 0};
    .extern .func (.param .b32 count) vprintf (.param .b64 form, .param .b64 values);"""
    lines = """.reg .b64 %a; .local .align 8 .b8 values[8]; .param .b64 x; .param .b64 y; .param .b32 z;
    st.local.u32 [values], 3; st.local.u32 [values + 4], 4; mov.u64 %a, form; cvta.global.u64 %q, %a;
    st.param.b64 [x], %q; mov.u64 %a, values; cvta.local.u64 %q, %a; st.param.b64 [y], %q;
    call.uni (z), vprintf, (x, y); ld.param.b32 %r1, [z]; st.global.u32 [%p], %r1;"""
    assert run_lines(lines, head, 1) == [2] and capsys.readouterr().out == "3 4\n"
