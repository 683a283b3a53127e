"""`ts.compiler`: passes over graphs and schedules, code generators, and compilation for several targets.

>>> import tessera as ts
>>> @ts.compiler.graph_pass(install=False)
... class Fuse(ts.compiler.GraphPass):
...     def run(self, graph):
...         return self.replace_pattern(graph, ["exp", "log"], lambda x: x * 1.0)
>>> with ts.compiler.passes(Fuse):
...     ts.jit(lambda x: ts.log(ts.exp(x)))(ts.ones((2,)))
Tensor([1., 1.], f32)
"""

import sys
from types import ModuleType
from typing import Any

from tessera.compiler.graph_ir import GraphIR
from tessera.compiler.passes import (
    GraphPass,
    graph_pass,
    installed_passes,
    only,
    passes,
    run_passes,
    schedule_pass,
    uninstall,
)
from tessera.compiler.schedules import ScheduledKernel, ScheduleGenerator, ScheduleOptimizer
from tessera.compiler.universal import CodeGenerator, Target, TargetProgram, UniversalCompiler, define_compiler
from tessera.lower.lowering_plan import check_values

__all__ = [
    "CodeGenerator",
    "TargetProgram",
    "GraphIR",
    "GraphPass",
    "ScheduleGenerator",
    "ScheduleOptimizer",
    "ScheduledKernel",
    "Target",
    "UniversalCompiler",
    "check_values",
    "graph_pass",
    "installed_passes",
    "only",
    "passes",
    "run_passes",
    "schedule_pass",
    "uninstall",
]


class _Compiler(ModuleType):
    """The module, which also decorates compilers: `@ts.compiler`."""

    def __call__(self, kind: Any) -> Any:
        """A compiler of the user."""
        return define_compiler(kind)


sys.modules[__name__].__class__ = _Compiler
