import tessera as ts


def dense(x: ts.Tensor["N", "D"], w: ts.Tensor["D", "M"]) -> ts.Tensor["N", "M"]:
    return x @ w


def program(x: ts.Tensor["B", 512], w: ts.Tensor[768, 10]):
    return dense(x, w)
