"""The page on PyTorch: each of its examples runs and prints what the page says."""

import doctest
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"


@pytest.mark.filterwarnings("ignore")
def test_examples():
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, "pytorch", str(PAGE), 0)
    assert len(examples.examples) > 20
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    report = []
    runner.run(examples, out=report.append)
    assert runner.failures == 0, "".join(report)
