"""Every engine that runs kernels, and how a test runs a kernel on each of them."""

from tessera.runtime.program import prepare

ENGINES = (("tile", "interp"), ("device", "llvm"), ("target", "llvm"))


def results(entry, arguments, grid=(1,), group=None, engines=ENGINES):
    """What a kernel has written, engine by engine."""
    program = prepare(entry, arguments, grid=grid, group=group)
    return [program.run(*engine) for engine in engines]
