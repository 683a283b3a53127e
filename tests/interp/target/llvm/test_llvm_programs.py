"""Whole programs: text as LLVM's optimiser leaves it, and random control flow."""

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvm_native import FEATURES, agree

from tessera.interp.target.llvm import LlvmModule, PerLane

LOOP = """define void @f(ptr noalias %x, ptr noalias %y, ptr noalias %o) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %acc = phi {t} [ {zero}, %entry ], [ %more, %loop ]
  %p = getelementptr inbounds {t}, ptr %x, i64 %i
  %a = load {t}, ptr %p
  %q = getelementptr inbounds {t}, ptr %y, i64 %i
  %b = load {t}, ptr %q
  {body}
  store {t} %r, ptr %q
  %next = add nuw nsw i64 %i, 1
  %done = icmp eq i64 %next, 103
  br i1 %done, label %exit, label %loop
exit:
  store {t} %more, ptr %o
  ret void
}}
declare i32 @llvm.smax.i32(i32, i32)
declare float @llvm.fabs.f32(float)
"""

BODIES = {
    "sum": ("i32", "0", "%r = mul i32 %a, %b\n  %more = add i32 %acc, %r"),
    "max": ("i32", "-99", "%r = sub i32 %a, %b\n  %more = call i32 @llvm.smax.i32(i32 %acc, i32 %r)"),
    "narrow": ("i8", "0", "%s = lshr i8 %a, 3\n  %r = xor i8 %s, %b\n  %more = or i8 %acc, %r"),
    "float": ("float", "0.0", "%m = fmul float %a, %b\n  %r = call float @llvm.fabs.f32(float %m)\n"
                              "  %more = fadd float %acc, %r"),
    "select": ("double", "1.0", "%c = fcmp olt double %a, %b\n  %r = select i1 %c, double %a, double 2.5\n"
                                "  %more = fmul double %acc, %r"),
    "divide": ("i64", "0", "%d = and i64 %b, 7\n  %e = or i64 %d, 1\n  %r = sdiv i64 %a, %e\n"
                           "  %t = trunc i64 %r to i8\n  %s = sext i8 %t to i64\n  %more = sub i64 %acc, %s"),
}  # fmt: skip


def optimised(text):
    """The text after LLVM's own pipeline: vectorised and unrolled for this processor."""
    module = llvm.parse_assembly(text)
    host = {"cpu": llvm.get_host_cpu_name(), "features": FEATURES.flatten()}
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3, **host)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return str(module)


@pytest.mark.parametrize("name", BODIES)
def test_optimised(name):
    rng = np.random.default_rng(7)
    type, zero, body = BODIES[name]
    text = LOOP.format(t=type, zero=zero, body=body)
    dtype = {"i8": "i1", "i32": "i4", "i64": "i8", "float": "f4", "double": "f8"}[type]
    x, y = (rng.normal(0, 30, (2, 103)) if dtype[0] == "f" else rng.integers(-99, 99, (2, 103))).astype(dtype)
    for each in (text, optimised(text)):
        agree(each, x, y, np.zeros(1, dtype))


def random_flow(rng, count):
    """A function that walks a random graph of blocks, its way depending on its argument, till fuel runs out."""
    targets = rng.integers(1, count, (count, 2))
    lines = ["define i32 @f(i32 %x0, i32 %fuel0) {", "b0:"]
    for k in range(count):
        if k:
            sources = [s for s in range(count) if k in targets[s]]
            lines.append(f"b{k}:")
            for v in ("x", "fuel") if sources else ():
                ways = ", ".join(f"[ %{v}n{s}, %go{s} ]" for s in sources)
                lines.append(f"  %{v}{k} = phi i32 {ways}")
            if not sources:
                lines += [f"  %x{k} = add i32 0, 0", f"  %fuel{k} = add i32 0, 0"]
        lines.append(f"""  %m{k} = mul i32 %x{k}, {rng.integers(3, 99)}
  %xn{k} = add i32 %m{k}, {rng.integers(0, 99)}
  %fueln{k} = sub i32 %fuel{k}, 1
  %empty{k} = icmp slt i32 %fueln{k}, 0
  %bit{k} = and i32 %xn{k}, {1 << rng.integers(0, 6)}
  %w{k} = icmp eq i32 %bit{k}, 0
  br i1 %empty{k}, label %out{k}, label %go{k}
out{k}:
  ret i32 %xn{k}
go{k}:
  br i1 %w{k}, label %b{targets[k][0]}, label %b{targets[k][1]}""")
    return "\n".join([*lines, "}"])


@pytest.mark.parametrize("seed", range(12))
def test_random_flow(seed):
    rng = np.random.default_rng(seed)
    m = LlvmModule(random_flow(rng, 7))
    x, fuel = rng.integers(0, 1000, 16), rng.integers(0, 40, 16)
    alone = [m.call("f", [int(a), int(b)])[0] for a, b in zip(x, fuel, strict=True)]
    assert m.call("f", [PerLane(x), PerLane(fuel)], lanes=16).tolist() == alone
