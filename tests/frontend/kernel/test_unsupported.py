"""Python that kernels do not have is refused at its line, with what to write instead; what is fine runs."""

import ast
import linecache
import math
import textwrap

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import TesseraError
from tessera.frontend.kernel.python_ast import expressions, statements, unsupported_syntax

REFUSED = {
    "try:|    pass|except Exception:|    pass": "mask the access",
    "try:|    pass|finally:|    pass": "mask the access",
    "with y:|    pass": "call the function directly",
    "class A:|    pass": "outside the kernel",
    "async def f():|    pass": "tile.cp_async",
    "yield 1": "store into an array",
    "y = yield from [1]": "store into an array",
    "import math": "top of the file",
    "from math import exp": "top of the file",
    "del x": "names end with the kernel",
    "global g": "as an argument",
    'raise ValueError("x")': "use assert",
    "y = {1, 2}": "use a tuple",
    "y = {v for v in range(3)}": "list comprehension",
    "y = {v: 1 for v in range(3)}": "outside the kernel",
    "y = max(*x)": "one by one",
    "y = max(**x)": "one by one",
    "y = [*x]": "one by one",
    "a, *b = (1, 2, 3)": "one by one",
    "if (y := 3) > 2:|    pass": "a line of its own",
    "match n:|    case 1:|        pass": "if and elif",
    "for i in tile.range(n):|    if x[i] > 0.0:|        break": "use `while`",
    "for i in tile.range(n):|    if x[i] > 0.0:|        continue": "an `if`",
    "for i in tile.range(3):|    pass|else:|    x[0] = 1.0": "test it after",
    "while x[0] > 0.0:|    x[0] = 0.0|else:|    pass": "after the loop",
    "for i in tile.range(3):|    return": "tile.static_range",
    "for v in x:|    pass": "tile.range(n)",
    "y = [v for v in x]": "tile.static_range(n)",
    "x.foo = 1": "A[i] = value",
    "x.foo += 1": "A[i] = value",
    "y = x[::2]": "tile.arange",
    "y = 1.0 in tile.load(x)": "tile.max(block == value)",
    'y = f"{x[0]:.2f}"': "leave what follows the `:`",
    'tile.assert_(x[0] > 0, f"{x[0]}")': 'tile.assert_(condition, "message", value)',
    "y = str(x[0])": 'print("x =", x)',
    "def g(*args):|    return 1|y = g(1)": "name each parameter",
    "@staticmethod|def g(a):|    return a": "decorate it outside",
    'y = open("f")': "as an argument",
    "y = input()": "as an argument",
    'y = eval("1")': "write the code out",
    'setattr(n, "a", 1)': "attributes directly",
    "y = np.random.rand(3)": "tile.random",
    "y = np.random.default_rng(0).random()": "tile.random",
    "y = time.time()": "around the launch",
    "s = [0.0]|for i in tile.range(n):|    s[0] = s[0] + x[i]": "tile.static_range",
    "s = []|for i in range(n):|    s.append(x[i])": "tile.static_range",
    "s = []|def g():|    for i in tile.range(n):|        s.append(i)|g()": "tile.static_range",
    "s = [[1], 2]|if x[0] > 0.0:|    s[0].pop()": "tile.alloc_register",
    "kept.append(x[0])": "pass a NumPy array",
    "kept[0][1] = x[0]": "pass a NumPy array",
    "y = x[::-1]": "tile.flip",
    's = {}|while x[0] > 0.0:|    s["a"] = 1|    x[0] = 0.0': "use variables",
}
FINE = {
    "y = 1.0 if x[0] in (1.0, 2.0) else 0.0|x[0] = y": 1.0,
    "y = 1.0 if x[0] not in (3.0, x[1]) else 0.0|x[0] = y": 0.0,
    "x[0] = 2.0 if 0.0 < x[0] < 2.0 else 3.0": 2.0,
    "g = lambda a, k=2.0: a * k|x[0] = g(x[0])": 2.0,
    "def g(a, *, k):|    return a + k|x[0] = g(1.0, k=2.0)": 3.0,
    "for i, v in enumerate([4.0, 5.0]):|    x[i] = v": 4.0,
    "for a, b in zip([1, 0], [3, 4]):|    x[a] = float(b)": 4.0,
    "x[0] = [v * 2 for v in range(3) if v][1]": 4.0,
    'x[0] = {"a": 6}["a"]': 6.0,
    "if x[0] > 0.0:|    return|x[0] = 9.0": 1.0,
    "y: float = 7.0|x[0] = y": 7.0,
    "x[0] = [(lambda a: a + 1.0), (lambda a: a * 3.0)][1](x[0])": 3.0,
    "s = [1.0]|for i in tile.static_range(4):|    s[0] = s[0] + x[i]|x[0] = s[0]": 5.0,
    "x[0] = np.power(x[0] + 1.0, 3) - np.absolute(-x[1])": 7.0,
    "x[0] = np.hypot(x[0] * 3.0, math.fabs(x[1] * -4.0))": 5.0,
    "x[0] = np.sum(x[0:4] + 1.0)": 8.0,
    "for i in tile.range(1):|    s = []|    s.append(2.0)|    x[0] = s[0]": 2.0,
}


def ran(lines):
    """The first element after a kernel of these lines, which lie in no file."""
    text = "def f(x, *, n=8):\n" + textwrap.indent(lines.replace("|", "\n"), "    ") + "\n"
    name = f"<construct {hash(text) & 0xFFFFFFFF:x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope = {"ts": ts, "tile": tile, "np": np, "math": math, "time": __import__("time"), "y": 1.0, "kept": [[1, 2]]}
    exec(compile(text, name, "exec"), scope)
    x = np.ones(8, "f4")
    ts.kernel(scope["f"])[1](x)
    return x[0], name


@pytest.mark.parametrize(("lines", "instead"), REFUSED.items())
def test_refused_with_what_to_write(lines, instead):
    with pytest.raises(TesseraError, match=r"^<construct \w+>:[2-5]:\d+: ") as caught:
        ran(lines)
    assert instead in str(caught.value).partition("suggestion:")[2]


@pytest.mark.parametrize(("lines", "want"), FINE.items())
def test_what_is_fine(lines, want):
    assert ran(lines)[0] == want


def kinds(base):
    return [k for k in vars(ast).values() if isinstance(k, type) and issubclass(k, base) and k is not base]


@pytest.mark.parametrize("kind", kinds(ast.stmt), ids=lambda k: k.__name__)
def test_every_statement_is_known_or_has_advice(kind):
    assert kind in statements.STATEMENT_RULES or unsupported_syntax._ALTERNATIVES[kind][1]


@pytest.mark.parametrize("kind", kinds(ast.expr), ids=lambda k: k.__name__)
def test_every_expression_is_known_or_has_advice(kind):
    old = ("Num", "Str", "Bytes", "NameConstant", "Ellipsis")  # what Constant was before
    assert kind in expressions.EXPRESSION_RULES or kind.__name__ in old or unsupported_syntax._ALTERNATIVES[kind][1]
