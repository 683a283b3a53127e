"""The blocks of docs/autodiff.md are one program, which runs."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "docs" / "autodiff.md").read_text()


def test_the_page_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 9
    exec(compile("\n".join(blocks), "docs/autodiff.md", "exec"), {"__name__": "page", "scratch": tmp_path})
