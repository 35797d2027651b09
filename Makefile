# Set-up, demo and checks. Everything runs from .venv, which is made when it is missing or its inputs changed.

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint docs wheel bench bench-gpu clean
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin

help:
	@echo "make demo      a small stream from nothing: configs/demo.yaml"
	@echo "make test      lint, types and all fast tests"
	@echo "make test-all  the slow tests too"
	@echo "make lint      ruff, mypy and import-linter alone"
	@echo "make wheel     the package to install elsewhere: dist/"
	@echo "make docs      the documentation as a site: build/docs/html/index.html"
	@echo "make bench     speed against plain loops and limits, on a quiet machine: benchmarks/README.md"
	@echo "make bench-gpu correctness of every method on a GPU, in minutes: benchmarks/README.md"
	@echo "make clean     remove .venv and caches; results in storage/ stay"

setup: .venv/.ready

# An editable install: `accrete`, and `import pipeline` from any folder, run this checkout. Requirements come at the versions
# of constraints.txt. Byte code is compiled on all cores afterwards (pip uses one), without the packages' own tests; some
# files are written for a newer Python, do not compile and are never imported.
.venv/.ready: constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, Accrete needs 3.11 or newer: \
	give another one, as in  make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Setting up .venv, once: about 3 GB to download, some minutes ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -e '.[all,dev]' -c constraints.txt
	@echo "Installed; compiling byte code ..."
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' .venv/lib > /dev/null 2>&1 || :
	@touch $@
	@echo "Ready. Try: make demo, or $(BIN)/accrete --help"

# The packages with configs and cards, to be installed elsewhere: dist/accrete-VERSION-py3-none-any.whl.
wheel: .venv/.ready
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

demo: .venv/.ready
	$(BIN)/accrete run configs/demo.yaml

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Hundreds of processes import the same modules: each is compiled once, whatever the environment says.
test-fast test-all: export PYTHONDONTWRITEBYTECODE =

# The checks of `lint` run beside the tests. Four processes share nothing; they wait in part, and fill two cores. Those tests
# of a file that share what was run once stay together. In a fresh clone pytest first compiles all tests once, and not in each
# of the four processes.
test:
	@$(MAKE) --no-print-directory -j 2 lint test-fast

.PHONY: test-fast
test-fast: .venv/.ready
	@ls tests/__pycache__/*pytest* > /dev/null 2>&1 || $(BIN)/python -m pytest --collect-only -qq > /dev/null || :
	$(BIN)/python -m pytest -m "not slow" -n 4 --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile

# Sphinx and its theme, at the versions of constraints.txt; nothing else needs them.
.venv/.docs: .venv/.ready
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	print(*p["dependency-groups"]["docs"], sep="\n")' > .venv/docs.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r .venv/docs.txt -c constraints.txt
	@touch $@

docs: .venv/.docs
	$(BIN)/python -m docs.site.build

BENCHMARKS := synchronised_bytes gradient_overlap train_step methods meat_inference dytox toast linear_probe pretrained feed feed_cores augment feed_step feed_scale feed_cluster shared_index scale launch search serve growing
bench: .venv/.ready
	@failed=; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; done; \
	test -z "$$failed" || { echo "missed a demand:$$failed"; exit 1; }

bench-gpu: .venv/.ready
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv build dist accrete.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
