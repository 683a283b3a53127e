"""What pytest collects: no folder of tests is left out."""

from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent


def test_every_folder_is_collected(pytestconfig):
    """pytest leaves out folders by name, at first those called `dist` or `build`."""
    folders = {file.parent for file in ROOT.rglob("test_*.py")}
    left_out = pytestconfig.getini("norecursedirs")
    parts = {(folder, name) for folder in folders for name in folder.relative_to(ROOT).parts}
    assert not [folder for folder, name in parts if any(fnmatch(name, pattern) for pattern in left_out)]
    assert ROOT / "dist" in folders
