"""Error coverage: a committed program reaches every error that the CSL compiler and the simulator raise."""

import ast
from pathlib import Path

from csl_harness import ERRORS, cases, outcome

import tessera.interp.target.csl as package

ROOT = Path(package.__file__).parent
RAISED = {"fail", "type_mismatch", "CslError", "CslFault", "ParseError"}
UNCOUNTED = {"diagnostics.py"}  # raises no error of a program; the modules in host/ have tests of their own


def find_raises():
    """The calls that raise an error: file and first line, with the last line."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent == ROOT / "host" or path.name in UNCOUNTED:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in RAISED:
                found[str(path), node.lineno] = node.end_lineno
    return found


def traceback_lines(error):
    """The lines in the traceback of an error and of its causes."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def test_a_program_reaches_every_error():
    wanted = find_raises()
    reached = {line for case in cases(*ERRORS) for line in traceback_lines(outcome(*case)[0])}
    missing = [
        f"{Path(file).relative_to(ROOT)}:{first}"
        for (file, first), last in wanted.items()
        if not any((file, number) in reached for number in range(first, last + 1))
    ]
    assert len(wanted) > 200 and missing == []
