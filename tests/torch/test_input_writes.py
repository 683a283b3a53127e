"""In-place ops of torch.compile: inputs are written in their own memory, or copied to where that is not safe."""

import pytest
import torch

R = torch.randn


def write_a_sum(x, y):
    z = x + y
    x.copy_(z)
    return z


def exchange(x, y):
    kept = x * 2
    x.copy_(y)
    y.copy_(kept)


def take_a_step(p, g):
    p.mul_(0.9)
    return p.add_(g, alpha=-0.1)


# Whether the results are computed in the inputs' memory.
CASES = {
    "relu_": (lambda x: x.relu_(), (R(3, 4),), True),
    "channels last": (lambda x: x.relu_(), (R(2, 3, 4, 5).to(memory_format=torch.channels_last),), True),
    "copy_": (lambda x, y: x.copy_(y), (R(3, 4), R(3, 4)), True),
    "step": (take_a_step, (R(100), R(100)), True),
    "masked_fill_": (lambda x, m: x.masked_fill_(m, 0.0), (R(4, 5), R(4, 5) > 0), True),
    "returned, too": (write_a_sum, (R(3, 4), R(3, 4)), True),
    "two": (lambda x, y: (x.mul_(2).add_(y), y.add_(1)), (R(8, 4), R(8, 4)), True),
    "two that read each other": (exchange, (R(200, 100), R(200, 100)), False),
    "two small ones that do": (exchange, (R(5, 5), R(5, 5)), True),  # in one kernel, which reads both before
    "another order of axes": (lambda x, y: x.copy_(y.t()), (R(5, 5), R(5, 5)), True),
    "reversed": (lambda x: x.add_(x.flip(0)), (R(8, 4),), False),
    "sums of columns": (lambda x: x.add_(x.sum(0)), (R(8, 4),), False),
    "a view": (lambda x: x.t().relu_(), (R(3, 4),), True),
    "a part": (lambda x: x[0].add_(1), (R(3, 4),), True),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_written(name):
    function, inputs, in_place = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="tessera", dynamic=False, options={"fallback": False})
    given, wanted = [[torch.clone(x) for x in inputs] for _ in range(2)]
    for _ in range(2):
        addresses = [x.data_ptr() for x in given]
        found, expected = compiled(*given), function(*wanted)
        assert [x.data_ptr() for x in given] == addresses
        for a, b in zip(given, wanted, strict=True):
            torch.testing.assert_close(a, b)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, check_stride=True)
            shared = found.data_ptr() in addresses
            assert shared == (expected.data_ptr() in [x.data_ptr() for x in wanted])
    with torch.profiler.profile() as profile:
        compiled(*given)
    copied = any(event.key == "aten::copy_" for event in profile.key_averages())
    assert copied == (not in_place)


def test_a_training_step_writes_running_statistics():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(inplace=True))
    other = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(inplace=True))
    other.load_state_dict(model.state_dict())
    compiled = torch.compile(other, backend="tessera", options={"fallback": False})
    for _ in range(2):
        x = R(8, 4)
        model(x).square().sum().backward()
        compiled(x).square().sum().backward()
    for a, b in zip([*model.buffers(), *model.parameters()], [*other.buffers(), *other.parameters()], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_what_pytorch_reads_afterwards_is_kept():
    """An op that PyTorch runs reads the input as it was: its memory is not taken."""
    torch._dynamo.reset()

    def function(x):
        before = torch.linalg.eigvals(x + 0).abs().sum()
        again = torch.linalg.eigvals(x).abs().sum()
        x.mul_(2)
        return before - again

    x = torch.rand(4, 4)
    wanted = 2 * x
    found = torch.compile(function, backend="tessera")(x)
    torch.testing.assert_close(x, wanted)
    torch.testing.assert_close(found, torch.zeros(()), atol=1e-5, rtol=0)
