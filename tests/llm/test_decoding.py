"""Steps that are queued before the tokens ahead of them are read give the tokens of steps that wait."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.core.device_array import DeviceArray
from tessera.ir.tensor import Tensor, get_elements
from tessera.llm import decoding
from tessera.llm.sampling import Sampling

END = 0


class Session:
    """The next token of a request follows from its place and its last token; the cache has `room` positions."""

    def __init__(self, count, room, seed):
        self.past, self.room, self.seed, self.steps = np.zeros(count, np.int32), room, seed, []

    def _find_next(self, tokens):
        return ((tokens.reshape(-1) * 7 + self.past * 3 + self.seed + np.arange(len(self.past))) % 5).astype(np.int32)

    def prefill(self, prompts, greedy):
        self.past = np.array([len(p) for p in prompts], np.int32)
        return self._find_next(np.array([p[-1] for p in prompts]))

    def run_step(self, tokens, count, greedy):
        known = np.asarray(tokens.numpy() if isinstance(tokens, Tensor) else tokens)
        self.steps.append(count.copy())
        self.past = self.past + count
        assert self.past.max() <= self.room
        return Tensor(self._find_next(known))


class Model:
    config = SimpleNamespace(end_tokens=(END,))
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join("xabcd"[t] for t in tokens))

    def __init__(self, resident, seed):
        self._resident, self.seed = resident, seed

    def new_session(self, count, room):
        self.session = Session(count, room - 1, self.seed)  # the last token is not written
        return self.session


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=4), st.integers(1, 9), st.integers(0, 99),
       st.sampled_from([(), ("ab",), ("c", "dd")]))  # fmt: skip
def test_steps_ahead_give_the_same_tokens(prompts, most, seed, stops):
    prompts, chosen = [np.array(p, np.int32) for p in prompts], [Sampling(temperature=0)] * len(prompts)
    waiting, ahead = Model(False, seed), Model(True, seed)
    want = list(decoding.decode_alone(waiting, prompts, most, chosen, stops))
    assert list(decoding.decode_alone(ahead, prompts, most, chosen, stops)) == want
    if prompts:
        steps, beyond = waiting.session.steps, ahead.session.steps
        assert len(steps) <= len(beyond) <= min(len(steps) + 1, most - 1)


class Memory:
    """A memory that knows when its stream has been read."""

    def __init__(self):
        self.log, self.streams = [], 0

    def mark(self, stream):
        self.log.append(("mark", stream))
        return len(self.log)

    def make_stream(self):
        self.streams += 1
        return 100 + self.streams

    def copy_out_after(self, held, mark, stream):
        self.log.append(("copy", mark, stream))
        return np.int32([mark])


def test_tokens_are_read_after_their_own_step(monkeypatch):
    class Held(DeviceArray):
        def __init__(self, memory):
            self.memory, self.stream, self.free = memory, 7, None

    memory, reader = Memory(), decoding.LateReader()
    monkeypatch.setattr(decoding, "get_elements", lambda tokens: tokens)
    first, second = reader.mark(Held(memory)), reader.mark(Held(memory))
    assert reader.read(first).item() == 1 and reader.read(second).item() == 2
    assert memory.log == [("mark", 7), ("mark", 7), ("copy", 1, 101), ("copy", 2, 101)]


def test_tokens_of_the_host_are_read_as_they_are():
    tokens, reader = Tensor(np.int32([3, 1])), decoding.LateReader()
    np.testing.assert_array_equal(reader.read(reader.mark(tokens)), get_elements(tokens))
