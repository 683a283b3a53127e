"""Speed of generated code: `python tests/codegen/measure.py [threads]` prints GFLOP/s, GB/s and times."""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import numpy as np  # noqa: E402
from test_matmul import matmul  # noqa: E402
from tilekernels import Kernel  # noqa: E402

from tessera.codegen.llvm import BACKEND  # noqa: E402
from tessera.codegen.llvm.runtime.jit import compile_object  # noqa: E402
from tessera.ops.dialects import tile  # noqa: E402
from tessera.ops.tensor import elementwise as e  # noqa: E402
from tessera.ops.tensor import reduce  # noqa: E402

THREADS = int(sys.argv[1]) if len(sys.argv) > 1 else None


def best(module, arrays, rounds=15):
    """The least time of a run, and the time it takes to compile."""
    artifact = BACKEND.emit(module, {})
    begin = time.perf_counter()
    compile_object(artifact.text("kernels.ll"))
    compiled = time.perf_counter() - begin
    program = BACKEND.runtime(artifact, THREADS)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        program.run(arrays)
        times.append(time.perf_counter() - begin)
    return min(times), compiled


def product(*sizes, **kinds):
    seconds, compiled = best(*matmul(*sizes, **kinds))
    m, n, k = sizes[:3]
    print(f"matmul {sizes} {kinds or ''}: {2 * m * n * k / seconds / 1e9:.0f} GFLOP/s, compiled in {compiled:.2f} s")


def rows(name, build, shape=(4096, 384), block=16):
    x, out = np.random.default_rng(0).normal(size=shape).astype(np.float32), np.zeros(shape, np.float32)
    k = Kernel(x, out)
    at = k(e.mul, k(tile.program_id), block)
    k.store(k.params[1], build(k, k.load(k.params[0], at, 0, shape=(block, shape[1])), (block, shape[1])), at, 0)
    seconds, compiled = best(k.module((shape[0] // block,)), [x, out])
    print(
        f"{name} {shape}: {seconds * 1e6:.0f} us, {2 * x.nbytes / seconds / 1e9:.1f} GB/s, compiled in {compiled:.2f} s"
    )


def softmax(k, x, shape):
    top = k.broadcast(k(reduce.max, x, axis=(-1,), keepdims=True), *shape)
    weights = k(e.exp, k(e.sub, x, top))
    return k(e.div, weights, k.broadcast(k(reduce.sum, weights, axis=(-1,), keepdims=True), *shape))


if __name__ == "__main__":
    product(128, 128, 384, 128, 128, 384)
    for tiles in ((128, 128, 384), (128, 128, 64), (64, 256, 384), (64, 128, 384)):
        product(4096, 1536, 384, *tiles)
    product(4096, 384, 1536, 128, 128, 384)
    product(1024, 1024, 1024, 128, 128, 256)
    rows("copy", lambda k, x, shape: x)
    rows("exp", lambda k, x, shape: k(e.exp, x))
    rows("erf", lambda k, x, shape: k(e.erf, x))
    rows("softmax", softmax)
