"""ONNX's own node tests: a sample in the interpreter, and one on llvm; scripts/onnx_conformance.py runs all."""

import numpy as np
import onnx
import pytest
from onnx.backend.test.runner import Runner, _normalize_tensor

from tessera.errors import TraceError, UnsupportedOpError
from tessera.onnx.backend import TesseraBackend

# By design: other systems draw other random numbers; sums of large numbers are closer than the runner's data; floats
# beyond a narrow integer type are undefined in ONNX, and the data of `Cast` has what ml_dtypes makes of them.
DIFFERENT = (
    *("bernoulli", "dft_inverse", "attention_4d_causal_fp16", "loop16_seq_none"),
    *("_FLOAT_to_INT", "_FLOAT_to_UINT", "_FLOAT16_to_INT", "_FLOAT16_to_UINT"),
)
REFUSED = ("image_decoder", "training_dropout", "regex", "ada", "momentum", "tree_ensemble", "gradient")


def run(case, target=None):
    prepared = TesseraBackend.prepare(case.model, target=target)
    with np.errstate(all="ignore"):
        for inputs, expected in case.data_sets:
            found = prepared.run([_normalize_tensor(x) for x in inputs])
            Runner.assert_similar_outputs(
                [_normalize_tensor(x) for x in expected], found, rtol=case.rtol, atol=case.atol
            )


def sample(node_tests, start, step):
    """Every `step`-th test; a third of the list are functions expanded into other operators."""
    chosen = [case for name, case in node_tests.items() if not any(word in name for word in DIFFERENT)]
    return chosen[start::step]


@pytest.mark.parametrize("start", range(4))
def test_sample_of_nodes_in_the_interpreter(node_tests, start):
    cases = sample(node_tests, start, 24)
    refused = []
    for case in cases:
        try:
            run(case)
        except UnsupportedOpError:
            refused.append(case.name)
    assert len(cases) > 50 and all(any(word in name for word in REFUSED) for name in refused)


def test_sample_of_nodes_on_llvm(node_tests):
    cases, refused = sample(node_tests, 7, 40), []
    for case in cases:
        try:
            run(case, "llvm")
        except (UnsupportedOpError, TraceError):
            refused.append(case.name)
    assert len(refused) <= 0.2 * len(cases), refused


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_light_models(name):
    from pathlib import Path

    file = Path(onnx.__file__).parent / "backend/test/data/light" / f"{name}.onnx"
    model = onnx.load(file)
    held = {t.name for t in model.graph.initializer}
    inputs = [Runner.generate_dummy_data(x) for x in model.graph.input if x.name not in held]
    expected = onnx.TensorProto()
    expected.ParseFromString(file.with_name(f"{name}_output_0.pb").read_bytes())
    # Logits of 1e10 that are equal by construction: BLAS adds some of their rows in another order.
    found = TesseraBackend.prepare(model, target="llvm").run(inputs)
    np.testing.assert_allclose(found[0], onnx.numpy_helper.to_array(expected), rtol=1e-3, atol=1e-5)
