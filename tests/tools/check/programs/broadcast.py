import tessera as ts


def program(x: ts.Tensor["B", "S", "D"], y: ts.Tensor["B", "K", "D"]) -> ts.Tensor["B", "S", "D"]:
    return x + y
