import tessera as ts


def in_fp8(x: ts.Tensor["N", ts.fp8_e4m3]):
    return -x


def program(x: ts.Tensor["N", ts.bf16]):
    h = x * 2.0
    return in_fp8(h)
