"""Pages of models: what they hold, and their results in headless Chromium and in Node, compared with this machine's."""

import base64
import doctest
import functools
import gzip
import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera import deploy
from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, UnknownNameError, UnsupportedOpError
from tessera.deploy import web, webassembly

try:
    webassembly.find_linker()
except DeviceUnavailable:
    pytest.skip("needs wasm-ld: of the package ziglang, or of lld", allow_module_level=True)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node: apt install nodejs")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=20000 --dump-dom"
).split()
RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 8)).astype(np.float32)
W = RNG.standard_normal((8, 5)).astype(np.float32)


@ts.jit
def classify(x, w):
    scores = ts.softmax(x @ w, axis=-1)
    return scores, ts.argmax(scores, axis=-1)


def read_program(page):
    """The JSON data of a page."""
    return json.loads(re.search(r'id="program">(.*?)</script>', page.read_text(), re.S)[1])


def browse(page):
    """The results that Chromium shows of a file or an address, by name, and its status line."""
    address = page if isinstance(page, str) else page.as_uri()
    with tempfile.TemporaryDirectory(prefix="tessera-chromium-", ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", address]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    status = html.unescape(re.search(r'<p id="status"[^>]*>(.*?)</p>', text, re.S)[1])
    found = re.findall(r'<pre data-name="([^"]*)">(.*?)</pre>', text, re.S)
    return {name: json.loads(html.unescape(value)) for name, value in found}, status


def test_a_page_holds_the_model_and_its_example(tmp_path):
    made = ts.export_web(classify, X, W, weights=["w"], out=tmp_path / "model.html", title="<b> & co")
    assert made.page == tmp_path / "model.html" and made.engines == ("WebAssembly",) and not made.left_out
    text = made.page.read_text()
    assert "<title>&lt;b&gt; &amp; co</title>" in text
    assert not re.search("@[A-Z]+@", text)
    assert not re.search(r'(?:src|href)="', text)  # nothing is loaded from elsewhere
    program = read_program(made.page)
    assert [(p["name"], p["role"]) for p in program["parameters"][:2]] == [("x", "input"), ("w", "weight")]
    assert base64.b64decode(program["module"])[:4] == b"\0asm"
    assert base64.b64decode(program["example"]["x"]) == X.tobytes()
    assert base64.b64decode(program["weights"]["w"]) == W.tobytes()


def test_weights_may_have_types_that_scripts_lack(tmp_path):
    small = ts.cast(ts.Tensor(W), ts.bf16)
    made = ts.export_web(ts.jit(lambda x, w: x @ ts.cast(w, ts.f32)), X, small, weights="w", out=tmp_path / "m.html")
    assert [p["dtype"] for p in read_program(made.page)["parameters"]] == ["f32", "bf16", "f32"]


def test_a_folder_and_the_same_bytes_each_time(tmp_path):
    for name in "ab":
        ts.export_web(classify, X, W, out=tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["classify.wasm", "index.html", "program.json"]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


@pytest.fixture
def serve(tmp_path):
    """The address of a server of the test's folder, which gives compressed copies where there are any."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def send_head(self):
            if Path(self.translate_path(self.path + ".gz")).is_file():
                self.path += ".gz"
            return super().send_head()

        def end_headers(self):
            if self.path.endswith(".gz"):
                self.send_header("Content-Encoding", "gzip")
            super().end_headers()

        def guess_type(self, path):
            return super().guess_type(path.removesuffix(".gz"))

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


LARGE = RNG.standard_normal((8, 900)).astype(np.float32)


@needs_chromium
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_split_page_fetches_its_parts(tmp_path, serve, compression):
    model = ts.jit(lambda x, w: (x @ w)[:, :3])
    out = tmp_path / "m"
    ts.export_web(model, X, LARGE, weights=["w"], out=out, split_size="8K", compression=compression)
    parts = sorted(out.glob("data.*.bin"))
    program = read_program(out / "index.html")
    assert len(parts) == -(-sum(p["bytes"] for p in program["parts"]) // 8192) == 4
    assert all(p.stat().st_size <= 8192 for p in parts) and LARGE.tobytes() in b"".join(p.read_bytes() for p in parts)
    found, status = browse(f"{serve}/m/index.html")
    assert status.startswith("WebAssembly: ")
    np.testing.assert_allclose(np.float32(found["out"]), (X @ LARGE)[:, :3], rtol=1e-5, atol=1e-5)
    parts[1].write_bytes(bytes(8192))
    if compression is None:
        assert browse(f"{serve}/m/index.html")[1].startswith("error: ")  # the browser checks the hash


def test_compressed_copies_are_those_of_their_files(tmp_path):
    brotli = pytest.importorskip("brotli")
    for name, kind, unpack in (("a", "gzip", gzip.decompress), ("b", "brotli", brotli.decompress)):
        ts.export_web(classify, X, W, out=tmp_path / name, compression=kind)
        ending = {"gzip": ".gz", "brotli": ".br"}[kind]
        files = [p for p in (tmp_path / name).iterdir() if p.suffix != ending]
        assert len(files) == 3
        for file in files:
            assert unpack(file.with_name(file.name + ending).read_bytes()) == file.read_bytes()
    ts.export_web(classify, X, W, out=tmp_path / "c", compression="gzip")
    assert (tmp_path / "a" / "index.html.gz").read_bytes() == (tmp_path / "c" / "index.html.gz").read_bytes()


def test_14_1_export_web(tmp_path):
    """The chapter's exporter, for WebAssembly; its path is the second argument."""
    optimized = ts.optimize(
        ts.nn.Sequential(ts.nn.Linear(8, 4)), target="web", example=(X,),
        optimizations=["graph_simplification", "webgpu_kernels", "memory_minimization"],
    )  # fmt: skip
    made = ts.export_web(optimized, tmp_path / "site", split_size="4MB", compression="gzip")
    assert made.page == tmp_path / "site" / "index.html" and (tmp_path / "site" / "data.0000.bin.gz").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "m.html", "split_size": "4MB"}, "one page cannot be split"),
        ({"out": "m.html", "compression": "gzip"}, "one page cannot be split or compressed"),
        ({"out": "m", "compression": "zip"}, "no compression 'zip'"),
        ({"out": "m", "split_size": 10}, "files of 10 bytes are too small"),
        ({"out": "m", "split_size": "much"}, "no size of memory"),
        ({}, "a page needs a path"),
    ],
)
def test_refused_splits(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        ts.export_web(classify, X, W, **options)
    assert not list(tmp_path.iterdir())


@needs_chromium
def test_chromium_shows_the_values_of_the_interpreter(tmp_path):
    made = ts.export_web(classify, X, W, weights=["w"], out=tmp_path / "model.html")
    found, status = browse(made.page)
    scores = np.exp(X.astype(np.float64) @ W)
    scores /= scores.sum(-1, keepdims=True)
    assert status.startswith("WebAssembly: ")
    np.testing.assert_allclose(np.float32(found["out0"]), scores, rtol=1e-6)
    assert found["out1"] == scores.argmax(-1).tolist()


@needs_chromium
def test_chromium_shows_numbers_that_json_lacks_and_failures(tmp_path):
    x = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40])
    wide = np.array([1, -(1 << 60)])
    both = ts.jit(lambda x, i, b: (x * 2.0, i + 1, ~b))
    made = ts.export_web(both, x, wide, np.array([True, False]), out=tmp_path / "numbers.html")
    found, _ = browse(made.page)
    assert [*found.values()] == [
        [0, "-0", "Infinity", "-Infinity", "NaN", float(np.float32(1e-40) * 2)], [2, str(1 - (1 << 60))], [False, True],
    ]  # fmt: skip
    made = ts.export_web(ts.jit(lambda t, i: t[i]), X, np.array([0, 7]), out=tmp_path / "outside.html")
    found, status = browse(made.page)
    assert not found and re.match(r"error: test_web.py:\d+: an index is out of bounds", status)


@needs_node
def test_the_engine_runs_in_node(tmp_path):
    """The script of the page on other inputs than the example's, with functions of `Math`."""
    made = ts.export_web(ts.jit(lambda x, w: ts.sin(x * 1e9) @ w), X, W, weights=["w"], out=tmp_path / "m.html")
    program, other = read_program(made.page), np.abs(X[::-1]).copy()
    script = (
        (web.PAGE_FOLDER / "engine.mjs").read_text()
        + """
      const program = JSON.parse(require("fs").readFileSync(0));
      const decode = (text) => new Uint8Array(Buffer.from(text, "base64"));
      program.module = decode(program.module);
      program.weights.w = decode(program.weights.w);
      openWebAssembly(program).then((run) => run({ x: decode(program.given) })).then((found) => {
        process.stdout.write(Buffer.from(found.out).toString("base64"));
      });"""
    )
    data = json.dumps({**program, "given": base64.b64encode(other.tobytes()).decode()})
    done = subprocess.run(["node", "-e", script], input=data, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = np.frombuffer(base64.b64decode(done.stdout), np.float32).reshape(3, 5)
    np.testing.assert_allclose(found, np.sin((other * np.float32(1e9)).astype(np.float64)) @ W, rtol=2e-5, atol=2e-6)


def test_a_module_of_layers_and_an_optimised_model(tmp_path):
    generator = ts.manual_seed(0)
    nn = ts.nn
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    made = ts.export_web(model, X, out=tmp_path / "layers.html")
    small = ts.optimize(model, target="web", optimizations=["weight_int8"], example=(X,))
    packed = ts.export_web(small, out=tmp_path / "small.html")
    sizes = [sum(len(w) for w in read_program(m.page)["weights"].values()) for m in (made, packed)]
    assert generator is not None and sizes[1] < 0.5 * sizes[0]
    assert small.target == "llvm"


def test_generators_for_browsers_are_packed_or_said_to_be_left_out(tmp_path, monkeypatch):
    class Other:
        def web_engine(self, artifact):
            return "Other", 'return async (inputs) => inputs; // "</script>"'

    class Poor:
        def web_engine(self, artifact):
            raise UnsupportedOpError("the target poor cannot emit ts.exp")

    class Silent:
        pass

    known = {"other": Other(), "poor": Poor(), "silent": Silent()}
    monkeypatch.setattr(web, "list_backends", lambda: known)
    monkeypatch.setattr(web, "get_backend", lambda name: known[name])
    emit = web.emit_artifact
    monkeypatch.setattr(web, "emit_artifact", lambda g, m, o: emit(g, m, o) if g not in known.values() else None)
    prepare = web.OptimisedModel.prepare_program
    monkeypatch.setattr(web.OptimisedModel, "prepare_program", lambda self, name: prepare(self, "llvm"))
    made = ts.export_web(classify, X, W, out=tmp_path / "model.html")
    assert made.engines == ("WebAssembly", "Other")
    assert made.left_out == {"poor": "the target poor cannot emit ts.exp"}
    assert made.page.read_text().count("</script>") == 2


def test_what_a_page_cannot_have_is_refused(tmp_path):
    for named in ({"out": 3}, {"title": 3}, {"weights": 3}):
        with pytest.raises(ArgumentError, match="is no"):
            ts.export_web(lambda x: x * 2, np.ones(2, np.float32), **{"out": "x.html", **named})
    with pytest.raises(ArgumentError, match="needs an example"):
        ts.export_web(classify, out=tmp_path / "m.html")
    with pytest.raises(UnsupportedOpError, match="no arrays of f16"):
        ts.export_web(ts.jit(lambda x: x + 1), X.astype(np.float16), out=tmp_path / "m.html")
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArgumentError, match="is a file"):
        ts.export_web(classify, X, W, out=tmp_path / "taken")
    with pytest.raises(FileError, match="cannot be written"):
        ts.export_web(classify, X, W, out=tmp_path / "taken" / "m.html")
    with pytest.raises(UnknownNameError, match="no argument v"):
        deploy.export_web(classify, X, W, weights=["v"], out=tmp_path / "m.html")


def test_the_examples_of_the_documentation():
    pytest.importorskip("wasmtime")
    page = Path(__file__).parents[2] / "docs" / "web.md"
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, "web", str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    report: list[str] = []
    runner.run(examples, out=report.append)
    assert len(examples.examples) > 10 and runner.failures == 0, "".join(report)
    for path in set(re.findall(r"\bts\.([A-Za-z_][\w.]*\w)", text)):
        assert functools.reduce(getattr, path.split("."), ts)
