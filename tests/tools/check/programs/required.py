import tessera as ts


@ts.require("D % 8 == 0")
def aligned(x: ts.Tensor["B", "D"]):
    return x * 2.0


def program(x: ts.Tensor["B", 12], y: ts.Tensor["B", 16]):
    ts.require("B % 4 == 0")
    return aligned(y), aligned(x)
