"""The user's pages on tensors and numerics: each example on them runs and prints what the page says."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "tensors", "devices", "numerics", "from-pytorch", "from-jax", "kernels-in-functions", "distribution", "pyflame",
    "modules", "training", "state", "generation", "serving", "deployment",
    "compiler-passes", "profiling", "research",
)  # fmt: skip
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


@pytest.mark.parametrize("page", PAGES)
def test_examples(page):
    text = (DOCS / f"{page}.md").read_text()
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, page, str(DOCS / f"{page}.md"), 0)
    assert len(examples.examples) > 10
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report = []
    runner.run(examples, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    """Each `ts.name` in the text is there."""
    import tessera as ts

    for path in set(re.findall(r"\bts\.([A-Za-z_][\w.]*\w)", (DOCS / f"{page}.md").read_text())):
        value = ts
        for part in path.split("."):
            value = getattr(value, part)


def test_the_program_of_the_csl_page(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "csl.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.py").write_text(program)
    exec(compile(program, str(tmp_path / "page.py"), "exec"), {"__name__": "page"})
    assert (tmp_path / "out" / "layout.csl").is_file()
