# The words of this repository; `make help` lists them.
#
# demo, test and the others make .venv on first use.  torch comes first and alone, because everything else accepts
# whatever torch is there.  The pinned version is the one that the tests run with; for GPUs name the build that fits
# the driver, with the index that PyTorch's install page gives for it:
#
#     make test TORCH="torch==2.13.0 --index-url URL"
#
# To use an environment of your own instead, install the package there (pip install -e '.[dev,hf]') and say
# `make test VENV=$$VIRTUAL_ENV INSTALLED=` with it active.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
INSTALLED ?= $(VENV)/.installed
BIN = $(abspath $(VENV))/bin

# A build that was killed leaves a lock in the folder that all checkouts share, and later ones wait for it for ever.
export TORCH_EXTENSIONS_DIR = $(CURDIR)/.cache/torch_extensions
export PATH := $(BIN):$(PATH)
# Where it is set, each of the tests' hundreds of processes compiles every module of ours again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs help demo gpu test test-repeat test-faults test-gpu test-slow test-clients test-versions check fmt bench pictures reference release clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small model over an emulated slow link in three ways, SITES=1: in four"
	@echo "make test       the tests that need no GPU and little time"
	@echo "make test-repeat  the same N times beside LOAD busy processes; time, CPU-minutes and result of each run"
	@echo "make test-faults  plants faults in a copy, one at a time, and says which test notices; FAULT=NAME: one"
	@echo "make test-gpu   those that need a GPU"
	@echo "make gpu        what to run first with a GPU: 30 minutes, and one page to send back; PRETEND=1: on a CPU"
	@echo "make test-slow  those that take long, and random tests with new seeds"
	@echo "make test-clients  vLLM, an old peft and training programs, in environments of their own"
	@echo "make test-versions  a core of the tests with each DeepSpeed and Python"
	@echo "make check      lint, format, types, import order"
	@echo "make fmt        format, and fix what can be fixed"
	@echo "make bench      lists the measuring programs; NAME='e2e --help' runs one"
	@echo "make pictures   plots and screens of docs/images anew from the records; needs matplotlib and Chromium"
	@echo "make reference  the reference of the Python interface, in build/reference"
	@echo "make docs       the pages of docs/ as a site, with that reference, in build/docs"
	@echo "make release    check version, changelog and tag, and build what is to be uploaded, in dist"
	@echo "make clean      remove what the others made, .venv too"

# op_builder/ and csrc/ lie beside the package, so setuptools finds modules by a finder and warns of an editable install.
$(VENV)/.installed: pyproject.toml setup.py ds_hybridep/version.py
	@echo "[1/3] making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	@echo "[2/3] installing $(TORCH)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@echo "[3/3] installing ds_hybridep, DeepSpeed, Hugging Face libraries and the tools of development"
	@PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,hf]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python -m benchmarks demo $(if $(SITES),--sites)

# Nothing is installed here: on a machine without a network, torch and DeepSpeed are those that PYTHON has.
gpu:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks gpu $(if $(PRETEND),--pretend)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 4 --dist loadgroup

test-repeat: $(INSTALLED)
	@$(BIN)/python .ci/repeat.py --runs $(or $(N),10) --load $(or $(LOAD),0)

test-faults: $(INSTALLED)
	@$(BIN)/python .ci/planted_faults.py $(if $(FAULT),"$(FAULT)")

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu --timeout 1200

test-slow: $(INSTALLED)
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m "(slow or (hypothesis and not gpu)) and not clients" --timeout 7200

# Environments are made once, in .cache/clients.
test-clients: $(INSTALLED)
	TORCH="$(TORCH)" $(BIN)/python -m pytest -m clients --timeout 7200

test-versions: $(INSTALLED)
	TORCH="$(TORCH)" $(BIN)/nox

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks $(NAME)

# From the same records come the same plots, if matplotlib is the same.
pictures: $(INSTALLED)
	@$(BIN)/python -m benchmarks e2e --report benchmarks/results/e2e-slower-machine.jsonl --plots docs/images > /dev/null
	@$(BIN)/python -m benchmarks one-at-a-time --report benchmarks/results/one-at-a-time.jsonl --plots docs/images > /dev/null
	@$(BIN)/python -m benchmarks losses --report benchmarks/results/losses-integers.jsonl --plot docs/images/losses.svg
	@$(BIN)/python -m benchmarks equal-bytes --report benchmarks/results/equal-bytes.jsonl benchmarks/results/equal-bytes-integers.jsonl --plot docs/images/equal-bytes.svg
	@$(BIN)/python -m benchmarks gap --report benchmarks/results/gap.jsonl --plots docs/images > /dev/null
	@$(BIN)/python -m benchmarks scale --report benchmarks/results/scale.jsonl --plots docs/images > /dev/null
	@$(BIN)/python .ci/pictures.py
	@$(BIN)/python .ci/drawings.py

# All warnings are errors: a page that the navigation lacks, a link or an anchor that leads nowhere.
docs: $(INSTALLED)
	@DS_ACCELERATOR=cpu NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

reference: $(INSTALLED)
	@DS_ACCELERATOR=cpu $(BIN)/python .ci/reference.py build/reference

release: $(INSTALLED)
	@$(BIN)/python .ci/release.py

clean:
	rm -rf .venv .nox .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
