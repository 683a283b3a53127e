"""The barrier of a whole grid: a call of the runtime, which has every program of such a launch in a thread of its own.

    void @tessera_meet(i64 context)

`context` is the word @tessera_meeting of the text, which the runtime sets before the launch. A program goes on when all
have called. Where that can no longer be, since one has ended, the word becomes negative, and each program
ends as it finds that.
"""

from __future__ import annotations

from tessera.codegen.llvm.visit import visit
from tessera.ops import tile

NAME, CONTEXT = "tessera_meet", "tessera_meeting"
# Programs of a launch that meets: each has a thread of the system. More than this is no way to use a processor.
MOST = 256


@visit(tile.grid_barrier)
def _(kernel, node):
    text = kernel.text
    context = text.let(f"load i64, ptr @{CONTEXT}, align 8")
    text.line(f"call void @{NAME}(i64 {context})")
    after = text.let(f"load volatile i64, ptr @{CONTEXT}, align 8")
    broken = text.let(f"icmp slt i64 {after}, 0")
    end, on = text.new_label("broken"), text.new_label("met")
    text.line(f"br i1 {broken}, label %{end}, label %{on}")
    text.begin(end)
    text.line("ret void")
    text.begin(on)
