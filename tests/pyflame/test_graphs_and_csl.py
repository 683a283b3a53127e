"""Graph inspection, and CSL from lazy graphs: layouts decide the placement, the simulator's result is the eager one."""

import json

import numpy as np
import pytest

import tessera as ts
import tessera.pyflame as pf

LAYOUTS = {
    "single": (pf.MeshLayout.single_pe(), (1, 1), [-1, -1]),
    "rows": (pf.MeshLayout.row_partition(3), (3, 1), [0, -1]),
    "columns": (pf.MeshLayout.col_partition(4), (1, 4), [-1, 1]),
    "grid": (pf.MeshLayout.grid(2, 3), (2, 3), [0, 1]),
}


def compile_csl(tmp_path, x, **options):
    return pf.compile_to_csl(x, pf.CodeGenOptions(output_dir=str(tmp_path / "out"), **options))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [6, 7])
def test_a_layout_places_the_tensor(name, size, tmp_path):
    layout, grid, split = LAYOUTS[name]
    x, w = pf.randn([size, 12], layout=layout), pf.randn([12, 5])
    y = pf.relu(x @ w) + x.sum(dim=1, keepdim=True)
    result = compile_csl(tmp_path, y)
    assert result.success and result.grid == grid
    plan = json.loads(result.sources["plan.json"])
    assert plan["grid"] == list(grid) and plan["inputs"][0]["split"] == split
    last = layout.tile([size, 12], pf.PECoord(0, 0))
    assert plan["inputs"][0]["piece"] == [s.stop - s.start for s in last]
    np.testing.assert_allclose(result.run(), y.numpy(), rtol=1e-5, atol=1e-5)
    again = ts.load(result.output_dir)(x.numpy(), w.numpy())
    np.testing.assert_array_equal(np.asarray(again), result.run())


def test_layouts_of_two_tensors_make_one_mesh(tmp_path):
    a, b = (
        pf.randn([6, 4], layout=pf.MeshLayout.row_partition(2)),
        pf.randn([4, 6], layout=pf.MeshLayout.col_partition(2)),
    )
    result = compile_csl(tmp_path, a @ b)
    assert result.grid == (2, 2)
    plan = json.loads(result.sources["plan.json"])
    assert [x["split"] for x in plan["inputs"]] == [[0, -1], [-1, 1]]
    np.testing.assert_allclose(result.run(), a.numpy() @ b.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [layout for layout, _, _ in LAYOUTS.values()], ids=LAYOUTS)
@pytest.mark.parametrize("shape", [[8, 8], [7, 5], [1, 9], [5], [2, 3, 4], []])
def test_tiles_cover_a_tensor_once(layout, shape):
    count = np.zeros(shape, int)
    for row in range(layout.rows):
        for col in range(layout.cols):
            count[layout.tile(shape, pf.PECoord(row, col))] += 1
    copies = layout.num_pes // np.prod([[1, layout.rows, layout.cols][s + 1] for s in layout.sharding(len(shape))] or 1)
    assert (count == copies).all()


def test_without_layouts_the_smallest_grid_holds_the_program(tmp_path):
    a, b = pf.randn([100, 100]), pf.randn([100, 100])
    result = compile_csl(tmp_path, pf.relu(a @ b))
    assert result.success and result.grid > (1, 1)
    assert sorted(result.generated_files) == sorted(str(p) for p in (tmp_path / "out").iterdir() if p.is_file())


def test_options_reach_the_generator(tmp_path):
    x = pf.tanh(pf.ones([4, 4]))
    result = compile_csl(tmp_path, x, target="wse3", fabric_width=2, fabric_height=1, runtime_address="localhost:9000",
                         generate_debug_info=True)  # fmt: skip
    assert result.grid == (1, 2)
    assert any("wse3" in text for text in result.sources.values())
    assert any("localhost:9000" in text for text in result.sources.values())
    assert "mesh.tess" in result.sources
    np.testing.assert_allclose(result.run(), x.numpy(), rtol=1e-6)


def test_an_option_that_does_not_exist():
    options = pf.CodeGenOptions()
    with pytest.raises(AttributeError, match="tagret"):
        options.tagret = "wse3"


def test_the_generator_takes_graphs(tmp_path):
    x = pf.full([3], 2.0)
    options = pf.CodeGenOptions(output_dir=str(tmp_path / "out"))
    result = pf.CSLCodeGenerator().generate(pf.get_graph(x * x + 1.0), options)
    np.testing.assert_array_equal(result.run(), [5, 5, 5])
    assert pf.compile_to_csl(pf.get_graph(x * x), options).success


def test_errors_of_programs_are_in_the_result(tmp_path):
    big = pf.ones([1000, 1000], layout=pf.MeshLayout.single_pe())
    result = compile_csl(tmp_path, big + 1.0)
    assert not result.success and "memory" in result.error_message
    assert isinstance(result.error, ts.errors.ResourceError)
    with pytest.raises(ts.errors.ResourceError):
        result.run()


def test_a_mesh_larger_than_the_target_names_the_line_of_the_layout(tmp_path):
    x = pf.ones([2000, 4], layout=pf.MeshLayout.row_partition(1000))  # too many rows
    result = compile_csl(tmp_path, x + 1.0)
    assert not result.success and "too many rows" in result.error_message
    assert "at most 996 rows and 757 columns" in result.error_message
    small = compile_csl(tmp_path, pf.ones([4, 4], layout=pf.MeshLayout.grid(4, 4)) + 1.0, fabric_width=2)
    assert not small.success and "larger than the target" in small.error_message


def test_layouts_that_contradict_each_other(tmp_path):
    a, b = (pf.ones([8, 8], layout=pf.MeshLayout.grid(n, n)) for n in (2, 4))
    result = compile_csl(tmp_path, a + b)
    assert not result.success and "2 and of 4 rows" in result.error_message


WRONG = {
    "too large": lambda: pf.MeshLayout.grid(5000, 2),
    "zero": lambda: pf.MeshLayout.row_partition(0),
    "float": lambda: pf.MeshLayout.col_partition(2.0),
    "kind": lambda: pf.MeshLayout("diagonal"),
    "coordinate": lambda: pf.PECoord(-1, 0),
    "outside": lambda: pf.MeshLayout.grid(2, 2).tile([4, 4], pf.PECoord(2, 0)),
    "target": lambda: pf.compile_to_csl(pf.ones([2]), pf.CodeGenOptions(target="wse9")),
    "fabric": lambda: pf.compile_to_csl(pf.ones([2]), pf.CodeGenOptions(fabric_width=-1)),
    "folder": lambda: pf.compile_to_csl(pf.ones([2]), pf.CodeGenOptions(output_dir=3)),
    "options": lambda: pf.compile_to_csl(pf.ones([2]), "wse2"),
    "graph": lambda: pf.compile_to_csl([1.0]),
    "inspect": lambda: pf.get_graph(3),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_typed_errors_at_the_line_of_the_user(name):
    with pytest.raises((ts.errors.ArgumentError, ts.errors.OutOfBoundsError)) as found:
        WRONG[name]()
    assert found.value.location.line == WRONG[name].__code__.co_firstlineno


def test_graphs(capsys):
    a = pf.randn([3, 4])
    b = pf.tanh(a @ a.transpose(0, 1))
    graph = pf.get_graph(b)
    assert [node.op_type for node in graph.nodes] == ["randn", "transpose", "matmul", "tanh"]
    node = pf.get_node(b)
    assert (graph.num_nodes, node.output_shape, node.output_dtype) == (4, [3, 3], pf.float32)
    (product,) = node.inputs
    assert [n.op_type for n in product.inputs] == ["randn", "transpose"] and product.inputs[1].inputs[
        0
    ].op_type == "randn"
    assert node.location.file == __file__ and not node.is_evaluated
    assert node.spec == pf.TensorSpec([3, 3], pf.float32) and node.spec.num_bytes == 36
    pf.print_graph(b)
    assert capsys.readouterr().out.splitlines()[-1] == "  %3 = tanh(%2) : [3, 3] float32"
    b.eval()
    assert pf.get_node(b).is_evaluated and pf.get_graph(b).num_nodes == 4
    assert '"ts.tanh"' in graph.ir() and len(graph.function.params) == 1
