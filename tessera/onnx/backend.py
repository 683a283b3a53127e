"""Backend interface of ONNX (`onnx.backend.base.Backend`): ONNX's own test runner, and tools written for it, run here.

>>> import onnx.backend.test                                          # doctest: +SKIP
>>> from tessera.onnx.backend import TesseraBackend                   # doctest: +SKIP
>>> onnx.backend.test.BackendTest(TesseraBackend).test_cases          # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep

from tessera.onnx.model import OnnxModel, load


class PreparedModel(BackendRep):
    """A model that is ready to run."""

    def __init__(self, model: OnnxModel, target: str | None) -> None:
        self.model = model
        self.target = target

    def run(self, inputs: Any, **options: Any) -> tuple[Any, ...]:
        """The results for arrays in the order of the model's inputs."""
        return tuple(self.model.run(inputs, self.target))


class TesseraBackend(Backend):
    """Tessera as a backend: of the interpreter, or of the target that `prepare` gets as an option."""

    target: str | None = None

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> PreparedModel:
        """Load a model; the option `target` compiles it when it runs."""
        return PreparedModel(load(model), options.get("target", cls.target))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Load and run a model."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Run one node on arrays."""
        import numpy as np
        from onnx import helper

        arrays = [np.asarray(x) for x in inputs]
        declared = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(filter(None, node.input), arrays, strict=True)
        ]
        results = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        model = helper.make_model(helper.make_graph([node], "node", declared, results))
        return cls.run_model(model, arrays, device, **options)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on a device of this name."""
        return device == "CPU"
