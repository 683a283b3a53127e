"""Models of the tests of serving, made once."""

import pytest

for name in ("starlette", "uvicorn", "httpx", "prometheus_client", "tokenizers", "jinja2"):
    pytest.importorskip(name)
import services  # noqa: E402


@pytest.fixture(scope="session")
def scores(tmp_path_factory):
    """The folder of an artifact with symbolic rows."""
    return services.build_scores(tmp_path_factory.mktemp("artifacts") / "scores")


@pytest.fixture(scope="session")
def language_model():
    return services.make_language_model()
