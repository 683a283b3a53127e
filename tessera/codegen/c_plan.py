"""C host code: the host plan of an artifact as C11 text, with its header and a C++ wrapper, for use without Python.

A generator supplies the statements of a launch; what is here is the same for all: parameters, sizes, control flow,
messages of failures, the header, an example, and a C++ wrapper with the names of PyFlame's C++ summary.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.artifact import SIZE_KEY, Artifact, find_version
from tessera.codegen.diagnostics import Site
from tessera.codegen.plan_execution import find_steps
from tessera.core.errors import ArtifactError, Location, UnsupportedOpError
from tessera.core.types import as_dtype

# Web modules: what the generator of a WebAssembly object and its callers agree on.


MACHINE = "wasm32"
OBJECT_FILE, DESCRIPTION_FILE = "kernels.o", "program.json"
# The functions of a module: the first executes the launch plan, the second gives the address of the parameters.
RUN, BASE = "tessera_run", "tessera_base"
MAX_BYTES = 1 << 31  # of all memory of a module: browsers give 2 to 4 GiB


# C text.


C_TYPES = {
    "f64": "double", "f32": "float", "tf32": "float", "f16": "uint16_t", "bf16": "uint16_t", "bool": "uint8_t",
    **{f"int{n}": f"int{n}_t" for n in (8, 16, 32, 64)}, **{f"uint{n}": f"uint{n}_t" for n in (8, 16, 32, 64)},
}  # fmt: skip
# Names that mean something else in the C text: keywords, what the text itself defines, and the C library's.
_TAKEN = frozenset(
    "memory load module context processors device made status text weights given size NULL "
    "auto break case char const continue default do double else enum extern float for goto if inline int long "
    "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
    "bool class new delete this template typename namespace operator private public protected asm and or not xor "
    "try catch throw using virtual friend mutable explicit export true false main argc argv from to fill task "
    "launch failed execute address read_flag one_call workspace slots result kernel floor_divide floor_remainder "
    "omp_get_max_threads omp_get_thread_num programs pyflame abort abs acos acosh aligned_alloc asin asinh atan "
    "atan2 atanh atof atoi atoll calloc cbrt ceil close copysign cos cosh div erf erfc exit exp exp2 expm1 fabs "
    "fclose fdim floor fma fmax fmin fmod fopen fprintf fputs fread free frexp fwrite hypot j0 j1 jn labs ldexp "
    "lgamma log log10 log1p log2 logb lrint lround malloc memchr memcmp memcpy memmove memset modf nan nearbyint "
    "nextafter open pow printf putchar puts qsort rand random read realloc remainder remove rename rint round "
    "scalbn select send signal sin sinh sleep sqrt srand stderr stdin stdout strlen system tan tanh tgamma time "
    "trunc write y0 y1 yn".split()
)
_NUMBERED = re.compile(r"(n?i|argument|kernel)\d+")  # variables of the C text
OUT_OF_MEMORY, BAD_SIZES, FIRST_SITE = 1, 2, 3  # results of the C function; 0 is success
ALIGN = 64


def make_c_name(text: str) -> str:
    """A C identifier for a name.

    >>> make_c_name("params.w"), make_c_name("<lambda>"), make_c_name("int"), make_c_name("2x")
    ('params_w', 'lambda', 'int_', 'x2x')
    """
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "program"
    name = f"x{name}" if name[0].isdigit() else name
    if _NUMBERED.fullmatch(name):
        return f"{name}_"
    return f"{name}_" if name in _TAKEN or name.removesuffix("f") in _TAKEN or name.startswith("tessera_") else name


# Sizes: whole numbers, or expressions of the names of sizes.

_C_OPERATORS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_C_FUNCTIONS: dict[type, str] = {ast.FloorDiv: "floor_divide", ast.Mod: "floor_remainder"}
_C_RELATIONS: dict[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
SIZE_FUNCTIONS = """\
static inline int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t floor_remainder(int64_t a, int64_t b) { return a - floor_divide(a, b) * b; }
"""


def format_size(data: Any) -> str:
    """A size of a plan as a C expression.

    >>> format_size(3), format_size({"size": "2*B+1"}), format_size({"size": "(B+7)//8"})
    ('3', '((2 * B) + 1)', 'floor_divide((B + 7), 8)')
    """
    if isinstance(data, Mapping):
        return format_expression(str(data[SIZE_KEY]))
    return str(int(data)) if abs(int(data)) < 1 << 31 else f"INT64_C({int(data)})"


def format_expression(text: str) -> str:
    """An expression of sizes, or a relation between them, as C.

    Raises:
        ArtifactError: it has another form.
    """
    try:
        return _format_tree(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, AttributeError, ValueError, RecursionError):
        raise ArtifactError(f"{text[:80]!r} is no expression of sizes", suggestion="build it again") from None


def _format_tree(tree: Any) -> str:
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return str(tree.value)
    if isinstance(tree, ast.Name):
        return make_c_name(tree.id)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return f"(-{_format_tree(tree.operand)})"
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return " && ".join(_format_tree(v) for v in tree.values)
    if isinstance(tree, ast.Compare):
        sides = [_format_tree(v) for v in (tree.left, *tree.comparators)]
        signs = [_C_RELATIONS[type(o)] for o in tree.ops]
        return " && ".join(f"({a} {s} {b})" for a, s, b in zip(sides, signs, sides[1:], strict=False))
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Pow) and isinstance(tree.right, ast.Constant):
        return "(" + " * ".join([_format_tree(tree.left)] * int(str(tree.right.value))) + ")"
    left, right = _format_tree(tree.left), _format_tree(tree.right)
    if type(tree.op) in _C_OPERATORS:
        return f"({left} {_C_OPERATORS[type(tree.op)]} {right})"
    return f"{_C_FUNCTIONS[type(tree.op)]}({left}, {right})"


def format_product(sizes: Sequence[Any]) -> str:
    """The product of sizes as C: 1 of none."""
    if not any(isinstance(n, Mapping) for n in sizes):
        return format_size(math.prod(int(n) for n in sizes))
    return " * ".join(format_size(n) for n in sizes)


# Parameters.


@dataclass(frozen=True)
class CParameter:
    """A parameter of the program in C: its name, its place in the plan, and how it is passed.

    `offset` is its place among the stored weights, or -1 for one that the caller passes.
    """

    name: str
    number: int
    data: Mapping[str, Any]
    written: bool
    offset: int = -1

    @property
    def c_type(self) -> str:
        """The C type of an element; formats that C lacks are their bits."""
        dtype = as_dtype(self.data["dtype"])
        return C_TYPES.get(dtype.name, "uint8_t")

    @property
    def scalar(self) -> bool:
        """Whether it is passed by value."""
        return bool(self.data["role"] == "scalar")

    @property
    def stored(self) -> bool:
        """Whether it is among the weights of the library."""
        return self.offset >= 0

    @property
    def count(self) -> str:
        """The number of elements as C."""
        return format_product(self.data["shape"])

    def declare(self) -> str:
        """Its declaration in the function's head."""
        if self.scalar:
            return f"{self.c_type} {self.name}"
        return f"{'' if self.written else 'const '}{self.c_type} *{self.name}"

    def describe(self) -> str:
        """Its shape and type, for a comment."""
        shape = ", ".join(n[SIZE_KEY] if isinstance(n, Mapping) else str(n) for n in self.data["shape"])
        return f"{self.name}: [{shape}] of {self.data['dtype']}"


@dataclass(frozen=True)
class CProgram:
    """An artifact, as C sees it: the function's name, its parameters, its sizes and its weights."""

    name: str
    plan: Mapping[str, Any]
    parameters: tuple[CParameter, ...]
    sizes: tuple[str, ...]
    weights: bytes
    sites: Sequence[Site]

    @property
    def passed(self) -> list[CParameter]:
        """The parameters that a caller passes."""
        return [p for p in self.parameters if not p.stored]

    @property
    def head(self) -> str:
        """The head of the function."""
        given = [*(f"int64_t {make_c_name(n)}" for n in self.sizes), *(p.declare() for p in self.passed)]
        return f"int {self.name}({', '.join(given) or 'void'})"


def read_program(artifact: Artifact, name: str, stored: Mapping[str, bytes]) -> CProgram:
    """What C needs of an artifact; `stored` has the bytes of its stored parameters.

    Raises:
        UnsupportedOpError: it needs Python: ops that NumPy computes, prints, the generator of random numbers.
    """
    manifest = artifact.manifest
    plan, interface = manifest["plan"], manifest["interface"]
    _check_supported(plan, interface)
    names: list[str] = [make_c_name(name)]
    parameters, weights = [], bytearray()
    for number, data in enumerate(plan["params"]):
        own = make_c_name(data["name"] or f"x{number}")
        while own in names or own in map(make_c_name, plan.get("sizes", ())):
            own += "_"
        names.append(own)
        written = number in plan["written"] or data["role"] == "output"
        offset = -1
        if data["role"] != "output" and data["name"] in stored:
            if written:
                raise UnsupportedOpError(f"{name} writes its stored weights {own}", expected="weights that it reads")
            weights += bytes(-len(weights) % ALIGN)
            offset = len(weights)
            weights += stored[data["name"]]
        parameters.append(CParameter(own, number, data, written, offset))
    return CProgram(
        make_c_name(name), plan, tuple(parameters), tuple(plan.get("sizes", ())), bytes(weights),
        plan.get("reports", ()),
    )  # fmt: skip


def _check_supported(plan: Mapping[str, Any], interface: Mapping[str, Any]) -> None:
    problem, place = "", ""
    if plan.get("calls"):
        call = plan["calls"][0]
        problem, place = f"the op {call['op']} is computed by NumPy", str(Location(*call["place"]))
    if any(site["kind"] == "print" for site in plan.get("reports", ())):
        problem = "it prints"
    if plan.get("meeting"):
        problem = "it has a grid barrier, for which each program needs a thread"
    if "random" in interface:
        problem = "it draws random numbers from Python's generator"
    if plan.get("reused"):
        problem = "its results take the memory of arguments"
    if problem:
        where = f" ({place})" if place else ""
        raise UnsupportedOpError(
            f"a standalone program cannot be made: {problem}{where}", expected="kernels alone",
            suggestion="build an artifact or a bundle, which run with Python",
        )  # fmt: skip


# The plan as statements.

# launch(number) gives the statements of one launch; address(argument) is an argument's address.
LaunchText = Callable[[int], Iterator[str]]


def format_address(program: CProgram, argument: Mapping[str, Any]) -> str:
    """The address of an argument of a launch as `char *`: in a parameter or in the workspace."""
    moves = [f"i{loop} * {format_size(count)}" for loop, count in argument.get("moves", ())]
    if "param" in argument:
        parameter = program.parameters[argument["param"]]
        base, offset = f"(char *){parameter.name}", []
    else:
        base, offset = "workspace", [format_size(argument["offset"])]
    return " + ".join([base, *offset, *moves])


def format_steps(program: CProgram, launch: LaunchText) -> Iterator[str]:
    """The statements of the plan's steps."""
    return _format_steps(program, find_steps(program.plan), launch, "  ")


def _format_steps(
    program: CProgram, steps: Sequence[Mapping[str, Any]], launch: LaunchText, indent: str
) -> Iterator[str]:
    for step in steps:
        inner = indent + "  "
        if "run" in step:
            for number in range(*step["run"]):
                yield from (indent + line for line in launch(number))
        elif "loop" in step:
            index = f"i{step['loop']}"
            first, count, by = (format_size(step[k]) for k in ("first", "count", "step"))
            yield f"{indent}for (int64_t n{index} = 0; n{index} < {count}; n{index}++) {{"
            yield f"{inner}const int64_t {index} = {first} + n{index} * {by};"
            yield f"{inner}(void){index};"
            yield from _format_steps(program, step["body"], launch, inner)
            yield f"{indent}}}"
        elif "while" in step:
            yield f"{indent}for (;;) {{"
            yield from _format_steps(program, step["test"], launch, inner)
            yield f"{inner}if (!{format_flag(program, step['while'])}) break;"
            yield from _format_steps(program, step["body"], launch, inner)
            yield f"{indent}}}"
        else:
            yield f"{indent}if ({format_flag(program, step['if'])}) {{"
            yield from _format_steps(program, step["then"], launch, inner)
            yield f"{indent}}} else {{"
            yield from _format_steps(program, step["else"], launch, inner)
            yield f"{indent}}}"


def format_flag(program: CProgram, number: int) -> str:
    """The value of a flag."""
    return f"read_flag({format_address(program, program.plan['flags'][number])})"


def format_checks(program: CProgram) -> Iterator[str]:
    """The statements that refuse sizes which the program does not take."""
    for name in program.sizes:
        yield f"  if ({make_c_name(name)} < 1) return {BAD_SIZES};"
    for text in program.plan.get("constraints", ()):
        yield f"  if (!({format_expression(text)})) return {BAD_SIZES};"


def format_errors(program: CProgram) -> Iterator[str]:
    """The function that explains a result."""
    yield f"const char *{program.name}_error(int result) {{"
    yield "  switch (result) {"
    sizes = "; ".join(["sizes from 1 on", *program.plan.get("constraints", ())])
    for code, text in ((0, "success"), (OUT_OF_MEMORY, "out of memory"), (BAD_SIZES, f"wrong sizes: expected {sizes}")):
        yield f"    case {code}: return {quote(text)};"
    for number, site in enumerate(program.sites):
        yield f"    case {FIRST_SITE + number}: return {quote(describe_site(site))};"
    yield '    default: return "unknown result";'
    yield "  }"
    yield "}"


def describe_site(site: Site) -> str:
    """What went wrong at a site, and where."""
    file, line, *_ = site.get("place") or site.get("location") or ("?", 0)
    what = "an index is out of bounds" if site["kind"] == "index" else site.get("text") or "an assertion failed"
    return f"{str(file).rsplit('/', 1)[-1]}:{line}: {what}"


def quote(text: str) -> str:
    """A C string literal."""
    return json.dumps(text).replace("??", "?\\?")


# The header, a C++ wrapper, and an example.


def format_header(program: CProgram, made_by: str) -> str:
    """The header of the library."""
    guard = f"{program.name.upper()}_H"
    described = "\n".join(f"   {'out ' if p.written else 'in  '}{p.describe()}" for p in program.passed)
    return f"""\
/* {program.name}: made by {made_by}.

{described}

   Arrays are row-major and contiguous, and do not overlap; f16, bf16 and fp8 are passed as their bits. The result is
   0, or a number that {program.name}_error explains. Calls from several threads run one after the other. */
#ifndef {guard}
#define {guard}
#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

{program.head};
const char *{program.name}_error(int result);

#ifdef __cplusplus
}}
#endif
#endif
"""


def format_example(program: CProgram) -> str:
    """A program that calls the library: inputs are read from a file, else zeros; another takes results."""
    lines = ["#include <stdio.h>", "#include <stdlib.h>", f'#include "{program.name}.h"', ""]
    lines += ["static void *take(FILE *from, size_t size, size_t count) {", "  void *data = calloc(count + 1, size);"]
    lines += ["  if (data && (!from || fread(data, size, count, from) == count)) return data;"]
    lines += ['  fputs(data ? "the input is too short\\n" : "there is not enough memory\\n", stderr);']
    lines += ["  exit(2);", "}", ""]
    lines += ["/* Reads the inputs, one after the other, from the file argv[1]; writes the results to argv[2]. */"]
    lines += ["int main(int argc, char **argv) {"]
    lines += ['  FILE *from = argc > 1 ? fopen(argv[1], "rb") : NULL, *to = argc > 2 ? fopen(argv[2], "wb") : NULL;']
    lines += ['  if ((argc > 1 && !from) || (argc > 2 && !to)) { perror("a file cannot be opened"); return 2; }']
    first = 3
    for number, name in enumerate(program.sizes):
        own = make_c_name(name)
        lines += [f"  int64_t {own} = argc > {first + number} ? atoll(argv[{first + number}]) : 1;"]
    for p in program.passed:
        count = 1 if p.scalar else p.count
        taken = f"take({'NULL' if p.data['role'] == 'output' else 'from'}, sizeof({p.c_type}), {count})"
        declared = f"{p.name} = *({p.c_type} *){taken}" if p.scalar else f"*{p.name} = {taken}"
        lines += [f"  {p.c_type} {declared};"]
    given = [*map(make_c_name, program.sizes), *(p.name for p in program.passed)]
    lines += [f"  int result = {program.name}({', '.join(given)});"]
    lines += [f'  if (result) {{ fprintf(stderr, "%s\\n", {program.name}_error(result)); return 1; }}']
    for p in (p for p in program.passed if p.written):
        lines += [f"  if (to) fwrite({p.name}, sizeof *{p.name}, {p.count}, to);"]
    lines += ['  if (to && (ferror(to) || fclose(to))) { perror("the results were not written"); return 2; }']
    lines += [f'  puts("{program.name}: success");', "  return 0;", "}", ""]
    return "\n".join(lines)


# C++ wrapper: a header over a standalone library, whose tensors have the names of PyFlame's C++ summary.


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
