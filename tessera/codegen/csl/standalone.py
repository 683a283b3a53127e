"""Standalone programs for wafers: the folder that the vendor's SDK compiles and runs, with weights as .npy files."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.core.types import as_dtype


def emit_standalone(artifact: Artifact, name: str, stored: Mapping[str, bytes]) -> dict[str, bytes | str]:
    """The SDK's folder: CSL files, the commands that compile them, the host script, and a file for each weight."""
    parameters = artifact.manifest["interface"]["parameters"]
    files: dict[str, bytes | str] = dict(artifact.files)
    for parameter in parameters:
        if parameter["name"] in stored:
            array = np.frombuffer(stored[parameter["name"]], as_dtype(parameter["dtype"]).numpy)
            held = io.BytesIO()
            np.save(held, array.reshape(parameter["shape"]))
            files[f"weights/{parameter['name']}.npy"] = held.getvalue()
    inputs = [f"weights/{p['name']}.npy" if p["stored"] else f"{p['name']}.npy" for p in parameters]
    command = f"cs_python run.py --name out --input {' '.join(inputs)} --output result.npy"
    return {
        **files,
        "README": f"{name}, for the Cerebras SDK: compile it with a commands file, then\n\n    {command}\n",
    }
