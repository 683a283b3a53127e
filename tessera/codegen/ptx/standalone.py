"""Standalone programs for NVIDIA GPUs: PTX text and a C launcher on the driver API, without Python.

The first call loads the text, which the driver compiles, and copies the weights to the GPU; each call copies its inputs
there, runs the host plan, and copies the results back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tessera.codegen.artifact import Artifact
from tessera.codegen.c_plan import (
    ALIGN,
    SIZE_FUNCTIONS,
    CParameter,
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
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.codegen.ptx.text.builder import HIDDEN_PARAMETERS
from tessera.core.errors import UnsupportedOpError

DRIVER_ERROR = 1000  # added to the driver's number of an error
PADDING = 64  # bytes after each buffer: 16-bit atomics access the word of the last element
STATIC_SHARED_BYTES = 48 * 1024  # more shared memory needs an opt-in


def emit_standalone(artifact: Artifact, name: str, stored: Mapping[str, bytes]) -> dict[str, bytes | str]:
    """The files of a launcher; `stored` has the bytes of its weights.

    Raises:
        UnsupportedOpError: a kernel reports to Python, or needs tensor maps, clusters or a cooperative launch.
    """
    program = read_program(artifact, name, stored)
    _check_entries(program)
    own = program.name
    return {
        **make_common_files(program),
        f"{own}.c": _format_source(program),
        "kernels.ptx": artifact.text(TEXT_FILE),
        "Makefile": _MAKEFILE.format(name=own),
        **({"weights.bin": program.weights} if program.weights else {}),
    }


def _check_entries(program: CProgram) -> None:
    for kernel, entry in program.plan["entries"].items():
        reasons = {kind: "it checks indices or asserts, and reports to Python" for kind in HIDDEN_PARAMETERS}
        reasons |= {"meeting": "it has a grid barrier", "maps": "it reads by tensor maps", "cluster": "it has clusters"}
        problem = next((reason for key, reason in reasons.items() if entry.get(key)), None)
        if problem is not None:
            raise UnsupportedOpError(
                f"a standalone program cannot be made: {kernel}: {problem}", expected="kernels alone",
                suggestion='give machine="sm_80", for kernels without tensor maps and clusters'
                if "maps" in entry or "cluster" in entry
                else "build an artifact or a bundle, which run with Python",
            )  # fmt: skip


_MAKEFILE = """\
# `make` links the example; CUDA_HOME has include/cuda.h, and the driver's libcuda is where the linker finds it.
CUDA_HOME ?= /usr/local/cuda
CFLAGS ?= -O2

example: example.c {name}.c {name}.h kernels.ptx $(wildcard weights.bin)
\t$(CC) $(CFLAGS) -std=gnu11 -I$(CUDA_HOME)/include example.c {name}.c -o $@ -L$(CUDA_HOME)/lib64/stubs -lcuda -lpthread

clean:
\trm -f example
"""

_PRELUDE = """\
#include "{name}.h"
#include <cuda.h>
#include <pthread.h>
#include <stddef.h>

#define TRY(call) \\
  do {{ CUresult status = (call); if (status) {{ result = {error} + (int)status; goto done; }} }} while (0)
__asm__(".pushsection .rodata\\n.globl {name}_text\\n.hidden {name}_text\\n{name}_text:\\n"
        ".incbin \\"kernels.ptx\\"\\n.byte 0\\n.popsection\\n");
extern const char {name}_text[] __attribute__((visibility("hidden")));

static CUcontext context;
static CUmodule module;
static int processors;
"""


def _format_source(program: CProgram) -> str:
    """The C text of a launcher."""
    kernels = {name: f"kernel{i}" for i, name in enumerate(sorted({e["kernel"] for e in program.plan["launches"]}))}
    prelude = _PRELUDE.format(name=program.name, error=DRIVER_ERROR)
    lines = [f"static CUfunction {own};" for own in kernels.values()]
    return "\n".join(
        [prelude, *lines, *_format_weights(program), SIZE_FUNCTIONS if program.sizes else "", *_format_errors(program),
         "", *_format_loader(program, kernels), "", *_format_body(program, kernels), "", *_format_entry(program), ""]
    )  # fmt: skip


def _format_errors(program: CProgram) -> Iterator[str]:
    for line in format_errors(program):
        if line.lstrip().startswith("default:"):
            yield "    default: break;"
            yield "  }"
            yield "  const char *text = NULL;"
            yield f"  if (result > {DRIVER_ERROR}) cuGetErrorString((CUresult)(result - {DRIVER_ERROR}), &text);"
            yield '  return text ? text : "unknown result";'
            yield "}"
            return
        yield line


def _format_weights(program: CProgram) -> Iterator[str]:
    if program.weights:
        yield "static CUdeviceptr weights;"
        symbol = f"{program.name}_weights"
        yield f'__asm__(".pushsection .rodata\\n.balign {ALIGN}\\n.globl {symbol}\\n.hidden {symbol}\\n{symbol}:\\n"'
        yield '        ".incbin \\"weights.bin\\"\\n.popsection\\n");'
        yield f'extern const char {symbol}[] __attribute__((visibility("hidden")));'


def _format_loader(program: CProgram, kernels: Mapping[str, str]) -> Iterator[str]:
    """The function that loads the text and the weights, once."""
    yield "static int load(void) {"
    yield "  int result = 0;"
    yield "  CUdevice device;"
    yield "  if (module) return 0;"
    yield "  CUmodule made = NULL;"
    yield "  TRY(cuInit(0));"
    yield "  TRY(cuDeviceGet(&device, 0));"
    yield "  TRY(cuDevicePrimaryCtxRetain(&context, device));"
    yield "  TRY(cuCtxSetCurrent(context));"
    yield "  TRY(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));"
    yield f"  TRY(cuModuleLoadData(&made, {program.name}_text));"
    for name, own in kernels.items():
        yield f'  TRY(cuModuleGetFunction(&{own}, made, "{name}"));'
        shared = int(program.plan["entries"][name]["shared"])
        if shared > STATIC_SHARED_BYTES:
            attribute = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
            yield f"  TRY(cuFuncSetAttribute({own}, {attribute}, {shared}));"
    if program.weights:
        size = len(program.weights)
        yield f"  TRY(cuMemAlloc(&weights, {size + PADDING}));"
        yield f"  TRY(cuMemcpyHtoD(weights, {program.name}_weights, {size}));"
    yield "  module = made;"
    yield "done:"
    yield "  return result;"
    yield "}"


def _declare(p: CParameter) -> str:
    return f"{p.c_type} {p.name}" if p.scalar else f"CUdeviceptr {p.name}"


def _format_body(program: CProgram, kernels: Mapping[str, str]) -> Iterator[str]:
    """The function that executes the plan on memory of the GPU."""
    given = [f"int64_t {make_c_name(n)}" for n in program.sizes] + [_declare(p) for p in program.parameters]
    yield "static inline int read_flag(CUdeviceptr at) {"
    yield "  unsigned char found = 0;"
    yield "  return !cuCtxSynchronize() && !cuMemcpyDtoH(&found, at, 1) && found;"
    yield "}"
    yield ""
    yield f"static int execute({', '.join([*given, 'CUdeviceptr workspace'])}) {{"
    yield "  int result = 0;"
    yield "  (void)workspace;"
    for p in program.parameters:
        if p.data["role"] == "output" and p.number in program.plan["read"]:
            yield f"  TRY(cuMemsetD8({p.name}, 0, sizeof({p.c_type}) * ({p.count})));"
    for line in format_steps(program, lambda number: _format_launch(program, number, kernels)):
        yield line.replace("(char *)", "")
    yield "  TRY(cuCtxSynchronize());"
    yield "done:"
    yield "  return result;"
    yield "}"


def _format_launch(program: CProgram, number: int, kernels: Mapping[str, str]) -> Iterator[str]:
    launch = program.plan["launches"][number]
    entry = program.plan["entries"][launch["kernel"]]
    values = [_format_value(program, a) for a in launch["args"]]
    yield "{"
    for i, (kind, value) in enumerate(values):
        yield f"  {kind} argument{i} = {value};"
    yield f"  void *given[] = {{{', '.join([*(f'&argument{i}' for i in range(len(values))), 'NULL'])}}};"
    grid, threads = _format_grid(launch, entry), entry["threads"]
    block = ", ".join(map(str, (*threads, 1, 1)[:3])) if isinstance(threads, (list, tuple)) else f"{threads}, 1, 1"
    yield f"  if ({format_product(launch['grid'])} > 0)"
    shape = f"{', '.join(grid)}, {block}, {entry['shared']}"
    yield f"    TRY(cuLaunchKernel({kernels[launch['kernel']]}, {shape}, NULL, given, NULL));"
    yield "}"


def _format_value(program: CProgram, argument: Mapping[str, Any]) -> tuple[str, str]:
    """The C type and the value of a kernel's argument."""
    if "value" in argument:
        return "int64_t", format_size(argument["value"])
    if "param" in argument and program.parameters[argument["param"]].scalar:
        parameter = program.parameters[argument["param"]]
        return parameter.c_type, parameter.name
    return "CUdeviceptr", format_address(program, argument).replace("(char *)", "")


def _format_grid(launch: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    """The hardware grid: its first axis is the program grid's last, which varies fastest."""
    if entry.get("programs"):
        programs = format_size(entry["programs"])
        return [f"{programs} < processors ? {programs} : processors", "1", "1"]
    if entry.get("folded"):
        return [format_product(launch["grid"]), "1", "1"]
    axes = [format_size(n) for n in list(launch["grid"])[: launch["rank"]]][::-1]
    return [*axes, "1", "1", "1"][:3]


def _format_entry(program: CProgram) -> Iterator[str]:
    """The function of the header: memory on the GPU, copies there and back, one call at a time."""
    arrays = [p for p in program.passed if not p.scalar]
    yield "static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER;"
    yield ""
    yield f"{program.head} {{"
    yield from format_checks(program)
    yield "  pthread_mutex_lock(&one_call);"
    yield f"  CUdeviceptr memory[{len(arrays) + 1}] = {{0}};"
    yield "  int result = load();"
    yield "  if (result) goto done;"
    yield "  TRY(cuCtxSetCurrent(context));"
    yield f"  TRY(cuMemAlloc(&memory[{len(arrays)}], {format_size(program.plan['workspace'])} + {PADDING}));"
    for i, p in enumerate(arrays):
        size = f"sizeof({p.c_type}) * ({p.count})"
        yield f"  TRY(cuMemAlloc(&memory[{i}], {size} + {PADDING}));"
        if p.data["role"] != "output":
            yield f"  if (({p.count}) > 0) TRY(cuMemcpyHtoD(memory[{i}], {p.name}, {size}));"
    places = {p.number: f"memory[{i}]" for i, p in enumerate(arrays)}
    given = [*map(make_c_name, program.sizes)]
    given += [p.name if p.scalar else places.get(p.number, f"weights + {p.offset}") for p in program.parameters]
    yield f"  result = execute({', '.join([*given, f'memory[{len(arrays)}]'])});"
    yield "  if (result) goto done;"
    for i, p in enumerate(arrays):
        if p.written:
            yield f"  if (({p.count}) > 0) TRY(cuMemcpyDtoH({p.name}, memory[{i}], sizeof({p.c_type}) * ({p.count})));"
    yield "done:"
    yield f"  for (int i = 0; i < {len(arrays) + 1}; i++) if (memory[i]) cuMemFree(memory[i]);"
    yield "  pthread_mutex_unlock(&one_call);"
    yield "  return result;"
    yield "}"
