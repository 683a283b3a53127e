"""Triton compiles into a folder of the run; the default of its next release is chosen, which silences its warning."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_settings(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield
