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


def test_recursion_with_registers_as_parameters_is_named():
    text = (
        HEAD + ".func f(.reg .b32 %a) { call f, (%a); ret; }\n.visible .entry k() { .reg .b32 %x; call f, (%x); ret; }"
    )
    with pytest.raises(UnsupportedOpError, match="recursive call of f with registers"):
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
