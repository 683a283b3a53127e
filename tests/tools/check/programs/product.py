import tessera as ts


@ts.jit
def program(q: ts.Tensor["B", "S", 64], k: ts.Tensor["B", "T", 64]):
    scale = 8.0
    scores = q @ k / scale
    return ts.softmax(scores)
