import tessera as ts


def program(x: ts.Tensor["B", 4], y: ts.Tensor["B", 3], z: ts.Tensor[4, "B"]):
    bad = x + y
    silent = ts.relu(bad) @ z
    parts = [silent]
    for _ in range(2):
        parts.append(x @ z.reshape(4, 3))
    a, b = silent.shape
    total = ts.sum(x, axis=2)
    return ts.concatenate([x, y], axis=0), total, parts, a, b
