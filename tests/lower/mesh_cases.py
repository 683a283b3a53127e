"""Programs with data movement, selection, reduction and control flow, for the mesh lowering and for CSL."""

import numpy as np

import tessera as ts


def r(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


WHOLE = np.arange(-20, 20, dtype=np.int32).reshape(5, 8)
SQUARE, NANS = r(7, 7), np.where(r(6, 10) > 1, np.float32("nan"), r(6, 10))


def running(x):
    return ts.scan(lambda c, v: (c * 0.5 + v, ts.sum(c * v)), ts.zeros((x.shape[1],)), x)[1]


def running_back(x):
    return ts.scan(lambda c, v: (c * 0.5 + v, ts.sum(c * v)), ts.zeros((x.shape[1],)), x, reverse=True)[1]


def doubled(x):
    return ts.while_loop(lambda v: ts.sum(v) < 100.0, lambda v: v * 2.0, ts.abs(x))


def heads(x, y):
    return ts.softmax(x @ ts.transpose(y), axis=-1) @ y


CASES = {
    "slice": (lambda x: (x @ x)[1:5:2, 2:], (SQUARE,)),
    "turned on itself": (lambda x: x + x.T, (SQUARE,)),
    "concatenate": (lambda x, y: ts.concatenate([x @ y, y], axis=1), (r(6, 6), r(6, 6))),
    "pad": (lambda x: ts.pad(x @ x, ((1, 2), (0, 3)), value=2.0), (SQUARE,)),
    "rows by number": (lambda x, i: ts.embedding(x @ x, i), (SQUARE, np.array([1, 5, 0, 3, 2], np.int32))),
    "largest of NaNs": (lambda x: (ts.max(x, axis=0), ts.min(x, axis=1), ts.max(x)), (NANS,)),
    "largest whole number": (lambda x: (ts.max(x, axis=0), ts.min(x), ts.sum(x, axis=1)), (WHOLE,)),
    "narrow whole number": (lambda x: (ts.max(x, axis=0), ts.min(x), x // 3), (WHOLE.astype(np.int16),)),
    "argmax": (lambda x: ts.argmax(x, axis=0), (NANS,)),
    "argmin": (lambda x: ts.argmin(x @ x, axis=1), (SQUARE,)),
    "flat": (lambda x: (x @ x).reshape(49) * 2.0, (SQUARE,)),
    "batch": (lambda a, b: a @ b, (r(6, 5, 4), r(6, 4, 6))),
    "heads": (heads, (r(4, 8, 4), r(4, 8, 4))),
    "far neighbour": (lambda x: ts.mesh_shift(x, axis=0, shift=3), (r(6, 6),)),
    "scan": (running, (r(5, 6),)),
    "scan back": (running_back, (r(5, 6),)),
    "while": (doubled, (r(5, 6),)),
    "cond": (lambda x: ts.cond(ts.sum(x) > 0.0, lambda v: v @ v, lambda v: -v, x), (r(6, 6),)),
    "sum of whole numbers": (lambda x: ts.sum(x, axis=1), (WHOLE,)),
    "product of whole numbers": (lambda x: x @ x.T, (WHOLE,)),
    "64 bits": (lambda x: x * x + ts.arange(8), (WHOLE.astype(np.int64) * 10**8,)),
    "8 bits": (lambda x: ts.cast(ts.cast(x, dtype=ts.int8) * ts.cast(x, dtype=ts.int8), dtype=ts.int32), (WHOLE * 9,)),
    "to whole numbers": (lambda x: ts.cast(x * 1e9, dtype=ts.int32), (NANS,)),
    "rest": (lambda x, y: x // y + x % y, (r(6, 6) * 10, r(6, 6))),
    "bits": (lambda x: (x << 2) + (x >> 1), (WHOLE,)),
    "largest of f16": (lambda x: ts.max(x, axis=1), (r(6, 10, dtype=np.float16),)),
}
