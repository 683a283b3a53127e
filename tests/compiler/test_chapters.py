"""The programming model, chapters 11 and 13.1: each code block, whole and running."""

from types import SimpleNamespace

import numpy as np
import pytest

import tessera
import tessera as ts
from tessera import Schedule
from tessera.compiler import GraphIR, GraphPass, Target, only
from tessera.runtime.program import prepare

R = np.random.default_rng(0)
X, W, B = (R.standard_normal(s).astype("f4") for s in ((4, 8), (8, 8), (8,)))


def agrees(program, function, *args):
    np.testing.assert_allclose(program(*args).numpy(), ts.jit(function)(*args).numpy(), rtol=2e-5, atol=2e-6)


def count_kernels(program, *args):
    module = prepare(program, args, "llvm").levels["schedule"]
    return sum(n.op.name == "schedule.kernel" for n in module.main.body.nodes)


@pytest.fixture(autouse=True)
def _no_pass_stays():
    with only():
        yield


def test_11_1_graph_level_optimizations():
    calls = []

    def fused_linear_relu(x, w, b):
        calls.append("linear")
        return ts.maximum(x @ w + b, 0.0)

    def fused_norm_gelu(x, g, b):
        calls.append("norm")
        return ts.gelu(ts.layer_norm(x, weight=g, bias=b))

    @tessera.compiler.graph_pass
    class OperatorFusion(GraphPass):
        """Fuse compatible operations"""

        def run(self, graph: GraphIR) -> GraphIR:
            patterns = [
                (["matmul", "add", "relu"], fused_linear_relu),
                (["layernorm", "gelu"], fused_norm_gelu),
            ]
            for pattern, replacement in patterns:
                graph = self.replace_pattern(graph, pattern, replacement)
            return graph

    @tessera.compiler.graph_pass
    class ConstantFolding(GraphPass):
        """Evaluate constants at compile time"""

        def run(self, graph: GraphIR) -> GraphIR:
            for node in graph.nodes:
                if self.all_inputs_constant(node):
                    result = self.evaluate(node)
                    graph.replace_with_constant(node, result)
            return graph

    @tessera.compiler.graph_pass
    class DeadCodeElimination(GraphPass):
        """Remove unused operations"""

        def run(self, graph: GraphIR) -> GraphIR:
            used = self.find_used_nodes(graph)
            return graph.keep_only(used)

    def model(x, w, b):
        ts.exp(x)  # unused
        return ts.gelu(ts.layer_norm(ts.relu(x @ w + b), weight=b, bias=b)) * ts.exp(ts.full((8,), 0.5))

    program = ts.jit(model)
    found = program(X, W, B).numpy()
    assert calls == ["linear", "norm"]
    made = ts.compiler.run_passes(
        program.trace(X, W, B).function, [OperatorFusion, ConstantFolding, DeadCodeElimination]
    )
    assert "ts.exp" not in [n.op.name for n in made.body.nodes]
    with ts.compiler.only():
        np.testing.assert_allclose(found, ts.jit(model)(X, W, B).numpy(), rtol=1e-6)


def test_11_2_schedule_generation():
    chosen = []

    class ScheduleGenerator:
        """Generate optimized schedules"""

        def generate(self, kernel, target) -> Schedule:
            compute_intensity = kernel.arithmetic_intensity()
            memory_pattern = kernel.memory_access_pattern()
            assert memory_pattern in ("contiguous", "strided", "broadcast")
            if compute_intensity > 10:
                return self.compute_bound_schedule(kernel, target)
            else:
                return self.memory_bound_schedule(kernel, target)

        def compute_bound_schedule(self, kernel, target):
            chosen.append("compute")
            return Schedule(tile_m=128, tile_n=128, tile_k=32, warps=8, stages=2, vector_width=4)

        def memory_bound_schedule(self, kernel, target):
            chosen.append("memory")
            return Schedule(tile_m=64, tile_n=64, tile_k=64, warps=4, stages=4, vector_width=8)

    @tessera.compiler.schedule_pass
    class ScheduleOptimizer(ts.compiler.ScheduleOptimizer):
        """Optimize existing schedules"""

        def optimize(self, schedule: Schedule, kernel) -> Schedule:
            schedule = self.tile_loops(schedule)
            schedule = self.unroll_loops(schedule)
            schedule = self.vectorize(schedule)
            schedule = self.optimize_data_layout(schedule)
            schedule = self.insert_prefetching(schedule)
            return self.parallelize(schedule)

    tessera.compiler.schedule_pass(ScheduleGenerator)
    a = R.standard_normal((96, 96)).astype("f4")
    model = lambda a: ts.softmax(ts.relu(a @ a))  # noqa: E731
    agrees(ts.jit(model, target="llvm"), model, a)
    assert set(chosen) == {"compute", "memory"}


class PTXCodeGen(tessera.CodeGenerator):
    """Generate text for a machine with numbered registers"""

    name = "registers"

    def generate(self, tile_ir) -> str:
        ptx = []
        for function in tile_ir.functions[1:]:
            ptx.append(self.gen_signature(function))
            regs = self.allocate_registers(function)
            ptx.append(f".reg .b32 %r<{len(regs)}>;")
            for op in function.body.nodes:
                ptx.append(self.gen_op(op, regs))
        return "\n".join(ptx)

    def gen_signature(self, function):
        return f".entry {function.name} ({', '.join(str(p.type) for p in function.params)})"

    def allocate_registers(self, function):
        values = [*function.params, *(v for n in function.body.walk() for v in n.results)]
        return {v: f"%r{i}" for i, v in enumerate(values)}

    def gen_op(self, op, regs):
        outs, args = ([regs[v] for v in vs] for vs in (op.results, op.args))
        return f"{op.op.name.split('.')[1]} {', '.join([*outs, *args])};"


def test_11_3_code_generation():
    @tessera.compiler
    class UniversalCompiler:
        """Compile to multiple targets"""

        def compile(self, graph: GraphIR, targets):
            binaries = {}
            for target in targets:
                optimized = self.optimize_for_target(graph, target)
                schedule = self.generate_schedule(optimized, target)
                if target.type == "cuda":
                    target_ir = self.lower_to_ptx(optimized, schedule)
                elif target.type == "cpu":
                    target_ir = self.lower_to_llvm(optimized, schedule)
                binaries[target] = self.codegen(target_ir, target)
            return binaries

    model = lambda x, w: ts.relu(x @ w)  # noqa: E731
    graph = GraphIR(ts.jit(model).trace(X, W).function)
    binaries = UniversalCompiler().compile(graph, [Target("cuda"), Target("cpu")])
    for binary in binaries.values():
        np.testing.assert_allclose(binary(X, W)[0], np.maximum(X @ W, 0), rtol=1e-5, atol=1e-6)
    text = PTXCodeGen().emit(binaries[Target("cpu")].tile_ir).text("lambda_.txt")
    assert ".entry" in text and "dot %r" in text and "store " in text


def test_13_1_automatic_and_manual_fusion():
    dim = 8
    weights = SimpleNamespace(up=R.standard_normal((8, 32)).astype("f4"), down=R.standard_normal((32, 8)).astype("f4"))

    def plain(x):
        x = ts.layer_norm(x)
        x = x @ weights.up
        x = ts.gelu(x)
        return x @ weights.down

    @tessera.fusion.auto
    def unfused_model(x):
        """Automatically fuses compatible operations"""
        assert weights.up.shape == (dim, 4 * dim)
        return plain(x)

    def transformer_block(x):
        x = x + ts.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]
        return ts.gelu(ts.layer_norm(x) @ weights.up + 1.0) @ weights.down

    @tessera.fusion.manual([
        ["layernorm", "matmul", "add", "gelu"],  # Fuse these
        ["attention", "add"],  # And these
    ])  # fmt: skip
    def manually_fused(x):
        return transformer_block(x)

    agrees(unfused_model, plain, X)
    agrees(manually_fused, transformer_block, X)
    assert count_kernels(unfused_model, X) == count_kernels(ts.jit(plain), X) < count_kernels(ts.fusion.none(plain), X)


def test_13_1_custom_fusion_patterns():
    @tessera.fusion.pattern
    class CustomFusion:
        """Define custom fusion rules"""

        @staticmethod
        def should_fuse(op1, op2):
            if op1.memory_bound and op2.compute_bound:
                return True
            if op1.output_size == op2.input_size:
                return True
            return False

        @staticmethod
        def fuse(ops):
            """Generate fused kernel"""
            return tessera.kernel.generate(
                inputs=ops[0].inputs, outputs=ops[-1].outputs, body=tessera.kernel.sequence(ops)
            )

    model = lambda x, w, b: ts.tanh(ts.relu(x @ w + b) * 2.0)  # noqa: E731
    agrees(CustomFusion(model), model, X, W, B)
    assert count_kernels(CustomFusion(model), X, W, B) < count_kernels(ts.fusion.none(model), X, W, B)


def test_13_1_vertical_and_horizontal_fusion():
    expensive_compute = lambda x: ts.exp(ts.sin(x))  # noqa: E731
    simple_transform = lambda y: y * 2.0 + 1.0  # noqa: E731

    @tessera.fusion.vertical
    def vertical_fusion(x):
        y = expensive_compute(x)
        z = simple_transform(y)
        return z

    @tessera.fusion.horizontal
    def horizontal_fusion(x, y):
        """Fuse independent operations"""
        a = ts.exp(x)
        b = ts.tanh(y)
        return a, b

    assert count_kernels(vertical_fusion, X) == 1 and count_kernels(horizontal_fusion, X, X) == 1
    np.testing.assert_allclose(vertical_fusion(X).numpy(), np.exp(np.sin(X)) * 2 + 1, rtol=1e-5)
    a, b = horizontal_fusion(X, X)
    np.testing.assert_allclose(a.numpy(), np.exp(X), rtol=1e-5)
    np.testing.assert_allclose(b.numpy(), np.tanh(X), rtol=1e-5)
