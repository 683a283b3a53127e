"""Programmatic dependent launch: each thread of a kernel waits for the kernel before it, ahead of its first access."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.codegen.ptx.runtime.gpu_program import DEPENDENT_WAIT
from tessera.core.types import bf16
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
}


def split_entries(text):
    """The lines of each entry's body, without labels of its first block."""
    for part in text.split(".visible .entry ")[1:]:
        name, body = part.split("(", 1)[0], part.split("{", 1)[1]
        yield name, [line.strip() for line in body.splitlines() if line.startswith("\t") and line.strip()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_thread_waits_ahead_of_its_first_access(name):
    program, arrays = PROGRAMS[name]
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    text = BACKEND.emit(levels["tile"], {"arch": "sm_90a"}).text(TEXT_FILE)
    entries = dict(split_entries(text))
    assert entries
    for entry, lines in entries.items():
        assert lines.count(f"{DEPENDENT_WAIT};") == 1, entry
        before = lines[: lines.index(f"{DEPENDENT_WAIT};")]
        assert not any(re.match(r"(@\S+ )?(bra|ret|exit|call)", line) for line in before), entry
        assert not [line for line in before if ACCESS.match(line) and not SHARED.search(line)], entry
        later = lines[len(before) :]
        assert all("griddepcontrol" not in line for line in later[1:])


def test_architectures_without_it_do_not_wait():
    program, arrays = PROGRAMS["softmax"]
    levels = driver.lower(ts.jit(program).trace(*arrays).function, "ptx")
    assert "griddepcontrol" not in BACKEND.emit(levels["tile"], {"arch": "sm_80"}).text(TEXT_FILE)
