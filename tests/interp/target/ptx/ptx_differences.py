"""Differences between a launch in the emulator and on a GPU, and which of them are documented exceptions."""

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BFLOAT = np.dtype(ml_dtypes.bfloat16)
SHOWN = 4  # elements a launch
FLOATS = {"<f2": 2.0**-10, "<f4": 2.0**-23, "<f8": 2.0**-51, "bfloat16": 2.0**-7}
# The largest relative and absolute errors that the ISA documents for approximations of floats.
BOUNDS = {
    r"\b(?:rcp|div|sqrt|rsqrt|ex2)\.(?:approx|full)": (2.0**-22, 0.0),
    r"\blg2\.approx": (2.0**-22, 2.0**-22),
    r"\b(?:sin|cos)\.approx": (0.0, 2.0**-20.5),
    r"\btanh\.approx": (2.0**-11, 0.0),
}


@dataclass(frozen=True)
class Element:
    """One element that differs: its place among the arrays, the two values, and the inputs at the same place."""

    array: int
    index: int
    kind: str
    ours: np.generic
    gpu: np.generic
    inputs: tuple
    scale: float  # the largest finite number of the array

    @property
    def floats(self):
        """Both values as doubles, or None where they are no numbers."""
        return (float(self.ours), float(self.gpu)) if self.kind in FLOATS else None

    @property
    def step(self):
        """The distance of neighbours, relative to a number."""
        return FLOATS[self.kind]

    def __str__(self):
        given = ", ".join(written(v) for v in self.inputs)
        return f"array {self.array}[{self.index}]: ours {written(self.ours)}, GPU {written(self.gpu)}; from {given}"


def written(value):
    """A number with its bits."""
    bits = int(value.view(f"u{value.itemsize}"))
    return f"{value} (0x{bits:0{2 * value.itemsize}x})"


def differing(case, got):
    """Every element that differs."""
    count = len(case["types"])
    before, after, seen = (
        [_array(case, flat, k) for k in range(count)] for flat in (case["before"], case["after"], got)
    )
    found = []
    for k in range(count):
        raw, whole = f"u{after[k].itemsize}", after[k].astype("f8")
        scale = float(np.abs(whole[np.isfinite(whole)]).max(initial=0))
        for i in np.flatnonzero(after[k].view(raw) != seen[k].view(raw)).tolist():
            inputs = tuple(b[i] for j, b in enumerate(before) if len(b) == len(after[k]) and (j != k or b.any()))
            found.append(Element(k, i, case["types"][k][2], after[k][i], seen[k][i], inputs, scale))
    return found


def _array(case, flat, k):
    offset, size, kind = case["types"][k]
    return flat[offset : offset + size].view(kind)


def body(case):
    """The text of the entry, up to the next one."""
    found = re.search(rf"\.entry\s+{re.escape(case['entry'])}\b.*?(?=\.entry|\Z)", case["text"], re.S)
    return found.group()


def _approximate(e, text):
    """Within the documented error of the loosest approximation that the entry has, and one rounding."""
    if e.floats is None:
        return False
    ours, gpu = e.floats
    bounds = [BOUNDS[op] for op in BOUNDS if re.search(op, text)]
    relative, absolute = (max(b[k] for b in bounds) for k in (0, 1))
    step = e.step
    if e.ours.itemsize == 8 and not any(int(v.view("u8")) & 0xFFFFFFFF for v in (e.ours, e.gpu)):
        step = 2.0**-19  # the coarse approximations of doubles: of 20 bits
    return abs(ours - gpu) <= absolute + (relative + step) * max(abs(ours), abs(gpu))


def _sums(e, text):
    """Tensor cores add products in an order and a width of their own; what they gave may be rounded on the way."""
    return (
        e.floats is not None
        and abs(e.floats[0] - e.floats[1])
        <= max(2.0**-10, e.step) * max(map(abs, e.floats)) + max(2.0**-13, e.step / 8) * e.scale
    )


def _fused(e, text):
    """One rounding fewer: ptxas may fuse a product without a rounding mode with a sum."""
    digits = {2: 10, 4: 23, 8: 52}[e.ours.itemsize]
    reach = max([abs(float(v)) ** 2 for v in e.inputs if v.dtype.kind == "f"] + [*map(abs, e.floats or ()), 0])
    return e.floats is not None and abs(e.floats[0] - e.floats[1]) <= 2.0**-digits * reach


EXCEPTIONS = [
    ("order of atomics", r"\b(?:atom|red)\.", lambda e, text: True),
    ("approximate instructions", "|".join(BOUNDS), _approximate),
    ("sums of tensor cores", r"\bw?g?mma\b", _sums),
    ("layout of tensor maps", r"\btensormap\.replace", lambda e, text: e.kind == "|u1"),
    ("fused product and sum", r"\bmul\.(?:f16|bf16|f32|f64|ftz)", _fused),
]


def reasons(case, elements):
    """The exceptions that excuse the elements; empty where one of them is not excused."""
    text, found = body(case), set()
    for e in elements:
        why = next((name for name, has, holds in EXCEPTIONS if re.search(has, text) and holds(e, text)), None)
        if why is None:
            return []
        found.add(why)
    return sorted(found)


def report(case, elements, why):
    """A launch that differs, with the first few elements."""
    kind = f"excused ({', '.join(why)})" if why else "DIFFERS"
    lines = [f"{kind} {case['test']} {case['entry']}: {len(elements)} elements"]
    chosen = list({e.gpu.tobytes(): e for e in elements[::-1]}.values())[::-1] if not why else elements
    return "\n  ".join([*lines, *map(str, chosen[: SHOWN if why else 2 * SHOWN])])
