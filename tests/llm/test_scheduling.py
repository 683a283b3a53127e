"""Continuous batching: the tokens of each request are those of transformers, and of the request alone."""

import numpy as np
import pytest

from tessera.core.errors import ArgumentError, OutOfBoundsError, ResourceError
from tessera.ir.tensor import Tensor
from tessera.llm import DecoderConfig, GenerationScheduler, LanguageModel, Sampling, draw_weights
from tessera.llm.shared_pages import SharedPages, name_prefixes

CONFIG = DecoderConfig(vocabulary=50, width=32, layers=1, heads=4, kv_heads=2, head_size=8, hidden=48, context=256)
WARM = Sampling(temperature=1.0, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def model():
    return LanguageModel(CONFIG, draw_weights(CONFIG, seed=1, scale=0.5), target="llvm", page_size=16)


@pytest.fixture(scope="module")
def interpreted(model):
    """The same model without machine code, for what the scheduler alone decides: each new shape is a program."""
    return LanguageModel(CONFIG, model.weights, target="interp", page_size=16)


def draw_prompts(count):
    """Prompts of 2 to 68 tokens, that begin alike."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 50, 40)
    return [np.r_[start[: rng.integers(1, 40)], rng.integers(0, 50, rng.integers(1, 30))] for _ in range(count)]


def test_tokens_are_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    from tessera.llm import load
    from tests.llm.peers import generate, make_peer

    peer = make_peer("llama")
    peer.save_pretrained(tmp_path)
    scheduler = GenerationScheduler(load(tmp_path, target="llvm"), slots=4)
    prompts = [[3, 14, 15], [9], list(range(1, 80))]
    for found, prompt in zip(scheduler.generate(prompts, 8), prompts, strict=True):
        want = generate(peer, prompt, 8)
        assert found.tokens == (want[: want.index(0)] if 0 in want else want)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_tokens_are_those_of_the_request_alone(model, sampling):
    prompts = draw_prompts(10)
    scheduler = make_scheduler(model)
    found = scheduler.generate(prompts, 20, sampling)
    want = model.generate(prompts, 20, sampling)
    assert [c.tokens for c in found] == [c.tokens for c in want]
    assert scheduler.counts.preemptions > 0 and scheduler.counts.shared_pages > 0
    assert scheduler.pages.available == scheduler.pages.count  # none is lost


def make_scheduler(model, **named):
    """A scheduler whose cache is too small for four requests; one shape, so that few programs are compiled."""
    return GenerationScheduler(model, **{"slots": 4, "longest": 128, "pages": 8, **named})


def record_logits(scheduler, requests):
    """The bits of each request's logits, by position."""
    found = {id(r): {} for r in requests}
    compute = scheduler._compute

    def record(tokens, rows, past, counts, greedy):
        out = compute(tokens, rows, past, counts, False)
        if tokens.shape == (1, 1):  # a step of one row, which is only compared with that of all slots
            return out
        for row, request in enumerate(rows):
            if request is not None and id(request) in found:
                found[id(request)].setdefault(int(past[row] + counts[row]), []).append(out.numpy()[row].tobytes())
        return out

    scheduler._compute = record
    scheduler.run()
    return [found[id(r)] for r in requests]


def test_logits_do_not_depend_on_the_other_requests(model):
    prompts, warm = draw_prompts(8), Sampling(temperature=1.0, seed=5)
    crowded = make_scheduler(model)
    crowd = record_logits(crowded, [crowded.submit(p, 12, warm) for p in prompts])
    assert crowded.counts.preemptions and crowded.counts.shared_pages
    for prompt, found in zip(prompts, crowd, strict=True):
        alone = make_scheduler(model, share_prefixes=False)
        (want,) = record_logits(alone, [alone.submit(prompt, 12, warm)])
        assert all(set(bits) == set(want[place]) for place, bits in found.items())
        assert max(found) == max(want)


@pytest.mark.parametrize("same", [True, False])
def test_steps_of_one_row_need_the_same_bits(model, same):
    scheduler, sizes = make_scheduler(model), []

    def compute(tokens, rows, past, counts, greedy):
        """Logits that depend on the position, and on the number of rows by one unit in the last place."""
        sizes.append(len(rows))
        logits = np.zeros((len(rows), 50), np.float32)
        logits[np.arange(len(rows)), (past + counts) % 50] = (
            1 if same or len(rows) == 1 else np.nextafter(np.float32(1), np.float32(2))
        )
        return Tensor(logits)

    scheduler._compute = compute
    first = scheduler.submit([1, 2], 10)
    scheduler.run()
    assert first.tokens == list(range(2, 12))
    assert sizes == [1, *([1, 4] * 4 + [1] * 5 if same else [1, 4] + [4] * 8)]
    sizes.clear()
    scheduler.generate([[1], [2]], 4)
    assert sizes.count(4) >= 2  # two requests are always in a step of all slots


def test_the_request_that_came_last_is_preempted_and_goes_first_again(model):
    scheduler = make_scheduler(model, pages=4)
    scheduler._compute = lambda tokens, rows, *rest: Tensor(np.zeros((len(rows), 50), np.float32))
    first, second = scheduler.submit(list(range(20)), 30), scheduler.submit(list(range(20, 40)), 30)
    third, lost = scheduler.submit([1], 2), []
    preempt = scheduler._preempt
    scheduler._preempt = lambda r: lost.append(r) or preempt(r)
    while not lost:
        scheduler.step()
    assert lost == [third] or lost == [second]
    while second not in lost:
        scheduler.step()
    assert scheduler.waiting[0] is second and first.slot >= 0
    late = scheduler.submit([2], 2)
    scheduler.run()
    assert first not in lost and [len(r.tokens) for r in (first, second, third, late)] == [30, 30, 2, 2]


def test_warm_up_leaves_nothing(model):
    scheduler = make_scheduler(model)
    scheduler.warm_up()
    assert not scheduler.busy and scheduler.pages.available == scheduler.pages.count


def test_requests_come_and_go(model):
    scheduler = make_scheduler(model)
    first, second, third, *others, last = (scheduler.submit([i, i + 1], 6) for i in range(5))
    scheduler.step()
    assert len(scheduler.running) == 4 and list(scheduler.waiting) == [last]
    scheduler.step()
    scheduler.cancel(second)
    scheduler.cancel(second)
    assert second.reason == "cancelled" and len(second.tokens) < 6
    late = scheduler.submit([7], 3)
    scheduler.cancel(late)
    scheduler.run()
    assert [len(r.tokens) for r in (first, third, *others, last, late)] == [6] * 4 + [0] and late.reason == "cancelled"
    assert scheduler.pages.available == scheduler.pages.count and not scheduler.busy
    assert scheduler.step() == []


def test_shared_prefix_is_computed_once(interpreted):
    scheduler = make_scheduler(interpreted)
    prompt = list(range(40))  # two whole pages of 16, and 8 tokens
    scheduler.generate([prompt], 2)
    before = scheduler.counts.prefill_steps
    (found,) = scheduler.generate([[*prompt[:32], 1, 2]], 3)
    assert (scheduler.counts.prefill_steps - before, scheduler.counts.shared_pages) == (1, 2)
    assert found.tokens == interpreted.generate([*prompt[:32], 1, 2], 3).tokens
    for whole in (prompt[:32], prompt[:16]):  # the last token of whole pages is computed
        assert scheduler.generate([whole], 3)[0].tokens == interpreted.generate(whole, 3).tokens
    other = make_scheduler(interpreted, share_prefixes=False)
    other.generate([prompt, prompt], 2)
    assert other.counts.shared_pages == 0


def test_end_tokens_end_a_request(interpreted):
    end = interpreted.generate([3, 14, 15], 5).tokens[2]
    config = DecoderConfig(**{**vars(CONFIG), "end_tokens": (end,)})
    ending = LanguageModel(config, interpreted.weights, target="interp", page_size=16)
    want = ending.generate([3, 14, 15], 5)
    assert make_scheduler(ending).generate([[3, 14, 15]], 5)[0] == want
    assert want.reason == "stop"


def test_shared_pages():
    pages = SharedPages(2, 2)
    a, b = name_prefixes([1, 2, 3, 4], 2)
    assert name_prefixes([0, 2, 3, 4], 2)[1] != b and name_prefixes([1], 2) == []
    first, second = pages.take(), pages.take()
    with pytest.raises(ResourceError, match="no page left"):
        pages.take()
    pages.publish(first, a)
    pages.publish(second, a)  # the first page of a name keeps it
    assert pages.find(a) == first and pages.find(b) is None
    for page in (first, first, second):
        pages.release(page)
    assert (pages.available, pages.kept) == (2, 1)
    pages.take()
    assert pages.holds(a)  # a free page goes before a kept one
    assert pages.take() == first and not pages.holds(a)


def test_misuse(model):
    scheduler = GenerationScheduler(model, slots=2, longest=64, pages=3)
    for prompt, most, text in (([], 3, "empty"), ([1], 0, "max_tokens"), ([1], True, "max_tokens"),
                               ([1] * 40, 9, "longer than the context"), ("text", 3, "no list")):  # fmt: skip
        with pytest.raises(ArgumentError, match=text):
            scheduler.submit(prompt, most)
    with pytest.raises(OutOfBoundsError, match="vocabulary"):
        scheduler.submit([50], 3)
    with pytest.raises(ArgumentError, match="no Sampling"):
        scheduler.submit([1], 3, 0.5)
    for named in ({"slots": 0}, {"longest": 257}, {"pages": 0}, {"longest": True}, {"slots": 1.5}):
        with pytest.raises(ArgumentError):
            GenerationScheduler(model, **named)
    assert not scheduler.busy


def test_prompts_that_come_together_are_read_before_the_batch_decodes(interpreted):
    scheduler = make_scheduler(interpreted, pages=None)
    found = scheduler.generate([[i, i + 1] for i in range(4)], 6)
    assert [c.tokens for c in found] == [interpreted.generate([i, i + 1], 6).tokens for i in range(4)]
    assert scheduler.counts.prefill_steps == 4 and scheduler.counts.decode_steps == 6  # the last begins a step later


def test_long_prompts_do_not_stop_the_others_for_long(interpreted):
    scheduler = make_scheduler(interpreted, pages=None)
    first = scheduler.submit([1], 40)
    scheduler.step()
    for i in range(3):
        scheduler.submit(list(range(i, i + 48)), 2)  # three chunks each
    before = len(first.tokens)
    scheduler.step()
    assert len(first.tokens) == before + 1 and scheduler.counts.prefill_steps <= 1 + scheduler.slots
    scheduler.run()
    assert len(first.tokens) == 40
