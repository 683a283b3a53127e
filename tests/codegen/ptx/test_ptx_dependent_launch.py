"""Programmatic dependent launch: each thread of a kernel waits for the kernel before it, ahead of its first access to
memory that kernels write; inputs of the program, which none writes, are loaded before."""

import re

import numpy as np
import pytest
from fake_gpu import FakeGpu
from tilekernels import Kernel

import tessera as ts
from tessera.codegen.ptx import BACKEND, emission
from tessera.codegen.ptx.runtime import driver_api
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.codegen.ptx.runtime.gpu_program import DEPENDENT_WAIT, PROGRAMMATIC, GpuProgram
from tessera.core.types import bf16
from tessera.ops.dialects import host
from tessera.runtime import driver

ACCESS = re.compile(r"(@\S+ )?(ld|st|red|atom|prefetch(?!\.tensormap)|cp|wgmma)\.(?!param|shared|local|const)")
SHARED = re.compile(r"\.shared::cta\.(b|u|s|f)\d+|^cp\.async\.(wait|commit|bulk\.(wait|commit))")


def draw(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(s).astype(bf16.numpy) for s in shapes]


PROGRAMS = {
    "pointwise": (lambda x: ts.exp(x) + 1, draw((40, 300))),
    "softmax": (lambda x: ts.softmax(x, axis=-1), draw((40, 300))),
    "product and sum": (lambda x, y: ts.sum(ts.gelu(x @ y), axis=0), draw((256, 128), (128, 256))),
    "few rows": (lambda x, y: ts.softmax(x @ y, axis=-1), draw((20, 512), (512, 256))),
    "attention": (lambda x: ts.scaled_dot_product_attention(x, x, x, is_causal=True), draw((1, 2, 128, 64))),
    "sort": (lambda x: ts.sort(x, axis=-1), draw((2, 3000))),
    "indices": (lambda x: ts.take(x, ts.argsort(x[:, 0]), axis=0), draw((30, 17))),
    "products of a row": (
        lambda x, y, z: ts.rms_norm(ts.silu(x @ y.T) @ z.T) @ y.T,
        draw((1, 96), (320, 96), (96, 320)),
    ),
    "weighted softmax": (lambda x, y, w: ts.softmax(x @ y, axis=-1) * w, draw((20, 512), (512, 256), (256,))),
}


# How many loads come ahead of the wait in some of them: also those of weights that kernels read after other results.
EARLY_LOADS = {"pointwise": 2, "softmax": 2, "products of a row": 4, "weighted softmax": 1}


def split_entries(text):
    """The lines of each entry's body, without labels of its first block."""
    for part in text.split(".visible .entry ")[1:]:
        name, body = part.split("(", 1)[0], part.split("{", 1)[1]
        yield name, [line.strip() for line in body.splitlines() if line.startswith("\t") and line.strip()]


def find_parameters(lines):
    """For each load from global memory the parameters that its address comes from."""
    origins, found = {}, []
    for line in lines:
        line = re.sub(r"^@\S+ ", "", line)
        registers = re.findall(r"%[a-z]+\d+", line)
        known = {i for r in registers for i in origins.get(r, ())}
        known |= {int(i) for i in re.findall(r"^ld\.param\.u64 .*_param_(\d+)\]", line)}
        if line.startswith("ld.global"):
            found.append(known)
        elif registers:
            origins[registers[0]] = known
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_thread_waits_ahead_of_its_first_access(name):
    program, arrays = PROGRAMS[name]
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    text = BACKEND.emit(levels["tile"], {"arch": "sm_90a"}).text(TEXT_FILE)
    entries = dict(split_entries(text))
    assert entries
    main, early = levels["tile"].main, 0
    inputs = set(main.params[: len(arrays)])
    inputs |= {n.out for n in main.body.walk() if n.op is host.view and n.args[0] in inputs}
    for entry, lines in entries.items():
        assert lines.count(f"{DEPENDENT_WAIT};") == 1, entry
        before = lines[: lines.index(f"{DEPENDENT_WAIT};")]
        assert not any(re.match(r"(@\S+ )?(bra|ret|exit|call)", line) for line in before), entry
        loads = [line for line in before if re.match(r"(@\S+ )?ld\.global", line)]
        assert not [x for x in before if ACCESS.match(x) and not SHARED.search(x) and x not in loads], entry
        launches = [n for n in main.body.walk() if n.op is host.launch and n.attrs["kernel"] == entry]
        for parameters in find_parameters(before):
            (i,) = parameters
            assert launches and all(n.args[i] in inputs for n in launches), entry
        early += len(loads)
        later = lines[len(before) :]
        assert all("griddepcontrol" not in line for line in later[1:])
    assert early == EARLY_LOADS.get(name, early)


def test_architectures_without_it_do_not_wait():
    program, arrays = PROGRAMS["softmax"]
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    assert "griddepcontrol" not in BACKEND.emit(levels["tile"], {"arch": "sm_80"}).text(TEXT_FILE)


@pytest.mark.parametrize("name", ["products of a row", "few rows"])
def test_the_first_kernel_begins_when_all_before_has_ended(name, monkeypatch):
    """What was queued before may write inputs that it loads early."""
    program, arrays = PROGRAMS[name]
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    artifact = BACKEND.emit(levels["tile"], {"arch": "sm_90a"})
    device = FakeGpu(lambda name: 1e-6)
    monkeypatch.setattr(driver_api, "load_driver_library", lambda: device)
    found = [each.kernel.launch_attribute for each in GpuProgram(artifact, device).launches]
    assert found == [0, *[PROGRAMMATIC] * (len(found) - 1)] and len(found) > 1


def make_plan(*params, **changes):
    """A plan of two inputs and an output whose kernel k is launched with each of these parameters and the output."""
    launches = [{"kernel": "k", "args": [{"param": i} if i >= 0 else {"offset": 0}, {"param": 2}]} for i in params]
    roles = [{"role": role} for role in ("input", "input", "output")]
    return {"params": roles, "written": [2], "launches": launches, **changes}


@pytest.mark.parametrize(
    ("plan", "constants"),
    [
        (make_plan(0, 1), (0,)), (make_plan(0, 1, written=[1, 2]), ()), (make_plan(0, 1, reused=[[2, 1]]), ()),
        (make_plan(0, 2), ()), (make_plan(0, -1), ()), (make_plan(), ()), (make_plan(0, steps=[]), ()),
        (make_plan(0, calls=[]), ()),
    ],
)  # fmt: skip
def test_constants_are_inputs_that_nothing_writes(plan, constants):
    kernel = Kernel(*[np.zeros(4, np.float32)] * 2).module().functions[1]
    assert emission._list_constants(plan, kernel) == constants
