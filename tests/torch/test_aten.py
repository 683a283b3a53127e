"""The op table of ATen: every row fits its op's schema and gives PyTorch's values; what is missing has a reason."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from benchmarks.torch_opinfo import RowChecker, check_direct_calls, list_entries, run_samples  # noqa: E402
from tessera.errors import ArgumentError, DTypeError  # noqa: E402
from tessera.torch.aten import ATEN  # noqa: E402
from tessera.torch.conversion import read_schema  # noqa: E402
from tessera.torch.table import promote  # noqa: E402
from tessera.torch.tensors import DTYPES, find_dtype, from_torch, to_torch  # noqa: E402

MISSING = {
    "aten._fft_c2r.default": "complex numbers",
    "aten._fft_r2c.default": "complex numbers",
    "aten.nonzero.default": "a size that depends on values",
}
ENTRIES = [
    "add", "cdist", "cholesky_solve", "gcd", "histc", "index_put", "lcm", "linalg.pinv", "linalg.qr", "linalg.svd",
    "median", "mode", "nanmedian", "nn.functional.bilinear", "nn.functional.conv2d", "nn.functional.layer_norm",
    "nn.functional.pdist", "scatter_reduce", "softmax", "topk", "triangular_solve",
]  # fmt: skip


def find_op(name):
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def list_core_names():
    """Of all ops that PyTorch has, whether or not another test has asked for them."""
    full = [n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    parts = [n.partition(".") for n in full if hasattr(torch.ops.aten, n.partition(".")[0])]
    ops = [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in parts]
    return {str(op) for op in ops if torch.Tag.core in op.tags}


def test_core_aten_is_in_the_table():
    assert list_core_names() - set(ATEN) == set(MISSING)


def test_rows_take_the_arguments_of_the_schema():
    for name, row in ATEN.items():
        if not name.startswith("aten."):
            continue  # a custom op that another test has made
        kept = [parameter for parameter, taken in read_schema(find_op(name)) if taken]
        inspect.signature(row).bind(*kept)


def test_reading_the_table_does_not_import_pytorch():
    code = "import sys, tessera.torch.aten; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def check_records(checker):
    problems = {n: dict(r.counts) for n, r in checker.records.items() if r.counts["wrong"] or r.counts["failed"]}
    assert not problems, {n: dict(checker.records[n].examples) for n in problems}


def test_composed_ops_give_the_values_of_pytorch():
    torch.manual_seed(0)
    checker = RowChecker(limit=9)
    check_direct_calls(checker)
    check_records(checker)
    assert sum(r.counts["right"] for r in checker.records.values()) > 90


@pytest.mark.parametrize("name", ENTRIES)
def test_rows_give_the_values_of_pytorch_on_its_own_samples(name):
    pytest.importorskip("expecttest")
    checker = RowChecker(limit=6)
    for op in list_entries([name]):
        for dtype in {torch.float32, torch.bfloat16, torch.int64} & op.supported_dtypes("cpu"):
            run_samples(op, dtype, checker, samples=6)
    check_records(checker)
    assert sum(r.counts["right"] for r in checker.records.values()) > 5


OPERANDS = [torch.ones(2, dtype=d) for d in DTYPES if d.itemsize > 1 or not d.is_floating_point]
OPERANDS += [x[0] for x in OPERANDS]


def test_types_promote_as_in_pytorch():
    for a in OPERANDS:
        for b in [*OPERANDS, True, 2, 0.5]:
            try:
                wanted = torch.result_type(a, b)
            except RuntimeError:  # an unsigned type with a signed one
                continue
            own = b if isinstance(b, (bool, int, float)) else from_torch(b)
            assert promote(from_torch(a), own) == find_dtype(wanted), (a, b)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_tensors_keep_their_values_both_ways(dtype):
    x = torch.arange(6).reshape(2, 3).to(dtype).T
    assert torch.equal(to_torch(from_torch(x)).to(torch.float64), x.to(torch.float64))
    assert to_torch(from_torch(x)).dtype == dtype


@pytest.mark.parametrize(
    "x, error",
    [
        (torch.ones(2, device="meta"), ArgumentError),
        ("text", ArgumentError),
        (torch.ones(2).to_sparse(), DTypeError),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), DTypeError),
        (torch.ones(2, dtype=torch.complex64), DTypeError),
    ],
    ids=["meta", "text", "sparse", "nested", "complex"],
)
def test_what_has_no_tensor_here_is_refused(x, error):
    with pytest.raises(error):
        from_torch(x)
