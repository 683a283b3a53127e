"""An engine of the conformance suite in another process: reads a request a line, writes an answer a line.

It runs the Graph level with the reference interpreter; an engine of your own reads the module's text instead.

    tessera conformance --engine "python examples/engine/numpy_engine.py" -k elementwise/add
"""

import json
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 (names bfloat16 and the like)
import numpy as np

from tessera.interp import graph
from tessera.ir.parser import parse_module


def answer(request: dict) -> dict:
    """The results of one case, or the reason why it is refused."""
    if request["level"] != "graph":
        return {"status": "unsupported", "detail": "this engine runs functions, not kernels"}
    arrays = [
        np.frombuffer(Path(i["file"]).read_bytes(), np.dtype(i["dtype"])).reshape(i["shape"]) for i in request["inputs"]
    ]
    outputs = []
    for number, result in enumerate(graph.run(parse_module(request["module"]).main, arrays)):
        path = Path(request["folder"]) / f"output{number}"
        path.write_bytes(np.ascontiguousarray(result).tobytes())
        outputs.append({"file": str(path), "dtype": result.dtype.name, "shape": list(result.shape)})
    return {"status": "ok", "outputs": outputs}


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"status": "error", "detail": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
