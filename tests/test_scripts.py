"""The scripts of the project: the picture of the architecture, the word check, the glossary, the quick tests."""

import ast
import random
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import check_words  # noqa: E402
import count_files  # noqa: E402
import draw_architecture  # noqa: E402
import fuzz_parsers  # noqa: E402
import mutate  # noqa: E402
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
    """Not many more than the page says: a new file on the way of every program needs a reason."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    stated = re.findall(r"(\d+) for (llvm|ptx)", page)
    assert {target for _, target in stated} == set(count_files.TARGETS)
    for number, target in stated:
        files = count_files.list_files(target, count_files.TARGETS[target])
        assert "lower/pipeline.py" in files and len(files) <= int(number) + 3


def test_no_document_has_a_refused_phrase():
    found = {
        f.name: list(check_words.find_phrases(f.read_text())) for f in check_words.list_files() if f.suffix == ".md"
    }
    assert not {name: phrases for name, phrases in found.items() if phrases}


def test_a_refused_phrase_is_found_with_its_line():
    assert list(check_words.find_phrases("one\nThe tile is asleep.")) == [(2, "asleep", "blocked, suspended")]


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
    "a < b": "a <= b", "a in b": "a not in b", "a + b": "a - b", "a and b": "a or b", "f(3)": "f(4)",
    "min(a, b)": "max(a, b)", "np.minimum(a, b)": "np.maximum(a, b)", "x.any()": "x.all()",
    "if a: pass": "if not a:\n    pass", "f()": "None",
}  # fmt: skip


@pytest.mark.parametrize("before", MUTATIONS)
def test_a_mutation_changes_one_operator(before):
    found = []
    for number in range(len(list(mutate.list_mutations(ast.parse(before))))):
        tree = ast.parse(before)
        mutate.apply_mutation(*list(mutate.list_mutations(tree))[number])
        found.append(ast.unparse(tree))
    assert MUTATIONS[before] in found and before not in found


def test_the_score_counts_what_was_found():
    said = mutate.describe_score(["suite: a case on llvm", "tests: no end", "", "fuzzing: wrong values"])
    assert said.startswith("3 of 4 found") and "'survived': 1" in said


def test_planted_bugs_still_fit_their_files():
    planted = mutate.list_planted()
    assert len(planted) >= 25 and {m.kind.partition(":")[0] for m in planted} == {"bounds", "values", "synchronisation"}
    for mutant in planted:
        assert ast.parse(mutant.source) and mutant.source != (ROOT / mutant.file).read_text()


@pytest.mark.parametrize("component", mutate.COMPONENTS)
def test_components_name_files_areas_engines_and_tests(component):
    found = mutate.COMPONENTS[component]
    assert all(list(ROOT.glob(pattern)) for pattern in found.files)
    assert all((ROOT / "conformance" / "/".join(area.split("/")[:2])).is_dir() for area in found.areas)
    assert all((ROOT / t).exists() for t in found.tests) and mutate.order_tests(component, found.files[0])
    assert mutate.draw_mutant(component, random.Random(0)).source


def test_a_mutant_is_found_by_a_test_that_fails(tmp_path):
    place = mutate.Workplace(tmp_path, 5.0)
    file = "tessera/ir/analysis.py"
    (tmp_path / file).write_text("")  # as a mutant that cannot be imported
    assert place.run_checks("simplify", file).startswith("suite")


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
    with pytest.raises(KeyboardInterrupt):
        fuzz_parsers.run("x", [b"abc"], _interrupt, 5.0, 0)


def _interrupt(_):
    raise KeyboardInterrupt


def test_a_full_disk_gives_a_typed_error_and_leaves_the_artifact_whole(tmp_path):
    found = soak.soak_full_disk(1)
    assert found == {"builds": 1, "bad": [], "ok": True}
    assert not soak.is_refused(1, "Traceback (most recent call last):\nOSError: File too large")
    assert not soak.is_refused(-25, "") and not soak.run_artifact(tmp_path / "none")
