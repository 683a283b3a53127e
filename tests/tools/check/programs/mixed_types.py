import tessera as ts


def program(x: ts.Tensor["B", "D", ts.bf16], bias: ts.Tensor["D"]):
    return x + bias
