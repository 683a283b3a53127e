"""The page on ONNX: its examples run and print what it says."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def test_examples():
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, "onnx", str(PAGE), 0)
    report = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(examples, out=report.append)
    assert len(examples.examples) > 10 and runner.failures == 0, "".join(report)
