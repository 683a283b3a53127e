"""Clients that others wrote, unmodified: tritonclient for the inference protocol, openai for completions."""

import numpy as np
import pytest
import services

from tessera.llm import Sampling
from tessera.serving import ServerOptions, create_app

X = np.array([[1, 2, 3, 4], [0.5, 0, 0, -1]], np.float32)


@pytest.fixture(scope="module")
def port(scores, language_model):
    options = ServerOptions(api_keys=("secret",), slots=4, longest=128)
    with services.serve(create_app({"scores": scores, "letters": language_model}, options)) as port:
        yield port


@pytest.mark.filterwarnings("ignore")  # of gevent
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient(port, binary):
    http = pytest.importorskip("tritonclient.http")
    headers = {"Authorization": "Bearer secret"}
    with http.InferenceServerClient(f"127.0.0.1:{port}", concurrency=2) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("scores", headers=headers) and not client.is_model_ready("other", headers=headers)
        assert client.get_model_metadata("scores", headers=headers)["inputs"][0]["datatype"] == "FP32"
        x = http.InferInput("x", [2, 4], "FP32")
        x.set_data_from_numpy(X, binary_data=binary)
        outputs = [http.InferRequestedOutput(f"out{i}", binary_data=binary) for i in range(2)]
        for wanted in (None, outputs):
            found = client.infer("scores", [x], outputs=wanted, headers=headers, request_id="9")
            for i, want in enumerate(services.want_scores(X)):
                np.testing.assert_allclose(found.as_numpy(f"out{i}"), want, rtol=1e-5)
            assert found.get_response()["id"] == "9"
        calls = [client.async_infer("scores", [x], headers=headers) for _ in range(8)]
        assert all(c.get_result().as_numpy("out1").tolist() == [10, -0.5] for c in calls)
        with pytest.raises(Exception, match="API key"):
            client.infer("scores", [x])
        y = http.InferInput("x", [1, 3], "FP32")
        y.set_data_from_numpy(X[:1, :3])
        with pytest.raises(Exception, match="another shape"):
            client.infer("scores", [y], headers=headers)


@pytest.fixture(scope="module")
def client(port):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_openai_models_and_key(client, port):
    import openai

    assert [m.id for m in client.models.list()] == ["letters"] and client.models.retrieve("letters").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("scores")
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_openai_completions(client, language_model):
    want = [services.complete_alone(language_model, p, 12) for p in ("the sea", "x")]
    found = client.completions.create(model="letters", prompt=["the sea", "x"], max_tokens=12, temperature=0)
    assert [(c.index, c.text, c.finish_reason) for c in found.choices] == [
        (i, w.text, w.reason) for i, w in enumerate(want)
    ]
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens == 8 and found.usage.completion_tokens == sum(
        len(w.tokens) + (w.reason == "stop") for w in want
    )
    tokens = language_model.tokenizer.encode("the sea")
    same = client.completions.create(model="letters", prompt=tokens, max_tokens=12, temperature=0)
    assert same.choices[0].text == want[0].text
    warm = client.completions.create(model="letters", prompt="x", max_tokens=9, seed=4, temperature=0.8, top_p=0.9, n=2)
    assert warm.usage.prompt_tokens == 1  # each prompt counts once
    for i, choice in enumerate(warm.choices):
        assert choice.text == services.complete_alone(language_model, "x", 9, Sampling(0.8, 0, 0.9, 4 + i)).text
    assert client.completions.create(model="letters", prompt="x", temperature=0).usage.completion_tokens <= 16


def test_openai_stream(client, language_model):
    whole = services.complete_alone(language_model, "the sea", 20, Sampling(1.0, seed=2))
    stop = whole.text[5:7]
    want = services.complete_alone(language_model, "the sea", 20, Sampling(1.0, seed=2), stop=stop)
    for stops, expected in ((None, whole), (["~~~", stop], want)):
        named = {"model": "letters", "prompt": "the sea", "max_tokens": 20, "seed": 2, "stop": stops}
        chunks = list(client.completions.create(**named, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].text for c in chunks[:-1]) == expected.text
        assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == expected.reason
        assert chunks[-1].usage.completion_tokens == len(expected.tokens) and len(chunks) > 4
        assert client.completions.create(**named).choices[0].text == expected.text


def test_openai_chat(client, language_model):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    want = services.complete_alone(language_model, "system: a;user: b;", 10)
    named = {"model": "letters", "messages": messages, "temperature": 0, "max_completion_tokens": 10}
    found = client.chat.completions.create(**named)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (want.text, want.reason)
    chunks = list(client.chat.completions.create(**named, stream=True))
    assert "".join(c.choices[0].delta.content for c in chunks) == want.text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"


def test_openai_errors(client):
    import openai

    good = {"model": "letters", "prompt": "x"}
    for change, field in (
        ({"model": "other"}, "model"), ({"prompt": ""}, "prompt"), ({"prompt": "x" * 129}, None),
        ({"prompt": [96]}, None), ({"prompt": [[1], "x"]}, ""), ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"), ({"top_p": -1}, "top_p"), ({"n": 17}, "n"), ({"stop": [""]}, "stop"),
        ({"logprobs": 3}, "logprobs"), ({"presence_penalty": 1.5}, "presence_penalty"), ({"max_tokens": 200}, None),
        ({"extra_body": {"beams": 2}}, "beams"), ({"extra_body": {"seed": 2**70}}, "seed"),
    ):  # fmt: skip
        if field == "":  # a batch may mix texts and tokens
            assert len(client.completions.create(**{**good, **change}, max_tokens=1).choices) == 2
            continue
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as found:
            client.completions.create(**{**good, **change})
        assert found.value.param == field
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="letters", messages=[{"role": "robot", "content": "x"}])
