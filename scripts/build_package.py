"""Package: builds the sdist and the wheel, the same bytes each time, and tries the wheel in an empty environment.

    python scripts/build_package.py [--output build/package] [--check] [--tests] [--python python3.12 ...]

The files are those that git tracks. `--check` builds twice and compares, installs the wheel into an empty environment
of each `--python` (default: this one), and runs a program, a bundle and the command there. `--tests` also runs the
quick tests of the language, its levels and generators there, beside none of the package's source.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EPOCH = 315532800  # 1980-01-01, the first date of a zip file
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, f'build_{sys.argv[1]}')(sys.argv[2]))"

TESTED = tuple(f"tests/{name}" for name in (
    "core", "ir", "ops", "lower", "frontend", "transforms", "interp", "codegen", "runtime", "state", "nn", "optim",
))  # fmt: skip

SMOKE = """
import os, sys
import numpy as np
import tessera as ts
assert os.path.dirname(ts.__file__).startswith(sys.prefix), ts.__file__
assert os.path.exists(os.path.join(os.path.dirname(ts.__file__), "py.typed"))

@ts.kernel
def double(x, y):
    i = ts.tile.program_id(0)
    y[i] = x[i] * 2.0

x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
double[(4,)](x, y)
assert (y == 2 * x).all()

@ts.jit(target="llvm")
def f(x):
    return ts.softmax(x @ x.T, axis=-1)

assert abs(float(f(np.eye(3, dtype=np.float32)).numpy().sum()) - 3) < 1e-5
made = ts.bundle(ts.jit(lambda x: ts.exp(x)), x, batch_sizes=(1, 4), targets=("llvm", "ptx"))
for target in ("llvm", "ptx"):
    found = ts.load(ts.save(made, "model.bundle"), target=target)(x).numpy()
    assert abs(found - np.exp(x)).max() < 1e-4
small = ts.optimize(ts.nn.Linear(64, 8), target="edge", example=(np.ones((1, 64), np.float32),))
assert small.report.figures["weight_bytes"] == 576
print("tessera", ts.__version__, "on Python", sys.version.split()[0])
"""


def copy_source(folder: Path) -> Path:
    """A copy of the files that git tracks, with one date and one mode: what the package is built of."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = folder / "source"
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
            target.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
            os.utime(target, (EPOCH, EPOCH))
    return source


def build(output: Path) -> list[Path]:
    """Build the sdist and the wheel into a folder."""
    output.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONPATH", None)
    made = []
    with tempfile.TemporaryDirectory() as temporary:
        os.umask(0o022)
        source = copy_source(Path(temporary))
        for kind in ("sdist", "wheel"):
            command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(output.resolve())]
            done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"the {kind} was not built:\n{done.stderr[-3000:]}")
            made.append(output / done.stdout.split()[-1])
    normalise_sdist(made[0])
    return made


def normalise_sdist(path: Path) -> None:
    """Write an archive again with sorted members of one date and owner."""
    members = []
    with tarfile.open(path, "r:gz") as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            content = archive.extractfile(member)
            members.append((member, content.read() if content else None))
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = EPOCH, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            archive.addfile(member, io.BytesIO(content) if content is not None else None)
    with open(path, "wb") as handle, gzip.GzipFile("", "wb", 9, handle, EPOCH) as packed:
        packed.write(held.getvalue())


def hash_files(files: list[Path]) -> dict[str, str]:
    """The SHA-256 of each file."""
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def check_same(files: list[Path]) -> None:
    """Build once more, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = hash_files(files), hash_files(build(Path(folder)))
    if one != other:
        sys.exit(f"two builds differ: {sorted(set(one.items()) ^ set(other.items()))}")
    print("two builds give the same bytes")


def try_wheel(wheel: Path, python: str, tests: bool) -> None:
    """Install the wheel into an empty environment, and run a program, the command and maybe tests there."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment["TESSERA_CACHE"] = str(place / "cache")
        subprocess.run([python, "-m", "venv", str(place / "env")], check=True)
        own = place / "env" / ("Scripts" if os.name == "nt" else "bin")
        install = [str(own / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, str(wheel.resolve())], check=True, env=environment)
        (place / "smoke.py").write_text(SMOKE)
        run = [[str(own / "python"), "smoke.py"], [str(own / "tessera"), "inspect", "model.bundle"]]
        run += [[str(own / "tessera"), "run", "model.bundle"], [str(own / "tessera"), "completion", "bash"]]
        for command in run:
            done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            if command[-1] == "smoke.py":
                print(done.stdout.strip(), flush=True)
        if tests:
            subprocess.run([*install, f"{wheel.resolve()}[test]"], check=True, env=environment)
            run_tests(own / "python", place, environment)


def run_tests(python: Path, place: Path, environment: dict[str, str]) -> None:
    """Run the quick tests with the installed package: what the wheel lacks is nowhere."""
    source = copy_source(place)
    # Folders of tests named as a package stand for it where it is not installed.
    for name in ("tessera", "conformance", *(f"tests/{n}" for n in ("torch", "onnx", "triton"))):
        shutil.rmtree(source / name)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "quick", *TESTED]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    print(done.stdout.strip().splitlines()[-1], flush=True)
    if done.returncode:
        sys.exit(f"tests failed with the wheel:\n{done.stdout[-6000:]}{done.stderr[-2000:]}")


def main() -> None:
    """Build, and check if that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "package")
    parser.add_argument("--check", action="store_true", help="build twice, and try the wheel")
    parser.add_argument("--tests", action="store_true", help="with --check, run the quick tests with the wheel")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to try it with")
    options = parser.parse_args()
    files = build(options.output)
    for name, digest in hash_files(files).items():
        print(f"{digest}  {name}")
    if options.check:
        check_same(files)
        for python in options.python or [sys.executable]:
            try_wheel(files[1], python, options.tests)


if __name__ == "__main__":
    main()
