"""The scripts of the project: the picture of the architecture, the word check, the glossary, the quick tests."""

import ast
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import check_words  # noqa: E402
import count_files  # noqa: E402
import draw_architecture  # noqa: E402
import fuzz_parsers  # noqa: E402
import mutate  # noqa: E402
import mutation_checks  # noqa: E402
import mutation_coverage  # noqa: E402
import mutation_operators  # noqa: E402
import record_durations  # noqa: E402
import run_csl_programs  # noqa: E402
import soak  # noqa: E402

MODULES = draw_architecture.list_modules()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def test_the_picture_shows_the_packages():
    """Weights change with every import, boxes and rows do not: `make picture` draws the picture anew."""
    committed, drawn = (ROOT / "docs" / "architecture.svg").read_text(), draw_architecture.draw()
    for pattern in (r'data-package="([\w.]+)"', r'class="layer"[^>]*>(\w+)<'):
        assert re.findall(pattern, committed) == re.findall(pattern, drawn)


def test_a_build_passes_through_few_files():
    """As many as the page says, and at most 60: a new file on the way of every program needs a reason."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    stated = re.findall(r"(\d+) for (llvm|ptx)", page)
    assert {target for _, target in stated} == set(count_files.TARGETS)
    for number, target in stated:
        files = count_files.list_files(target, count_files.TARGETS[target])
        assert "lower/pipeline.py" in files and len(files) <= min(int(number) + 2, 60)


def test_no_document_has_a_refused_phrase():
    found = {
        f.name: list(check_words.find_phrases(f.read_text())) for f in check_words.list_files() if f.suffix == ".md"
    }
    assert not {name: phrases for name, phrases in found.items() if phrases}


def test_a_refused_phrase_is_found_with_its_line():
    assert list(check_words.find_phrases("one\nThe tile is asleep.")) == [(2, "asleep", "blocked, suspended")]


def test_each_refused_phrase_begins_with_a_word():
    """The check looks at the lines of a text only if a phrase begins at one of its words."""
    assert all(pattern.startswith(r"\b") for pattern in check_words.PHRASES)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tessera\.[\w.]+)`", GLOSSARY))))
def test_each_module_of_the_glossary_exists(name):
    assert name in MODULES


def test_the_glossary_is_sorted_and_long():
    terms = re.findall(r"^\| ([^|`]+?) \|", GLOSSARY, re.MULTILINE)[1:]
    terms = [t for t in terms if not set(t) <= {"-"}]
    assert len(terms) >= 60 and terms == sorted(terms, key=str.casefold)


def test_the_new_paths_in_the_changelog_exist():
    table = (ROOT / "CHANGELOG.md").read_text().partition("| before | now |")[2].partition("\n\n")[0]
    names = [n for row in table.splitlines() for n in re.findall(r"`(tessera\.[\w.]+)`", row.rpartition(" | ")[2])]
    assert len(names) > 20 and not set(names) - set(MODULES)


def test_the_walk_names_functions_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    hops = re.findall(r"^\| \d+ \| `(\w+)` \| `(tessera/\S+\.py)` \|", page, re.MULTILINE)
    assert 8 <= len(hops) <= 12
    assert not [hop for hop in hops if not re.search(rf"def {hop[0]}\(", (ROOT / hop[1]).read_text())]


def test_the_site_has_every_page():
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert not {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")} - named


MUTATIONS = {
    "a < b": ["a <= b"], "a in b": ["a not in b"], "a + b": ["a - b"], "a - b": ["a + b", "b - a"],
    "a and b": ["a or b"], "f(3)": ["None", "f(4)", "f(2)"], "True": ["False"], "min(a, b)": ["None", "max(a, b)"],
    "x.any()": ["None", "x.all()"], "y = a if b else c": ["y = a if not b else c"], "f()": ["None"],
    "a[b] = c": ["_ = None"],
    "if a: return": ["if not a:\n    return", "if a:\n    pass"], "[a for a in b if c]": ["[a for a in b if not c]"],
    "def f(a: g[3]) -> g[3]: raise Error(3)": [], "y = 1000": [], "y = zip(a, b, strict=True)": [],
}  # fmt: skip


@pytest.mark.parametrize("before", MUTATIONS)
def test_a_mutation_changes_one_operator(before):
    found = []
    for number in range(len(list(mutation_operators.list_mutations(ast.parse(before))))):
        tree = ast.parse(before)
        mutation_operators.apply_mutation(*list(mutation_operators.list_mutations(tree))[number])
        found.append(ast.unparse(tree))
    assert sorted(found) == sorted(MUTATIONS[before])


def test_blocks_are_numbered_and_mark_themselves():
    text = "def f(x):\n  'doc'\n  if x:\n    return [1]\n  g = lambda y: y\n  return g(2)\nz = f"
    tree = ast.parse(text)
    places = [(4, 12), (5, 16), (6, 9), (7, 4)]
    assert [mutation_coverage.find_block(tree, p) for p in places] == [1, 2, 0, None]
    marks, scope = bytearray(8), {}
    exec(compile(mutation_coverage.mark_blocks(tree, 4), "x", "exec"), scope | {mutation_coverage.MARKS: marks}, scope)
    scope["f"].__globals__[mutation_coverage.MARKS] = marks
    assert scope["f"].__doc__ == "doc" and scope["f"](0) == 2 and list(marks) == [0, 0, 0, 0, 1, 0, 1, 0]
    assert scope["f"](1) == [1] and marks[5] == 1


def test_the_score_of_the_page_is_that_of_the_report():
    rows = json.loads(mutate.RESULTS.read_text())
    page = (ROOT / "docs" / "mutation.md").read_text()
    assert rows and len({r["name"] for r in rows}) == len(rows)
    tables = [*mutate.describe_seeds(rows), *mutate.describe_score(rows)]
    assert [line for line in tables if line not in page] == []


def test_mutants_of_new_lines_alone(monkeypatch):
    file = "tessera/ir/rewrite.py"
    lines = [i for i, line in enumerate((ROOT / file).read_text().splitlines(), 1) if " is not " in line]
    monkeypatch.setattr(mutate, "list_changed_lines", lambda commit: {file: set(lines)})
    drawn = list(mutate.list_drawn(["simplify", "csl"], range(2), 0, [], since="HEAD"))
    assert [name for name, _ in drawn] == ["simplify/0/0", "simplify/0/1"]
    assert all(m.file == file and m.line in lines for _, m in drawn)
    monkeypatch.setattr(mutate, "list_changed_lines", lambda commit: {file: {1}})  # a docstring
    monkeypatch.setattr(mutate, "MOST_DRAWS", 20)
    assert list(mutate.list_drawn(["simplify"], range(2), 0, [], since="HEAD")) == []


def test_new_lines_are_those_of_the_difference(monkeypatch):
    said = "+++ b/tessera/a.py\n@@ -1 +2,3 @@ def f():\n@@ -9,2 +10 @@\n+++ /dev/null\n@@ -1,4 +0,0 @@\n"
    found = {"args": None}

    def run(command, **named):
        found["args"] = command
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(mutate.subprocess, "run", run)
    assert mutate.list_changed_lines("abc")["tessera/a.py"] == {2, 3, 4, 10} and "abc" in found["args"]
    monkeypatch.undo()
    with pytest.raises(SystemExit, match="no-such-commit"):
        mutate.list_changed_lines("no-such-commit")


def test_planted_bugs_still_fit_their_files():
    planted = [m for _, m in mutate.list_planted()]
    assert len(planted) >= 25 and {m.change.partition(":")[0] for m in planted} == {
        "bounds",
        "values",
        "synchronisation",
    }
    for mutant in planted:
        assert ast.dump(mutant.tree) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))


@pytest.mark.parametrize("component", mutate.COMPONENTS)
def test_components_name_files_and_engines(component):
    found, files = mutate.COMPONENTS[component], mutate.list_component_files(component)
    assert all(list(ROOT.glob(pattern)) for pattern in found.files) and set(found.groups) <= set(mutation_checks.GROUPS)
    first, again = (mutation_operators.draw_mutant(component, files, ROOT, random.Random(0)) for _ in range(2))
    assert ast.dump(first.tree) == ast.dump(again.tree) != ast.dump(ast.parse((ROOT / first.file).read_text()))


JUDGE = """
import ast, sys
sys.path.insert(0, sys.argv[1])
import mutate
test, path = "tests/ir/test_rewrite.py::test_use_def_of_inner_regions", mutate.ROOT / "tessera/ir/rewrite.py"
coverage = mutate.Coverage({}, 0, {}, {test: (0.1, b"")})
judge = mutate.Judge(coverage, 20.0, 0.0, sys.argv[2], mutate.LoadedFunctions(), {test})
text, wrong = path.read_text(), "blocks |= dict.fromkeys(region.nodes, region)"
assert wrong in text
tree = ast.parse(text.replace(wrong, "pass"))
mutant = mutate.Mutant("simplify", "tessera/ir/rewrite.py", 1, "planted", "", tree)
print(judge.find_failure(mutant, [test], mutate.run_tests, 20.0))
"""


def test_a_mutant_is_found_by_a_test_that_fails(tmp_path):
    """In a process of its own: the judge forks."""
    command = [sys.executable, "-c", JUDGE, str(ROOT / "scripts"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "tests/ir/test_rewrite.py::test_use_def_of_inner_regions: call: failed\n"


@pytest.mark.parametrize(("printed", "outcome"), [
    ("echo OK", "passes"), ("echo 'PE (0, 0): stall'; exit 1", "own fault"),
    ("echo 'x.csl:1:1: CslFault: internal error of the simulator: KeyError'; exit 1", "internal"),
])  # fmt: skip
def test_the_fault_of_a_program_hides_no_internal_error(printed, outcome, tmp_path):
    (tmp_path / "owner+name").mkdir()
    program = run_csl_programs.Program("owner/name", ".", printed, fault="its array is too short")
    found = run_csl_programs.run_program(program, tmp_path, 60.0)
    assert found.outcome == outcome
    (again,) = run_csl_programs.name_own_faults([vars(found)], {"programs": [{**vars(program), "size": ""}]})
    assert again.outcome == outcome


def test_the_fuzzing_of_readers_reports_all_but_typed_errors_and_can_be_interrupted():
    def read(data):
        if data:
            raise KeyError(data)

    found = fuzz_parsers.run("x", [b"abc"], read, 0.05, 0)
    assert list(found["failures"]) == [k for k in found["counts"] if k.startswith("KeyError at test_scripts.py")]
    assert fuzz_parsers.run("x", [b"abc"], read, 0.0, 0, inputs=7)["inputs"] == 7
    with pytest.raises(KeyboardInterrupt):
        fuzz_parsers.run("x", [b"abc"], _interrupt, 5.0, 0)


def _interrupt(_):
    raise KeyboardInterrupt


def test_a_full_disk_gives_a_typed_error_and_leaves_the_artifact_whole(tmp_path):
    found = soak.soak_full_disk(1)
    assert found == {"builds": 1, "refused": 1, "bad": [], "ok": True}
    assert soak.find_torn(tmp_path / "none", "a kill") == ["a kill: the artifact is gone"]
    (tmp_path / "torn").mkdir()
    assert soak.find_torn(tmp_path / "torn", "a kill")[0].startswith("a kill: ArtifactError")


def test_durations_of_files_that_ran_in_part_are_kept(tmp_path, monkeypatch):
    recorded = tmp_path / "durations.txt"
    files = [f"tests/test_{name}.py" for name in ("docs", "imports", "scripts")]
    recorded.write_text("".join(f"9.0 {file}\n" for file in (*files, "tests/gone.py")))
    monkeypatch.setattr(record_durations, "OUTPUT", recorded)
    monkeypatch.setattr(record_durations, "SECONDS", Counter(dict.fromkeys(files, 0.5)))
    monkeypatch.setattr(record_durations, "PARTLY", set())
    record_durations.pytest_configure(SimpleNamespace(args=["tests", f"{ROOT / files[0]}::test_one"]))
    record_durations.pytest_deselected([SimpleNamespace(path=ROOT / files[1])])
    record_durations.pytest_unconfigure()
    assert recorded.read_text() == f"9.0 {files[0]}\n9.0 {files[1]}\n0.5 {files[2]}\n"
