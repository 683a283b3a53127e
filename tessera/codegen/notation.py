"""A notation for scalar functions, one operation a line, that each generator translates to its own text.

    t = fma x 1.5 y        floats: fadd fsub fmul fdiv frem fma fabs floor trunc sqrt copysign
    p = poly x 3.0 2.0 1.0 a polynomial, highest power first
    c = lt x 1.0           comparisons: lt gt le ge eq ne uno (floats), ieq ilt igt (integers)
    i = bits x             integers of the same width: bits real toreal add sub and or xor shl ashr lshr
    s = select c x y       (iselect for integers; band bor bxor for conditions)
    e = exp x              any other word calls the function of that name
    d = wide x             f32 to f64; `narrow` back

A function of this notation takes x (and y) and gives r.
"""

from __future__ import annotations


def parse(text: str) -> tuple[str, str, list[str]]:
    """The result, the word and the operands of a line."""
    name, _, rest = text.partition("=")
    word, *operands = rest.split()
    return name.strip(), word, operands
