"""Divergence and reconvergence: every lane computes what it computes alone."""

import numpy as np
import pytest

from tessera.core.errors import ExecutionError
from tessera.interp.target.llvm import LlvmModule, PerLane

COLLATZ = """
define i32 @length(i32 %n) {
entry:
  br label %loop
exit:
  ret i32 %steps
loop:
  %x = phi i32 [ %n, %entry ], [ %y, %join ]
  %steps = phi i32 [ 0, %entry ], [ %more, %join ]
  %done = icmp eq i32 %x, 1
  br i1 %done, label %exit, label %body
body:
  %bit = and i32 %x, 1
  %odd = icmp ne i32 %bit, 0
  br i1 %odd, label %up, label %down
up:
  %t = mul i32 %x, 3
  %u = add i32 %t, 1
  br label %join
down:
  %v = lshr i32 %x, 1
  br label %join
join:
  %y = phi i32 [ %u, %up ], [ %v, %down ]
  %more = add i32 %steps, 1
  br label %loop
}
define i32 @twice(i32 %n, i1 %c) {
  br i1 %c, label %yes, label %no
yes:
  %a = call i32 @length(i32 %n)
  %b = add i32 %a, %a
  br label %no
no:
  %r = phi i32 [ %b, %yes ], [ -1, %0 ]
  ret i32 %r
}
define i32 @factorial(i32 %n) {
  %last = icmp sle i32 %n, 1
  br i1 %last, label %stop, label %go
stop:
  ret i32 1
go:
  %less = sub i32 %n, 1
  %rest = call i32 @factorial(i32 %less)
  %r = mul i32 %n, %rest
  ret i32 %r
}
"""


def collatz(n):
    return 0 if n == 1 else 1 + collatz(3 * n + 1 if n % 2 else n // 2)


def test_divergent_loop():
    n = np.arange(1, 65)
    got = LlvmModule(COLLATZ).call("length", [PerLane(n)], lanes=64)
    assert got.tolist() == [collatz(int(k)) for k in n]


def test_call_under_mask():
    n = np.arange(1, 33)
    got = LlvmModule(COLLATZ).call("twice", [PerLane(n), PerLane(n % 3 == 0)], lanes=32)
    assert got.tolist() == [2 * collatz(int(k)) if k % 3 == 0 else -1 for k in n]


def test_recursion():
    got = LlvmModule(COLLATZ).call("factorial", [PerLane([1, 5, 3, 12])], lanes=4)
    assert got.tolist() == [1, 120, 6, 479001600]
    with pytest.raises(ExecutionError, match="nested deeper"):
        LlvmModule(COLLATZ).call("factorial", [2000])


@pytest.mark.parametrize("lanes", [1, 5])
def test_uniform_value_has_every_lane(lanes):
    got = LlvmModule("define i64 @f(i64 %x) { ret i64 %x }").call("f", [7], lanes=lanes)
    assert got.tolist() == [7] * lanes


def test_swap_in_phi():
    text = """define i32 @f(i32 %n) {
entry:
  br label %loop
loop:
  %a = phi i32 [ 1, %entry ], [ %b, %loop ]
  %b = phi i32 [ 2, %entry ], [ %a, %loop ]
  %i = phi i32 [ 0, %entry ], [ %j, %loop ]
  %j = add i32 %i, 1
  %c = icmp slt i32 %j, %n
  br i1 %c, label %loop, label %out
out:
  ret i32 %a
}"""
    assert LlvmModule(text).call("f", [PerLane([1, 2, 3, 4, 9])], lanes=5).tolist() == [1, 2, 1, 2, 1]


def test_switch():
    text = """define i32 @f(i32 %n) {
  switch i32 %n, label %other [ i32 0, label %a
    i32 5, label %b
    i32 -1, label %a ]
a:
  ret i32 10
b:
  ret i32 20
other:
  ret i32 %n
}"""
    m = LlvmModule(text)
    assert m.call("f", [PerLane([0, 5, -1, 9, 5])], lanes=5).tolist() == [10, 20, 10, 9, 20]
    assert [m.call("f", [n])[0] for n in (0, 5, 3)] == [10, 20, 3]


def test_values_cross_divergent_blocks():
    text = """define float @f(float %x, i32 %n) {
entry:
  %v = insertelement <4 x float> splat (float 1.0), float %x, i32 2
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %j, %loop ]
  %w = phi <4 x float> [ %v, %entry ], [ %z, %loop ]
  %z = fadd <4 x float> %w, %v
  %j = add i32 %i, 1
  %c = icmp slt i32 %j, %n
  br i1 %c, label %loop, label %out
out:
  %e = extractelement <4 x float> %z, i32 2
  %g = extractelement <4 x float> %w, i32 0
  %s = fadd float %e, %g
  ret float %s
}"""
    got = LlvmModule(text).call("f", [PerLane([1.0, 2.0, 3.0]), PerLane([1, 4, 2])], lanes=3)
    assert got.tolist() == [2 + 1, 10 + 4, 9 + 2]


def test_alloca_is_each_lanes_own():
    text = """define i32 @f(i32 %k) {
  %a = alloca [8 x i32], align 16
  br label %fill
fill:
  %i = phi i32 [ 0, %0 ], [ %j, %fill ]
  %p = getelementptr inbounds [8 x i32], ptr %a, i64 0, i32 %i
  %v = mul i32 %i, %k
  store i32 %v, ptr %p, align 4
  %j = add nuw nsw i32 %i, 1
  %c = icmp eq i32 %j, 8
  br i1 %c, label %done, label %fill
done:
  %q = getelementptr inbounds [8 x i32], ptr %a, i64 0, i32 %k
  %r = load i32, ptr %q
  ret i32 %r
}"""
    assert LlvmModule(text).call("f", [PerLane([0, 3, 7])], lanes=3).tolist() == [0, 9, 49]


def test_program_ids():
    text = """define void @f(ptr %x, ptr %y, i32 %pid) {
  %o = shl i32 %pid, 2
  %p = getelementptr float, ptr %x, i32 %o
  %q = getelementptr float, ptr %y, i32 %o
  %v = load <4 x float>, ptr %p, align 4
  %w = fmul <4 x float> %v, <float 1.0, float 2.0, float 3.0, float 4.0>
  store <4 x float> %w, ptr %q, align 4
  ret void
}"""
    x, y = np.arange(16, dtype="f4"), np.zeros(16, "f4")
    assert LlvmModule(text).call("f", [x, y, PerLane(np.arange(4))], lanes=4) is None
    assert (y == x * np.tile([1, 2, 3, 4], 4)).all()
