"""Samples of PyTorch's own tests (OpInfo) through the backend: values and gradients, none wrong."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

from benchmarks.torch_backend import NONE, WHOLE, judge, list_samples  # noqa: E402

# Every one is taken whole; benchmarks/torch_backend.py sweeps all ops.
NAMES = (
    "addmm", "clamp", "cumsum", "gather", "index_select", "logsumexp", "nn.functional.conv2d", "nn.functional.gelu",
    "nn.functional.layer_norm", "nn.functional.max_pool2d", "softmax", "sort", "std", "tril", "where",
)  # fmt: skip
OPS = [op for op in op_db if op.name in NAMES and not op.variant_test_name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_samples(op):
    for sample in list_samples(op, torch.float32, 2):
        status, why = judge(op, sample, {"level": "graph", "fallback_random": True})
        assert status in (WHOLE, NONE), why
