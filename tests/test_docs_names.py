"""What the pages name is there: files and folders of the project, names of the package, commands and their options."""

import re
from pathlib import Path

import pytest

import tessera as ts
from tessera.ir.rules import REGISTRY
from tessera.tools.cli.main import COMMANDS, parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/plugin/README.md"))]
PAGES += sorted((ROOT / "conformance").glob("*.md"))
TOP = "tessera|tests|docs|examples|conformance|benchmarks|ops|interp|lower|codegen|stdlib"


def pages(function):
    return pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))(function)


@pages
def test_files_exist(page):
    named = set(re.findall(rf"`((?:{TOP})/[\w./*-]+)`", page.read_text()))
    named = {n for n in named if not re.fullmatch(r"ops/\d+/\d+", n)}  # mutants of the component "ops"
    assert not [n for n in named if not (list(ROOT.glob(n)) or list((ROOT / "tessera").glob(n)))]


@pages
def test_names_exist(page):
    own = re.sub(r"```console.*?```", "", page.read_text(), flags=re.DOTALL)  # what commands print is tested elsewhere
    for path in set(re.findall(r"\bts\.([A-Za-z_][\w.]*\w)", own)):
        value = ts
        for part in () if f"ts.{path}" in REGISTRY else path.split("."):
            value = getattr(value, part)


@pages
def test_commands_have_these_options(page):
    """In code, so that prose which only begins with the name is no command."""
    commands = parser()._subparsers._group_actions[0].choices
    for command, rest in set(re.findall(r"(?:`| {4})tessera ([a-z]+)([^`\n]*)", page.read_text())):
        assert command in COMMANDS, command
        known = {o for action in commands[command]._actions for o in action.option_strings}
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", rest.partition("#")[0])) <= known, rest
