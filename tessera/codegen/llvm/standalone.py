"""Standalone programs for processors: machine code and C text of a shared library that needs no Python.

The kernels are compiled from the artifact's LLVM IR for a named machine; the C text executes the host plan, on one
thread, or on several where it is compiled with OpenMP.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from tessera.codegen.artifact import Artifact
from tessera.codegen.c_plan import (
    FIRST_SITE,
    OUT_OF_MEMORY,
    SIZE_FUNCTIONS,
    CProgram,
    format_address,
    format_checks,
    format_errors,
    format_product,
    format_size,
    format_steps,
    make_c_name,
    make_common_files,
    read_program,
)
from tessera.codegen.c_plan import MACHINE as WASM
from tessera.codegen.llvm import webassembly
from tessera.codegen.llvm.runtime.jit import compile_for_machine, describe_host, get_host_vector_bytes
from tessera.codegen.llvm.runtime.program import TEXT_FILE
from tessera.codegen.llvm.text import protocol
from tessera.core.errors import UnknownNameError, user_location


@dataclass(frozen=True)
class Machine:
    """A processor to compile for: LLVM's triple, model and features, and the bytes of its vector registers."""

    triple: str
    cpu: str
    features: str
    vector_bytes: int


MACHINES = {
    "x86-64": Machine("x86_64-unknown-linux-gnu", "x86-64", "", 16),
    "x86-64-v3": Machine("x86_64-unknown-linux-gnu", "x86-64-v3", "", 32),  # AVX2: from 2013 on
    "x86-64-v4": Machine("x86_64-unknown-linux-gnu", "x86-64-v4", "", 64),  # AVX-512
    "aarch64": Machine("aarch64-unknown-linux-gnu", "generic", "+neon", 16),
    WASM: Machine(webassembly.TRIPLE, "generic", webassembly.FEATURES, webassembly.VECTOR_BYTES),
}


def find_machine(name: str | None) -> tuple[str, Machine]:
    """A machine by its name; by default the common denominator of this one's family, "native" is this one itself.

    Raises:
        UnknownNameError: there is none.
    """
    own = "aarch64" if platform.machine() in ("aarch64", "arm64") else "x86-64"
    if name == "native":
        return name, Machine(llvm.get_default_triple(), *describe_host(), get_host_vector_bytes())
    if name is not None and name not in MACHINES:
        raise UnknownNameError(
            f"{name} is no machine to compile for", location=user_location(), expected=", ".join([*MACHINES, "native"])
        )
    return name or own, MACHINES[name or own]


def emit_standalone(
    artifact: Artifact, name: str, stored: Mapping[str, bytes], machine: str | None
) -> dict[str, bytes | str]:
    """The files of a library; `stored` has the bytes of its weights."""
    if machine == WASM:
        return webassembly.emit_web_object(artifact, name, stored)
    program, found = read_program(artifact, name, stored), find_machine(machine)[1]
    own = program.name
    return {
        **make_common_files(program),
        f"{own}.c": _format_source(program),
        f"lib{own}.map": f"{{ global: {own}; {own}_error; local: *; }};\n",
        "kernels.o": compile_for_machine(artifact.text(TEXT_FILE), found.triple, found.cpu, found.features, ".task"),
        "Makefile": _MAKEFILE.format(name=own),
        **({"weights.bin": program.weights} if program.weights else {}),
    }


_MAKEFILE = """\
# `make` links lib{name}.so and the example; `make OPENMP=1` links it with threads.
CFLAGS ?= -O2
FLAGS = -std=gnu11 -fPIC -Wno-unknown-pragmas $(if $(OPENMP),-fopenmp)

all: lib{name}.so example

lib{name}.so: {name}.c {name}.h kernels.o lib{name}.map $(wildcard weights.bin)
\t$(CC) $(CFLAGS) $(FLAGS) -shared -Wl,-z,defs -Wl,-soname,$@ -Wl,--version-script=lib{name}.map {name}.c kernels.o \\
\t  -o $@ -lm -lpthread

example: example.c {name}.h lib{name}.so
\t$(CC) $(CFLAGS) -std=gnu11 example.c -o $@ -L. -l{name} -Wl,-rpath,'$$ORIGIN'

clean:
\trm -f lib{name}.so example
"""


_PRELUDE = """\
#include "{name}.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum {{ CHUNKS_PER_THREAD = 8 }};
typedef void task(void *slots, int64_t begin, int64_t end, void *scratch);
extern volatile int64_t {word};
void {poll}(void *word) {{ (void)word; }}

/* The least (program + 1, site) of the failures of a launch: it does not depend on the order of threads. */
static int64_t failed = INT64_MAX;
void {report}(int64_t context, int64_t site, int64_t program, void *table) {{
  (void)context, (void)table;
  int64_t key = (program + 1) << {bit} | site, seen = __atomic_load_n(&failed, __ATOMIC_RELAXED);
  while (key < seen && !__atomic_compare_exchange_n(&failed, &seen, key, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {{}}
}}

static int launch(task *run, int64_t *slots, int64_t total, size_t scratch_bytes) {{
#ifdef _OPENMP
  int64_t threads = total < omp_get_max_threads() ? (total > 0 ? total : 1) : omp_get_max_threads();
#else
  int64_t threads = 1;
#endif
  int64_t chunk = total / (threads * CHUNKS_PER_THREAD) > 0 ? total / (threads * CHUNKS_PER_THREAD) : 1;
  char *scratch = aligned_alloc(64, (scratch_bytes + 64) * threads);
  if (!scratch) return {memory};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t begin = 0; begin < total; begin += chunk) {{
    int64_t end = begin + chunk < total ? begin + chunk : total;
#ifdef _OPENMP
    run(slots, begin, end, scratch + (scratch_bytes + 64) * omp_get_thread_num());
#else
    run(slots, begin, end, scratch);
#endif
  }}
  free(scratch);
  return failed == INT64_MAX ? 0 : {first} + (int)(failed & ((INT64_C(1) << {bit}) - 1));
}}

static inline int read_flag(const char *at) {{ return *(const uint8_t *)at; }}
static inline int64_t address(const void *at) {{ return (int64_t)(intptr_t)at; }}
"""


def _format_source(program: CProgram) -> str:
    """The C text of a library."""
    prelude = _PRELUDE.format(
        name=program.name, word=protocol.FAILURE_WORD, poll=protocol.POLL_FUNCTION, report=protocol.REPORT_FUNCTION,
        bit=protocol.FAILURE_PROGRAM_BIT, memory=OUT_OF_MEMORY, first=FIRST_SITE,
    )  # fmt: skip
    kernels = {name: f"kernel{i}" for i, name in enumerate(sorted({e["kernel"] for e in program.plan["launches"]}))}
    lines = [f'extern task {own} __asm__("{name}.task");' for name, own in kernels.items()]
    return "\n".join(
        [prelude, *lines, *_format_weights(program), SIZE_FUNCTIONS if program.sizes else "", *format_errors(program),
         "", *_format_body(program, kernels), "", *_format_entry(program), ""]
    )  # fmt: skip


def _format_weights(program: CProgram) -> Iterator[str]:
    """The weights as part of the library's read-only data."""
    if program.weights:
        symbol = f"{program.name}_weights"
        yield f'extern const char {symbol}[] __attribute__((visibility("hidden")));'
        yield f'__asm__(".pushsection .rodata\\n.balign 64\\n.globl {symbol}\\n.hidden {symbol}\\n{symbol}:\\n"'
        yield '        ".incbin \\"weights.bin\\"\\n.popsection\\n");'


def _format_body(program: CProgram, kernels: Mapping[str, str]) -> Iterator[str]:
    """The function that executes the plan; memory is the caller's."""
    given = [f"int64_t {n}" for n in _list_size_names(program)] + [f"const void *{p.name}" for p in program.parameters]
    given = [g.replace("const void *", "int64_t ") if p is not None and p.scalar else g
             for g, p in zip(given, [*(None for _ in program.sizes), *program.parameters], strict=True)]  # fmt: skip
    yield f"static int execute({', '.join([*given, 'char *workspace'])}) {{"
    yield "  int result = 0;"
    yield "  (void)workspace;"
    for p in program.parameters:
        if p.data["role"] == "output" and p.number in program.plan["read"]:
            yield f"  memset((void *){p.name}, 0, sizeof({p.c_type}) * ({p.count}));"
    yield from format_steps(program, lambda number: _format_launch(program, number, kernels))
    yield "  return result;"
    yield "}"


def _list_size_names(program: CProgram) -> list[str]:
    return [make_c_name(n) for n in program.sizes]


def _format_launch(program: CProgram, number: int, kernels: Mapping[str, str]) -> Iterator[str]:
    entry = program.plan["launches"][number]
    slots = [_format_slot(program, a) for a in entry["args"]] + [format_size(n) for n in entry["grid"]]
    scratch = program.plan["scratch"][entry["kernel"]]
    yield "{"
    yield f"  int64_t slots[] = {{{', '.join(slots)}}};"
    yield f"  result = launch({kernels[entry['kernel']]}, slots, {format_product(entry['grid'])}, {_round(scratch)});"
    yield "  if (result) return result;"
    yield "}"


def _round(count: int) -> int:
    return -(-int(count) // 64) * 64


def _format_slot(program: CProgram, argument: Mapping[str, Any]) -> str:
    if "value" in argument:
        return format_size(argument["value"])
    if "param" in argument and program.parameters[argument["param"]].scalar:
        return program.parameters[argument["param"]].name
    return f"address({format_address(program, argument)})"


def _format_entry(program: CProgram) -> Iterator[str]:
    """The function of the header: checks, memory, and one call at a time."""
    yield "static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER;"
    yield ""
    yield f"{program.head} {{"
    yield from format_checks(program)
    workspace = program.plan["workspace"]
    yield f"  char *workspace = aligned_alloc(64, ({format_size(workspace)} + 127) / 64 * 64);"
    yield f"  if (!workspace) return {OUT_OF_MEMORY};"
    given = _list_size_names(program)
    for p in program.parameters:
        if p.stored:
            given.append(f"{program.name}_weights + {p.offset}")
        elif p.scalar:
            yield f"  int64_t {p.name}_word = 0;"
            yield f"  memcpy(&{p.name}_word, &{p.name}, sizeof {p.name});"
            given.append(f"{p.name}_word")
        else:
            given.append(p.name)
    yield "  pthread_mutex_lock(&one_call);"
    yield f"  failed = INT64_MAX, {protocol.FAILURE_WORD} = {protocol.NO_FAILURE};"
    yield f"  int result = execute({', '.join([*given, 'workspace'])});"
    yield "  pthread_mutex_unlock(&one_call);"
    yield "  free(workspace);"
    yield "  return result;"
    yield "}"
