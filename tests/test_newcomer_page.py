"""docs/newcomer.md: every command of the five walks runs as it stands and prints what the page shows."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "newcomer.md").read_text()
WALKS = {section.partition("\n")[0]: section for section in re.split(r"(?m)^## ", PAGE)[1:]}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def list_commands(walk):
    """The commands of a walk, each with what the page shows after it."""
    shown = "".join(re.findall(r"```console\n(.*?)```", walk, re.DOTALL))
    return [block.partition("\n")[::2] for block in re.split(r"(?m)^\$ ", shown)[1:]]


def run_commands(commands, folder):
    """The status and the output of each command, all in one shell."""
    script = "".join(f"echo '@@'; {{ {c}\n}} 2>&1; echo \"@= $?\"\n" for c in commands)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "tessera").write_text(f'#!/bin/sh\nexec {sys.executable} -m tessera.tools.cli "$@"\n')
    (programs / "tessera").chmod(0o755)
    path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {
        "PATH": os.pathsep.join(path),
        "TESSERA": str(ROOT),
        "COLUMNS": "100",
        "TESSERA_CACHE": str(folder / "tuned"),
    }
    here = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TESSERA_TRACEBACK"} | own | {"PYTHONPATH": here}
    work = folder / "work"
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return re.findall(r"@@\n(.*?)@= (\d+)\n", done.stdout, re.DOTALL)


@pytest.mark.parametrize("title", WALKS)
def test_walk(title, tmp_path):
    walk = WALKS[title]
    (tmp_path / "work").mkdir()
    for name, source in re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)```", walk, re.DOTALL | re.MULTILINE):
        (tmp_path / "work" / name).write_text(source)
    commands = list_commands(walk)
    found = run_commands([c for c, _ in commands], tmp_path)
    assert len(found) == len(commands)
    check = doctest.OutputChecker().check_output
    for (command, shown), (output, status) in zip(commands, found, strict=True):
        assert check(shown, output, FLAGS), f"$ {command}\n{output}\ninstead of\n{shown}"
        fails = re.search(r"Error: |FAIL|goes wrong", shown) is not None
        assert (status != "0") == fails, f"$ {command}: exit status {status}"


def test_five_users_and_at_most_ten_commands_for_the_first():
    assert len(WALKS) == 5
    author = next(walk for title, walk in WALKS.items() if "kernel author" in title.lower())
    commands = [c for c, _ in list_commands(author)]
    assert len(commands) <= 10
    assert all(
        any(word in c for c in commands) for word in ("--debug", "tessera debug", "--target llvm", "build", "run out")
    )
