"""The parser: both forms of MLIR, constants, locations, and text that is wrong."""

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ParseError, TesseraError, UnknownNameError, UnsupportedOpError
from tessera.stablehlo.parser import parse

FUNCTION = "func.func @main({}) -> {} {{\n  {}\n}}"
PRETTY = FUNCTION.format("%x: tensor<2x3xf32>", "tensor<3xf32>", """
  %c = stablehlo.constant dense<0.000000e+00> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %c) applies stablehlo.add across dimensions = [0]
    : (tensor<2x3xf32>, tensor<f32>) -> tensor<3xf32>
  return %0 : tensor<3xf32>""")  # fmt: skip


def scalar(operation):
    """A function that returns the result of an operation."""
    return FUNCTION.format("", "tensor<f32>", f"%0 = {operation} : tensor<f32>\n return %0 : tensor<f32>")


RECURSIVE = FUNCTION.format("", "tensor<f32>", "%0 = call @main() : () -> tensor<f32>\n return %0 : tensor<f32>")
GENERIC = """
"builtin.module"() <{sym_name = "m"}> ({
  "func.func"() <{function_type = (tensor<2x3xf32>) -> tensor<3xf32>, sym_name = "main"}> ({
  ^bb0(%arg0: tensor<2x3xf32>):
    %0 = "stablehlo.constant"() <{value = dense<0.0> : tensor<f32>}> : () -> tensor<f32>
    %1 = "stablehlo.reduce"(%arg0, %0) <{dimensions = array<i64: 0>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %2 = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
      "stablehlo.return"(%2) : (tensor<f32>) -> ()
    }) : (tensor<2x3xf32>, tensor<f32>) -> tensor<3xf32>
    "func.return"(%1) : (tensor<3xf32>) -> ()
  }) : () -> ()
}) : () -> ()
"""


@pytest.mark.parametrize("text", [PRETTY, GENERIC])
def test_both_forms(text):
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(ts.stablehlo.load(text)(x).numpy(), [5, 7, 9])


@pytest.mark.parametrize(
    ("attribute", "want"),
    [
        ("dense<[[1, -2], [3, 4]]> : tensor<2x2xi8>", np.int8([[1, -2], [3, 4]])),
        ("dense<7> : tensor<3xui64>", np.full(3, 7, "u8")),
        ('dense<"0x0000803F000000C0"> : tensor<2xf32>', np.float32([1, -2])),
        ("dense<[0x7F800000, 1.5, -2.5e-1]> : tensor<3xf32>", np.float32([np.inf, 1.5, -0.25])),
        ("dense<[true, false]> : tensor<2xi1>", np.array([True, False])),
        ('dense<"0x05"> : tensor<3xi1>', np.array([True, False, True])),
        ("dense<> : tensor<0x2xf32>", np.zeros((0, 2), "f4")),
    ],
)
def test_constants(attribute, want):
    kind = attribute.rpartition(" : ")[2]
    found = ts.stablehlo.load(FUNCTION.format("", kind, f"%0 = stablehlo.constant {attribute}\n return %0 : {kind}"))()
    np.testing.assert_array_equal(found.numpy(), want)
    assert found.numpy().dtype == want.dtype


def test_locations_through_aliases_calls_and_names():
    text = """#loc = loc(unknown)
    #loc1 = loc("m.py":3:4 to :9)
    #loc2 = loc("n.py":7:0)
    func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %0 = stablehlo.negate %x : tensor<f32> loc(#loc4)
      %1 = stablehlo.negate %0 : tensor<f32> loc(fused["a", #loc2])
      return %1 : tensor<f32> loc(#loc)
    }
    #loc3 = loc(callsite(#loc1 at #loc2))
    #loc4 = loc("jit(f)/neg"(#loc3))"""
    first, second, last = parse(text, "t.mlir").functions["main"].region.operations
    assert (str(first.location), first.location.end_column) == ("m.py:3:5", 10)
    assert str(second.location) == "n.py:7:1" and str(last.location) == "t.mlir:7:7"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("module {", ParseError, "not StableHLO text"),
        ("hello", ParseError, "a module holds hello"),
        (PRETTY[:90], ParseError, "not StableHLO text"),
        ("{" * 5000, ParseError, "not StableHLO text"),
        (FUNCTION.format("", "tensor<f32>", "return %9 : tensor<f32>"), ParseError, "nothing defines %9"),
        ("func.func @other() { return }", UnknownNameError, "no function @main"),
        (FUNCTION.format("%x: tensor<?xf32>", "tensor<f32>", "return"), UnsupportedOpError, "when the program runs"),
        (FUNCTION.format("%x: tensor<2xcomplex<f32>>", "tensor<f32>", "return"), UnsupportedOpError, "complex numbers"),
        (scalar("stablehlo.what"), UnsupportedOpError, "stablehlo.what is not supported"),
        (scalar("call @main() : () ->"), ParseError, "not StableHLO text"),
        (scalar("stablehlo.constant dense<[1.0, 2.0]>"), ParseError, "do not fit"),
        (
            scalar('"stablehlo.all_reduce"() : () -> tensor<f32> loc(unknown)\n %1 = stablehlo.what'),
            UnsupportedOpError,
            "devices",
        ),
        (scalar("stablehlo.add"), ParseError, "do not fit it"),
        (RECURSIVE, UnsupportedOpError, "calls itself"),
    ],
)
def test_what_is_wrong_is_a_typed_error_with_a_place(text, error, message):
    with pytest.raises(error, match=message) as caught:
        ts.stablehlo.load(text)()
    assert isinstance(caught.value, TesseraError)
    assert caught.value.location is not None or error is UnknownNameError


BROKEN = {
    "a size that is no number": "%0 = stablehlo.add %x, %x : tensor<NaNx2xf32>",
    "a number of results": "%0:1.5 = stablehlo.add %x, %x : tensor<2xf32>",
    "a slice": "%0 = stablehlo.slice %x [0:1e9] : (tensor<2xf32>) -> tensor<1xf32>",
    "bytes": '%0 = stablehlo.constant dense<"0xABC"> : tensor<2xf32>',
    "a leading zero": "%0 = stablehlo.iota dim = 007x : tensor<2xf32>",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=list(BROKEN))
def test_malformed_numbers_are_typed_errors(line):
    text = f"func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {{\n  {line}\n  return %0 : tensor<2xf32>\n}}"
    with pytest.raises(ts.TesseraError):
        ts.stablehlo.load(text)(np.float32([1, 2]))


def test_a_repeated_element_takes_no_memory_of_its_own():
    text = "func.func @main() -> tensor<4xf32> {\n  %0 = stablehlo.constant dense<1.5> : tensor<999999999999xf32>\n  "
    ts.stablehlo.load(text + "return %0 : tensor<999999999999xf32>\n}")


def test_types_that_nest_without_end_are_a_typed_error():
    with pytest.raises(ParseError, match="nests too deeply"):
        parse("module @m { func.func public @main(%arg0: " + "(" * 3000)
