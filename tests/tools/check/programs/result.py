import tessera as ts


def program(x: ts.Tensor["B", "S", "D"]) -> ts.Tensor["B", "D"]:
    return x.sum(axis=-1)
