"""Open Inference Protocol v2: tensors of requests and responses, as JSON or as bytes after it (KServe, Triton)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError
from tessera.core.types import as_dtype
from tessera.serving.json_bodies import ProtocolError, parse_json
from tessera.serving.served_models import TensorDescription

DATATYPES = {
    "bool": "BOOL", "f16": "FP16", "bf16": "BF16", "f32": "FP32", "f64": "FP64",
    **{f"int{n}": f"INT{n}" for n in (8, 16, 32, 64)}, **{f"uint{n}": f"UINT{n}" for n in (8, 16, 32, 64)},
}  # fmt: skip
ELEMENT_TYPES = {datatype: name for name, datatype in DATATYPES.items()}
MAX_RANK = 32
MAX_TENSORS = 1024


@dataclass
class InferenceCall:
    """A request of the protocol: its inputs, its identifier, and the outputs that it asks for (name to binary)."""

    inputs: dict[str, np.ndarray]
    id: str = ""
    outputs: dict[str, bool] = field(default_factory=dict)
    binary: bool = False


def describe_tensor(spec: TensorDescription) -> dict[str, Any]:
    """A tensor in a model's metadata.

    Raises:
        ArgumentError: the protocol has no such element type.
    """
    if spec.dtype not in DATATYPES:
        raise ArgumentError(f"the inference protocol has no type for {spec.name}", expected=", ".join(DATATYPES),
                            received=spec.dtype)  # fmt: skip
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": list(spec.shape)}


def read_call(body: bytes, header_length: str | None, max_json: int) -> InferenceCall:
    """The request in a body, of which the first `header_length` bytes are JSON; without it, all are.

    Raises:
        ProtocolError: the body is not of the protocol: 400, or 413 where its JSON is too long.
    """
    length = _read_header_length(header_length, len(body))
    if length > max_json:
        raise ProtocolError(413, f"the JSON of the request has {length} bytes: expected up to {max_json}")
    call = parse_json(body[:length])
    if not isinstance(call, dict):
        raise ProtocolError(400, "the request is no JSON object")
    identifier = call.get("id", "")
    if not isinstance(identifier, str):
        raise ProtocolError(400, "the id of the request is no text")
    parameters = _take_parameters(call, "the request")
    made = InferenceCall({}, identifier, {}, _take_flag(parameters, "binary_data_output"))
    made.inputs = _read_inputs(call.get("inputs"), memoryview(body)[length:])
    for output in _take_list(call.get("outputs", []), "outputs"):
        name = _take_name(output, "output")
        binary = _take_flag(_take_parameters(output, name), "binary_data", made.binary)
        if _take_parameters(output, name).get("classification"):
            raise ProtocolError(400, f"output {name}: classification is not supported")
        made.outputs[name] = binary
    return made


def _read_header_length(text: str | None, size: int) -> int:
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) > size:
        raise ProtocolError(400, f"Inference-Header-Content-Length is {text[:40]!r}: expected 0 to {size}")
    return int(text)


def _take_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise ProtocolError(400, f"{name} is no list of up to {MAX_TENSORS} tensors")
    return value


def _take_name(tensor: Any, kind: str) -> str:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str) or not tensor["name"]:
        raise ProtocolError(400, f"an {kind} has no name")
    return tensor["name"]


def _take_parameters(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = holder.get("parameters", {})
    if not isinstance(found, dict):
        raise ProtocolError(400, f"the parameters of {name} are no JSON object")
    return found


def _take_flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise ProtocolError(400, f"the parameter {name} is neither true nor false")
    return found


def _read_inputs(listed: Any, raw: memoryview) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    at = 0
    for tensor in _take_list(listed, "inputs"):
        name = _take_name(tensor, "input")
        if name in found:
            raise ProtocolError(400, f"input {name[:80]} is there twice")
        dtype, shape = _read_type(tensor, name), _read_shape(tensor, name)
        size = _take_parameters(tensor, name).get("binary_data_size")
        if size is None:
            found[name] = _read_values(tensor, name, dtype, shape)
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 0 or "data" in tensor:
            raise ProtocolError(400, f"input {name[:80]}: binary_data_size is no number of bytes, or there is data too")
        if size != math.prod(shape) * dtype.itemsize or at + size > len(raw):
            raise ProtocolError(
                400, f"input {name[:80]}: expected {math.prod(shape) * dtype.itemsize} bytes for {shape}, "
                f"received binary_data_size {size} with {len(raw) - at} bytes left in the body"
            )  # fmt: skip
        found[name] = _read_bytes(raw[at : at + size], name, dtype, shape)
        at += size
    if at != len(raw):
        raise ProtocolError(400, f"the body has {len(raw) - at} bytes after the last tensor")
    return found


def _read_type(tensor: Mapping[str, Any], name: str) -> np.dtype:
    datatype = tensor.get("datatype")
    if not isinstance(datatype, str) or datatype not in ELEMENT_TYPES:
        raise ProtocolError(400, f"input {name[:80]}: the datatype is {str(datatype)[:40]!r}: expected one of "
                                 f"{', '.join(ELEMENT_TYPES)}")  # fmt: skip
    return np.dtype(as_dtype(ELEMENT_TYPES[datatype]).numpy)


def _read_shape(tensor: Mapping[str, Any], name: str) -> list[int]:
    shape: Any = tensor.get("shape")
    fits = isinstance(shape, list) and len(shape) <= MAX_RANK
    if not fits or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise ProtocolError(400, f"input {name[:80]}: the shape is no list of up to {MAX_RANK} sizes")
    if math.prod(n for n in shape if n) >= 2**63:
        raise ProtocolError(400, f"input {name[:80]}: the shape has too many elements")
    return list(shape)


def _read_bytes(raw: memoryview, name: str, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    if dtype == np.bool_ and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
        raise ProtocolError(400, f"input {name[:80]}: a byte of BOOL is neither 0 nor 1")
    # A copy is aligned, as compiled programs expect; the body is not.
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def _read_values(tensor: Mapping[str, Any], name: str, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    """Numbers of JSON, flat or nested as the shape."""
    data = tensor.get("data")
    if not isinstance(data, list):
        raise ProtocolError(400, f"input {name[:80]} has no data")
    values = _flatten(data, shape, name) if any(isinstance(v, list) for v in data) else data
    if len(values) != math.prod(shape):
        raise ProtocolError(400, f"input {name[:80]}: expected {math.prod(shape)} elements for shape {shape}, "
                                 f"received {len(values)}")  # fmt: skip
    kinds = {bool} if dtype == np.bool_ else {int} if dtype.kind in "iu" else {int, float}
    if not set(map(type, values)) <= kinds:
        raise ProtocolError(400, f"input {name[:80]} holds something else than elements of {tensor['datatype']}")
    return _convert(values, name, dtype).reshape(shape)


def _convert(values: list[Any], name: str, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if values and not (limits.min <= min(values) and max(values) <= limits.max):
            raise ProtocolError(400, f"input {name[:80]}: a number is out of the range of its type")
        return np.array(values, dtype)
    try:
        with np.errstate(over="ignore"):
            found = np.array(values, np.bool_ if dtype == np.bool_ else np.float64).astype(dtype)
    except OverflowError:  # an integer of JSON beyond f64
        found = np.array([np.inf]).astype(dtype)
    if dtype != np.bool_ and not np.isfinite(found.astype(np.float64)).all():
        raise ProtocolError(400, f"input {name[:80]}: a number is out of the range of its type")
    return found


def _flatten(data: list[Any], shape: Sequence[int], name: str) -> list[Any]:
    level = data
    for size in shape[1:]:
        if not all(isinstance(v, list) and len(v) == size for v in level):
            raise ProtocolError(400, f"input {name[:80]}: the data is not nested as its shape {list(shape)}")
        level = [v for each in level for v in each]
    if len(data) != (shape[0] if shape else -1):
        raise ProtocolError(400, f"input {name[:80]}: the data is not nested as its shape {list(shape)}")
    return level


def write_response(
    call: InferenceCall, outputs: Mapping[str, np.ndarray], specs: Sequence[TensorDescription], model: str, version: str
) -> tuple[bytes, int | None]:
    """The body of a response, and how many bytes of it are JSON: None where all are.

    Raises:
        ProtocolError: an output is unknown (400), or is not finite and asked for as JSON (422).
    """
    known = {s.name: s for s in specs}
    if unknown := [n for n in call.outputs if n not in known]:
        raise ProtocolError(400, f"the model has no output {unknown[0][:80]}: expected {', '.join(known)}")
    wanted = call.outputs or dict.fromkeys(known, call.binary)
    listed, raw = [], []
    for name, binary in wanted.items():
        array = np.ascontiguousarray(outputs[name]).reshape(np.shape(outputs[name]))
        entry = {**describe_tensor(known[name]), "shape": list(array.shape)}
        if binary:
            raw.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = _list_values(array, name)
        listed.append(entry)
    text = {"model_name": model, "model_version": version, **({"id": call.id} if call.id else {}), "outputs": listed}
    head = json.dumps(text, allow_nan=False).encode()
    return (head + b"".join(raw), len(head)) if any(wanted.values()) else (head, None)


def _list_values(array: np.ndarray, name: str) -> list[Any]:
    if array.dtype.kind in "biu":
        return array.reshape(-1).tolist()
    wide = array.reshape(-1).astype(np.float64)
    if not np.isfinite(wide).all():
        raise ProtocolError(422, f"output {name} holds NaN or infinity, which JSON has not: ask for binary_data")
    return wide.tolist()
