# Two commands matter: `make demo` and `make test`. Each does its own set-up, all of it in .venv here.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup
DEMO ?= examples/demo.py
BENCH ?= benchmarks

VENV := .venv
BIN := $(VENV)/bin
# Without PYTHON=... an environment that is here already decides, whatever python3 is today.
ASK := import sys; print("%d.%d" % sys.version_info[:2])
HERE := $(if $(filter file,$(origin PYTHON)),$(BIN)/python -c '$(ASK)' 2> /dev/null ||)
VERSION := $(shell $(HERE) $(PYTHON) -c '$(ASK)' 2> /dev/null)
LOCK := $(firstword $(wildcard requirements/lock-$(VERSION).txt) requirements/lock.txt)
# Keyed on content, not on times: a fresh clone and a switched branch give files new times.
DEPENDENCIES := $(VENV)/.lock-$(VERSION)-$(firstword $(shell cksum < $(LOCK)))
PROJECT := $(VENV)/.project-$(firstword $(shell (cat pyproject.toml; grep ^__version__ tpcore/__init__.py) | cksum))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast lint types docs bench lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter; PIP_ARGS=... is passed to pip, for example an index"

demo: venv  ## pretrain a small BERT at tp=1 and tp=2 and compare the loss curves (about 3 minutes)
	$(BIN)/python $(DEMO)

# ruff first because it takes no time, then the tests, which start at once; the slower static checks follow.
test: venv  ## everything that must hold: lint, tests, types, documentation
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory types docs

test-fast: venv  ## the tests alone; PYTEST_ARGS='tests/test_cli.py' runs a part
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: venv  ## style and types, without running anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: venv
	$(BIN)/mypy

docs: venv  ## build the documentation into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: venv  ## the benchmarks; numbers and how they were made: benchmarks/README.md
	$(BIN)/python -m $(BENCH)

lock: venv  ## write the versions installed in .venv to the lock
	@sed -n '/^#/p' $(LOCK) > $(LOCK).new
	$(BIN)/python -m pip freeze --exclude tpcore | grep -v -E '^(nvidia-|cuda-|triton)' | sed 's/+.*//' \
	    | LC_ALL=C sort -f >> $(LOCK).new # without what torch brings for one kind of device
	mv $(LOCK).new $(LOCK)

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist site demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

venv: $(PROJECT)  ## the environment alone: .venv with the locked versions and tpcore, editable

$(PROJECT): $(DEPENDENCIES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.project-* && touch $@

$(DEPENDENCIES):
	@test -n "$(VERSION)" || { echo "cannot run $(PYTHON): name a Python 3.10 or newer, for example" \
	    "make test PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "tpcore needs Python 3.10 or" \
	    "newer and $(PYTHON) is $(VERSION): name another, for example make test PYTHON=python3.12" >&2; exit 1; }
	@# made anew if it is of another version, was interrupted half-way, or its interpreter is gone
	@test "$$($(BIN)/python -c '$(ASK)' 2> /dev/null)" = "$(VERSION)" \
	    && $(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --requirement $(LOCK)
	@rm -f $(VENV)/.lock-* && touch $@
