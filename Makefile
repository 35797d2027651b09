# Set-up, demo and checks. Everything runs from .venv, which is made when it is missing or its inputs changed.

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint clean
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin

help:
	@echo "make demo      a small stream from nothing: configs/demo.yaml"
	@echo "make test      lint, types and all fast tests"
	@echo "make test-all  the slow tests too"
	@echo "make lint      ruff and mypy alone"
	@echo "make clean     remove .venv and caches; results in storage/ stay"

setup: .venv/.ready

# The requirements of pyproject.toml, at the versions of constraints.txt. The application itself is not installed: it runs
# from this folder. Byte code is compiled at first import, because most of what is installed is never imported.
.venv/.ready: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, Accrete needs 3.11 or \
	newer; name one: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "Setting up .venv, once: about 3 GB to download, 2 to 5 minutes ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *sum(p["optional-dependencies"].values(), []), sep="\n")' > .venv/requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r .venv/requirements.txt -c constraints.txt
	@touch $@
	@echo "Ready: $(BIN)/python -m pipeline --help"

demo: .venv/.ready
	$(BIN)/python -m pipeline run configs/demo.yaml

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
