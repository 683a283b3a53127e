"""Bad input at the command line: one clear error, status 2, nothing half-written."""

import json
import sys

import numpy as np
import pytest

from tessera.tools.cli.main import main


@pytest.fixture
def model(tmp_path):
    """A file with a jit function that doubles its input."""
    file = tmp_path / "model.py"
    file.write_text(
        "import numpy as np\nimport tessera as ts\n\n"
        "@ts.example(lambda rng: {'x': np.ones((2, 3), np.float32)}, lambda x: x * 2)\n"
        "@ts.jit\ndef double(x: ts.Tensor['B', 3]):\n    return x * 2.0\n"
    )
    return file


def fails(capsys, *command):
    assert main([str(c) for c in command]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_missing_file(capsys):
    assert "FileError: there is no file nowhere.py" in fails(capsys, "run", "nowhere.py")


def test_unknown_entry(model, capsys):
    text = fails(capsys, "run", f"{model}:doble")
    assert "has no entry point doble" in text and f"did you mean {model}:double?" in text


def test_python_that_does_not_parse(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("def f(:\n")
    text = fails(capsys, "run", tmp_path / "bad.py")
    assert "is not Python" in text and "bad.py:1" in text and "^" in text


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"not numpy at all"])
def test_truncated_array(model, tmp_path, content, capsys):
    (tmp_path / "x.npy").write_bytes(content)
    text = fails(capsys, "run", model, "--input", tmp_path / "x.npy")
    assert "x.npy is not a complete .npy file" in text and "numpy.save" in text


def test_missing_array(model, capsys):
    assert "there is no file missing.npy" in fails(capsys, "run", model, "--input", "missing.npy")


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.ones(3, np.float32), ["rank 2 expected, rank 1 received", "expected: Bx3xf32", "received: 3xf32"]),
        (np.ones((2, 4), np.float32), ["axis 1: expected 3, received 4"]),
        (np.ones((2, 3)), ["another element type", "expected: Bx3xf32", "received: 2x3xf64", "ts.f32"]),
    ],
)
def test_wrong_array(model, tmp_path, array, says, capsys):
    np.save(tmp_path / "x.npy", array)
    text = fails(capsys, "run", model, "--input", tmp_path / "x.npy")
    assert all(s in text for s in says), text


def test_too_many_inputs(model, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    x = tmp_path / "x.npy"
    assert "2 inputs were given, double takes 1" in fails(capsys, "run", model, "--input", x, "--input", x)


def test_unknown_target(model, capsys):
    text = fails(capsys, "run", model, "--target", "ptz")
    assert '"ptz" is not a code generator' in text and "llvm" in text


def test_absent_device(model, capsys):
    text = fails(capsys, "run", model, "--target", "cuda:0")
    assert "DeviceUnavailable" in text and "suggestion" in text


def test_output_folder_is_missing(model, tmp_path, capsys):
    out = tmp_path / "no" / "out.npy"
    assert "there is no folder" in fails(capsys, "run", model, "--output", out) and not out.exists()


def test_a_failing_program_shows_its_line(tmp_path, capsys):
    file = tmp_path / "wrong.py"
    file.write_text(
        "import numpy as np\nimport tessera as ts\n\n"
        "@ts.example(lambda rng: (np.ones((2, 3), np.float32),))\n"
        "@ts.jit\ndef wrong(x):\n    return x + x[:, :2]\n"
    )
    text = fails(capsys, "run", file)
    assert "wrong.py:7" in text and "return x + x[:, :2]" in text
    assert "^^^" in text or sys.version_info < (3, 11)  # older Pythons keep no columns


@pytest.fixture
def artifact(model, tmp_path, capsys):
    """An artifact folder of the model."""
    assert main(["build", str(model), "-o", str(tmp_path / "art")]) == 0
    capsys.readouterr()
    return tmp_path / "art"


def test_artifact_of_a_newer_schema(artifact, capsys):
    manifest = json.loads((artifact / "manifest.json").read_text())
    (artifact / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    text = fails(capsys, "run", artifact)
    assert "schema 99, newer than this version" in text and "upgrade tessera" in text


def test_damaged_artifact(artifact, capsys):
    name = next(p for p in artifact.iterdir() if p.suffix == ".ll")
    name.write_bytes(name.read_bytes()[:-20])
    assert "has changed since it was built" in fails(capsys, "run", artifact)
    name.unlink()
    assert f"lacks {name.name}" in fails(capsys, "run", artifact)


def test_truncated_manifest(artifact, capsys):
    (artifact / "manifest.json").write_text("{")
    assert "is corrupt" in fails(capsys, "run", artifact)


@pytest.mark.parametrize("key", ["files", "interface", "plan", "target"])
def test_edited_manifest(artifact, key, capsys):
    manifest = json.loads((artifact / "manifest.json").read_text())
    for edited in ({**manifest, key: None}, {k: v for k, v in manifest.items() if k != key}):
        (artifact / "manifest.json").write_text(json.dumps(edited))
        assert "manifest.json has changed since it was built" in fails(capsys, "run", artifact)


def test_wrong_array_for_an_artifact(artifact, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones((5, 3), np.float32))
    assert "another shape than the artifact was built for" in fails(
        capsys, "run", artifact, "--input", tmp_path / "x.npy"
    )


def test_build_does_not_overwrite_what_is_no_artifact(model, tmp_path, capsys):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("keep")
    assert "exists and is not an artifact" in fails(capsys, "build", model, "-o", tmp_path / "precious")
    assert (tmp_path / "precious" / "notes.txt").read_text() == "keep"


def test_traceback_on_demand(model):
    with pytest.raises(Exception, match="there is no file"):
        main(["--traceback", "run", "nowhere.py"])


def test_bad_selection(capsys):
    said = fails(capsys, "conformance", "-k", "nosuchcase")
    assert "no case matches 'nosuchcase'" in said and "tessera conformance --list" in said
    assert "is not an expression" in fails(capsys, "conformance", "-k", "a and")
