"""C++ wrapper: a header over a standalone library, whose tensors have the names of PyFlame's C++ summary."""

from __future__ import annotations

from collections.abc import Mapping

from tessera.codegen.artifact import SIZE_KEY, find_version
from tessera.codegen.c_plan import CParameter, CProgram, format_example, format_header, format_size, make_c_name

# PyFlame's names of element types, with those that it lacks.
CPP_TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "bool": "bool_"}

TENSOR_HEADER = """\
/* Tensors for the C++ wrappers of compiled programs: values in row-major order (PyFlame's C++ summary). */
#ifndef PYFLAME_HPP
#define PYFLAME_HPP
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace pyflame {

enum class DType {
  float32, float64, float16, bfloat16, int64, int32, int16, int8, uint64, uint32, uint16, uint8, bool_, byte
};

inline std::size_t dtype_size(DType type) {
  switch (type) {
    case DType::float64: case DType::int64: case DType::uint64: return 8;
    case DType::float32: case DType::int32: case DType::uint32: return 4;
    case DType::float16: case DType::bfloat16: case DType::int16: case DType::uint16: return 2;
    default: return 1;
  }
}

class Tensor {
 public:
  using Shape = std::vector<std::int64_t>;
  Tensor() : Tensor(Shape{0}) {}
  explicit Tensor(Shape shape, DType dtype = DType::float32) : shape_(std::move(shape)), dtype_(dtype) {
    for (auto n : shape_) if (n < 0) throw std::invalid_argument("a size is negative");
    bytes_ = std::make_shared<std::vector<std::uint8_t>>(numel() * dtype_size(dtype_));
  }
  static Tensor zeros(Shape shape, DType dtype = DType::float32) { return Tensor(std::move(shape), dtype); }
  static Tensor full(Shape shape, float value) {
    Tensor made(std::move(shape));
    for (std::int64_t i = 0; i < made.numel(); i++) made.data<float>()[i] = value;
    return made;
  }
  static Tensor ones(Shape shape) { return full(std::move(shape), 1.0f); }
  template <class T> static Tensor from(Shape shape, const T *values, DType dtype = DType::float32) {
    Tensor made(std::move(shape), dtype);
    std::memcpy(made.template data<T>(), values, made.bytes_->size());
    return made;
  }
  const Shape &shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  std::int64_t ndim() const { return static_cast<std::int64_t>(shape_.size()); }
  std::int64_t numel() const {
    return std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<std::int64_t>());
  }
  void eval() const {}  // the values are there: a program runs when it is called
  template <class T> T *data() const {
    if (sizeof(T) != dtype_size(dtype_)) throw std::invalid_argument("data<T>() of another element size");
    return reinterpret_cast<T *>(bytes_->data());
  }
  void *bytes() const { return bytes_->data(); }

 private:
  Shape shape_;
  DType dtype_;
  std::shared_ptr<std::vector<std::uint8_t>> bytes_;
};

inline void check(const Tensor &x, const Tensor::Shape &shape, DType dtype, const char *name) {
  if (x.shape() != shape || x.dtype() != dtype)
    throw std::invalid_argument(std::string("the argument ") + name + " has another shape or type than the program");
}

}  // namespace pyflame
#endif
"""


def _get_cpp_type(parameter: CParameter) -> str:
    name = str(parameter.data["dtype"])
    known = CPP_TYPES.get(name, name if name.startswith(("int", "uint")) and name != "int4" else "byte")
    return f"pyflame::DType::{known}"


def _format_shape(parameter: CParameter) -> str:
    return "{" + ", ".join(format_size(n) for n in parameter.data["shape"]) + "}"


def format_cpp_header(program: CProgram) -> str:
    """A C++ function from tensors to the result (a vector of several), which throws where the library fails."""
    inputs = [p for p in program.passed if p.data["role"] != "output"]
    outputs = [p for p in program.passed if p.data["role"] == "output"]
    known: dict[str, str] = {}
    for p in inputs:
        for axis, size in enumerate(p.data["shape"]):
            if isinstance(size, Mapping) and size[SIZE_KEY] in program.sizes and not p.scalar:
                known.setdefault(size[SIZE_KEY], f"{p.name}.shape().at({axis})")
    given = [f"std::int64_t {make_c_name(n)}" for n in program.sizes if n not in known]
    given += [f"{p.c_type} {p.name}" if p.scalar else f"const pyflame::Tensor &{p.name}" for p in inputs]
    lines = [f"  const std::int64_t {make_c_name(n)} = {source};" for n, source in known.items()]
    for p in inputs:
        if not p.scalar:
            lines.append(f'  pyflame::check({p.name}, {_format_shape(p)}, {_get_cpp_type(p)}, "{p.name}");')
    lines += [f"  pyflame::Tensor {p.name}({_format_shape(p)}, {_get_cpp_type(p)});" for p in outputs]
    passed = [*map(make_c_name, program.sizes)]
    passed += [p.name if p.scalar else f"static_cast<{p.c_type} *>({p.name}.bytes())" for p in program.passed]
    lines += [f"  if (int result = ::{program.name}({', '.join(passed)}))"]
    lines += [f"    throw std::runtime_error({program.name}_error(result));"]
    one = len(outputs) == 1
    lines += [f"  return {outputs[0].name};" if one else f"  return {{{', '.join(p.name for p in outputs)}}};"]
    kind = "pyflame::Tensor" if one else "std::vector<pyflame::Tensor>"
    body = "\n".join(lines)
    return f"""\
/* {program.name} as a C++ function of tensors. */
#ifndef {program.name.upper()}_HPP
#define {program.name.upper()}_HPP
#include "{program.name}.h"
#include "pyflame/pyflame.hpp"

namespace programs {{

inline {kind} {program.name}({", ".join(given)}) {{
{body}
}}

}}  // namespace programs
#endif
"""


def make_common_files(program: CProgram) -> dict[str, bytes | str]:
    """The header, the C++ wrapper and the example of a program: the same for every target."""
    return {
        f"{program.name}.h": format_header(program, f"Tessera {find_version('tessera')}"),
        f"{program.name}.hpp": format_cpp_header(program),
        "pyflame/pyflame.hpp": TENSOR_HEADER,
        "example.c": format_example(program),
    }
