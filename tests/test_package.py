"""The package: extras that the README names, files that the wheel has, archives without dates."""

import configparser
import io
import re
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import build_package  # noqa: E402

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_the_readme_says_what_each_extra_is_for():
    table = (ROOT / "README.md").read_text().split("## Extras")[1].split("## ")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert named == set(SETUP["options.extras_require"])


def test_type_checkers_find_the_annotations():
    assert (ROOT / "tessera" / "py.typed").is_file() and "py.typed" in SETUP["options.package_data"]["tessera"]


def make_archive(path, names, date):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uid, member.uname, member.size = date, date, f"user{date}", 1
            archive.addfile(member, io.BytesIO(b"x"))
    return path


def test_archives_have_no_dates_owners_and_order(tmp_path):
    one, other = (make_archive(tmp_path / f"{n}.tar.gz", names, n) for n, names in ((1, "ab"), (2, "ba")))
    assert one.read_bytes() != other.read_bytes()
    for path in (one, other):
        build_package.normalise_sdist(path)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as archive:
        assert [(m.name, m.mtime, m.uid, m.uname) for m in archive] == [(n, build_package.EPOCH, 0, "") for n in "ab"]


def test_the_package_is_built_of_what_git_tracks(tmp_path, monkeypatch):
    listed = b"README.md\0scripts/build_package.py\0gone.py\0"
    monkeypatch.setattr(build_package.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": listed}))
    source = build_package.copy_source(tmp_path)
    files = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
    assert files == ["README.md", "scripts/build_package.py"]
    assert {int((source / f).stat().st_mtime) for f in files} == {build_package.EPOCH}
