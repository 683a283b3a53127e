"""Host ops in compiled programs: equal results at every level, named in the IR and the report."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ExecutionError, UnsupportedOpError
from tessera.lower.graph_to_schedule.host_ops import find_host_calls
from tessera.runtime.program import prepare
from tessera.tools.cli.main import main

G = np.random.default_rng(0)
B = G.normal(size=(5, 5)).astype(np.float32)
SPD = B @ B.T + 5 * np.eye(5, dtype=np.float32)
LONG = G.normal(size=(3, 100)).astype(np.float32)


def factored(x):
    lower = ts.cholesky(x * 2.0)
    return ts.solve(lower, ts.exp(lower[:, :2])) + 1.0


def singular(x):
    u, s, v = ts.svd(x)
    return (u * s) @ v, s


PROGRAMS = {
    "cholesky and solve": (factored, SPD, ["ts.cholesky", "ts.solve"]),
    "svd": (singular, B, ["ts.svd"]),
    "qr": (lambda x: ts.qr(x)[1], B, ["ts.qr"]),
    "topk": (lambda x: ts.topk(x, 3), LONG, []),  # selected by a kernel
    "short sort": (lambda x: ts.sort(x[:, :8]), LONG, []),
    "two sorts": (lambda x: (ts.sort(x[:, :8]), ts.sort(x)), LONG, ["ts.argsort", "ts.argsort"]),
    "gradient": (ts.grad(lambda x: ts.det(x)), SPD, ["ts.slogdet", "ts.solve"]),
}


@pytest.mark.parametrize("function,x,names", PROGRAMS.values(), ids=PROGRAMS)
def test_levels_agree(function, x, names):
    eager = function(ts.Tensor(x))
    want = [t.numpy() for t in (eager if isinstance(eager, tuple) else (eager,))]
    program = prepare(ts.jit(function), [x], "llvm")
    assert [n.attrs["op"] for n in find_host_calls(program.levels["tile"])] == names
    runs = [*((level, "llvm") for level in ("graph", "schedule", "tile", "target", "device")), ("target", "ptx")]
    for run in runs:
        for got, wanted in zip(program.run(*run), want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


def test_inside_a_loop():
    """The memory that the host reads moves with the loop."""
    many = np.stack([SPD, SPD * 2, SPD + np.eye(5, dtype=np.float32)])
    step = ts.jit(lambda xs: ts.scan(lambda c, x: (c + ts.cholesky(x), ts.cholesky(x)), ts.zeros((5, 5)), xs)[1])
    for target in ("llvm", "ptx"):
        compiled = ts.jit(step.function, target=target)
        np.testing.assert_allclose(compiled(many).numpy(), np.linalg.cholesky(many), rtol=1e-5)


def test_built_and_reported(tmp_path, capsys):
    source = tmp_path / "model.py"
    source.write_text(
        "import numpy as np, tessera as ts\n"
        "@ts.example(lambda rng: (np.float32([[4, 2], [2, 5]]),))\n"
        "@ts.jit\n"
        "def factor(x: ts.Tensor[2, 2, ts.f32]):\n"
        "    return ts.cholesky(x)\n"
    )
    assert main(["build", f"{source}:factor", "-o", str(tmp_path / "out")]) == 0
    report = capsys.readouterr().out.replace("\n", " ")
    assert "runs on the host, by NumPy: ts.cholesky at" in report and "model.py:5" in report
    loaded = ts.load(tmp_path / "out")
    assert loaded(np.float32([[4, 2], [2, 5]])).tolist() == [[2.0, 0.0], [1.0, 2.0]]
    with pytest.raises(ExecutionError, match="positive definite"):
        loaded(np.float32([[-4, 2], [2, 5]]))


def test_bound_mode_refuses_by_name():
    with pytest.raises(UnsupportedOpError, match=r"ts.cholesky"):
        prepare(ts.jit(lambda x: ts.cholesky(x)), [SPD]).bounds()
