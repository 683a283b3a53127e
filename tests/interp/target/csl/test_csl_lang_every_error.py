"""Every place where the checker and the machine refuse a program is reached by a program that is committed here."""

import ast
from pathlib import Path

from csl_lang import ERRORS, cases, outcome

import tessera.interp.target.csl as package

ROOT = Path(package.__file__).parent
RAISED = {"fail", "type_mismatch", "CslError", "CslFault", "ParseError"}
# What concerns files, options and pictures, and not a program: its tests are those of the host's side.
ELSEWHERE = {"faults.py", "pictures.py"}


def places():
    """The calls that refuse something: file and line, with the line of their end."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent == ROOT / "host" or path.name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in RAISED:
                found[str(path), node.lineno] = node.end_lineno
    return found


def lines(error):
    """The lines of the package through which an error came, with those of what caused it."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def test_every_error_has_its_program():
    wanted = places()
    reached = {line for case in cases(*ERRORS) for line in lines(outcome(*case)[0])}
    missing = [
        f"{Path(file).relative_to(ROOT)}:{first}"
        for (file, first), last in wanted.items()
        if not any((file, number) in reached for number in range(first, last + 1))
    ]
    assert len(wanted) > 200 and missing == []
