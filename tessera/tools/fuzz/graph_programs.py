"""Random Graph programs: DAGs of ops over inputs of several element types, sizes and policies.

Each statement is an expression over the values before it. It is executed at once on sample data, which gives the shape
and type of its value; a statement that the op refuses is left out and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from conformance.inputs import KINDS
from tessera.core.errors import TesseraError
from tessera.core.types import as_dtype
from tessera.ir.tensor import Tensor
from tessera.tools.fuzz import (
    graph_statements,
    index_statements,
    launch_statements,
    layer_statements,
    transform_statements,
)
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.launch_statements import KERNELS, list_kernel_sources
from tessera.tools.fuzz.programs import TESSERA, Input, RandomProgram, execute_source
from tessera.tools.fuzz.value_pool import LIMIT, RULES, ValuePool, is_float

# The modules whose statements are drawn: importing one adds its rules to the table.
STATEMENTS: tuple[ModuleType, ...] = (
    graph_statements, index_statements, layer_statements, transform_statements, launch_statements,
)  # fmt: skip
SIZES = (1, 2, 3, 4, 5, 7, 8, 0, 16, 17, 33, 64, 65, 130)
DTYPES = (
    "f32", "f32", "f32", "f32", "f64", "f64", "f16", "bf16", "int32", "int64", "int8", "uint8", "bool", "fp8_e4m3",
    "fp8_e5m2", "int16", "uint16", "uint32", "uint64", "fp6", "fp6_e2m3", "fp4", "int4",
)  # fmt: skip
STEPS = 6


def make_program(choices: Choices, refused: Counter[str] | None = None) -> RandomProgram:
    """A random program; `refused` counts the statements that were left out, by op and error."""
    inputs = tuple(_make_input(choices, i) for i in choices.repeat(3, one_in=2))
    pool = ValuePool(choices)
    with np.errstate(all="ignore"):
        pool.samples.update({i.name: Tensor(i.make(), as_dtype(i.dtype)) for i in inputs})
        lines = _make_statements(choices, pool, refused)
    leaves = [n for n in pool.samples if n not in pool.used and n.startswith("v")] or [list(pool.samples)[-1]]
    text = "".join(f"    {line}\n" for line in lines)
    returned = ", ".join(leaves[-4:])
    head = f"{list_kernel_sources(text)}def program({', '.join(i.name for i in inputs)}):\n"
    return RandomProgram(f"{head}{text}    return {returned}\n", inputs)


@cache
def _load_kernels() -> dict[str, Any]:
    """The kernels that statements may launch, for their sample data."""
    scope = execute_source(list_kernel_sources("".join(f"({name}, " for name in KERNELS)), "<kernels>")
    return {name: scope[name] for name in KERNELS}


def _make_input(choices: Choices, number: int) -> Input:
    with choices.span():
        rank = (2, 1, 3, 0, 2, 2)[choices.draw(6)]
        shape = tuple(choices.pick(SIZES) for _ in range(rank))
        while np.prod(shape) > 4500:
            shape = tuple(s // 2 for s in shape)
        return Input(f"x{number}", shape, choices.pick(DTYPES), choices.pick(KINDS), choices.draw(8))


def _make_statements(choices: Choices, pool: ValuePool, refused: Counter[str] | None) -> Sequence[str]:
    lines: list[str] = []
    for _ in choices.repeat(STEPS):
        before = set(pool.samples)
        text = choices.pick(RULES)(choices, pool)
        if not text:
            continue
        try:
            sample = eval(text, {"ts": TESSERA, **_load_kernels(), **pool.samples})
        except TesseraError as error:
            if refused is not None:
                refused[f"{text.split('(')[0]}: {type(error).__name__}"] += 1
            continue
        except Exception:  # an op that fails without a typed error: the program, which ends here, shows it
            return [*lines, f"v{len(lines)} = {text}"]
        if not isinstance(sample, Tensor) or sample.numpy().size > LIMIT:
            continue
        if _is_lost(sample) and not choices.chance(4):
            continue
        name = f"v{len(lines)}"
        lines.append(f"{name} = {text}")
        pool.samples[name] = sample
        pool.used |= {n for n in before if _mentions(text, n)}
    return lines


def _mentions(text: str, name: str) -> bool:
    """Whether a name is in an expression, and is no attribute."""
    return re.search(rf"(?<![\w.]){name}(?!\w)", text) is not None


def _is_lost(sample: Any) -> bool:
    """Whether most of a value is NaN or infinite, so that later results say little."""
    if not is_float(sample) or not sample.size:
        return False
    return bool(np.isfinite(sample.numpy().astype(np.float64)).mean() < 0.5)
