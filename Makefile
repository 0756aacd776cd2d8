# make help   this list
# make demo   cuts of one global batch, a range of global batches, and one report of both, from nothing
# make test   the tests, from nothing
# make check  lint, format, types, dead code
# make slow   the long CPU tier
# make systems  the training systems, Slurm and programs of others, on the CPU; LitGPT has an
#             environment of its own (.venv-litgpt)
# make long   slow and systems, in one go
# make chaos  sweeps that are killed at random moments, CHAOS_KILLS times, and compared with
#             undisturbed ones; prints the counts
# make chaos-slurm  the same on an emulated cluster: jobs, nodes and followers are killed
# make gpu    all that needs a CUDA device, part after part (docs/gpu.md), for GPU_LIMIT_S seconds;
#             the same command goes on. It installs nothing: `make gpu GPU_PYTHON=python3` takes any
#             environment as it is
# make gpu-wheels  what an environment without a network lacks for it, into .gpu-wheels
# make versions  the engines' contract on the oldest torch of pyproject.toml and on the pinned one
# make bench  the benchmarks, one after the other

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PINS := .ci/constraints.txt
LITGPT := .venv-litgpt
LITGPT_PINS := .ci/constraints-litgpt.txt
JOBS ?= 2
# Tests of the long tier wait for clusters and for what they have killed: a third one has their core.
LONG_JOBS ?= 3
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

GPU_PARTS ?=
GPU_LIMIT_S ?= 560
GPU_WHEELS := .gpu-wheels
GPU_WHEELS_PYTHON ?= 3.12
# On the path only where the interpreter has no such packages of its own.
GPU_RUN = wheels=; $(GPU_PYTHON) -c 'import hydra, pydantic' 2>/dev/null || \
		wheels=:$(CURDIR)/$(GPU_WHEELS); \
	export PYTHONPATH="$(CURDIR)/src$$wheels$${PYTHONPATH:+:$$PYTHONPATH}"; \
	$(GPU_PYTHON)

# Bytecode is compiled at the first import of what is used, which spares most of it; without any,
# each process would compile all that it imports anew.
PIP_INSTALL := -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

OLDEST := $(shell sed -n 's/^ *"torch>=\(.*\)",/\1/p' pyproject.toml)
OLDEST_VENV := .venv-torch-$(OLDEST)

CHAOS_KILLS ?= 100
CHAOS_SEED ?= 0
CHAOS_SLURM_KILLS ?= 50

.PHONY: help demo test check slow systems long chaos chaos-slurm gpu gpu-wheels versions bench clean

help:
	@sed -n '/^[^#]/q; s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.installed
	$(BIN)/batchscape sweep sweeps=fixed_global_batch_digits
	$(BIN)/batchscape sweep sweeps=fewer_updates_digits
	$(BIN)/batchscape report outputs/fixed_global_batch_digits outputs/fewer_updates_digits \
		--out outputs/demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu and not systems"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/dead_code.py

slow: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "slow and not gpu and not systems"

systems long: export BATCHSCAPE_REQUIRE_SYSTEMS := 1
systems: $(VENV)/.installed-systems $(LITGPT)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "systems and not gpu"

long: $(VENV)/.installed-systems $(LITGPT)/.installed
	$(BIN)/pytest -n $(LONG_JOBS) --dist worksteal --durations=60 -m "(slow or systems) and not gpu"

chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/chaos.py --kills $(CHAOS_KILLS) --seed $(CHAOS_SEED)

chaos-slurm: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/chaos_slurm.py --kills $(CHAOS_SLURM_KILLS) --seed $(CHAOS_SEED)

gpu:
	@$(GPU_RUN) benchmarks/gpu/measure.py --limit-s $(GPU_LIMIT_S) $(GPU_PARTS)

# Unpacked, as nothing can be imported from a compiled package in its wheel. ANTLR's runtime is
# published as source only.
gpu-wheels:
	rm -rf $(GPU_WHEELS)
	$(PYTHON) -m pip wheel --quiet --no-deps --constraint $(PINS) \
		--wheel-dir $(GPU_WHEELS)/built antlr4-python3-runtime
	$(PYTHON) -m pip install --quiet --no-deps --constraint $(PINS) --target $(GPU_WHEELS) \
		--no-compile --python-version $(GPU_WHEELS_PYTHON) --only-binary :all: \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		$(GPU_WHEELS)/built/*.whl annotated-types hydra-core omegaconf pydantic pydantic_core \
		typing_extensions typing-inspection
	rm -r $(GPU_WHEELS)/built
	du -sh $(GPU_WHEELS)

versions: $(OLDEST_VENV)/.installed $(VENV)/.installed-systems
	for venv in $(OLDEST_VENV) $(VENV); do \
		$$venv/bin/python -m pytest tests/engines/test_contract.py -m "not gpu" || exit 1; \
	done

bench: $(VENV)/.installed-dev
	for benchmark in benchmarks/*.py; do $(BIN)/python $$benchmark || exit 1; done

# torch comes first and alone: pip then takes the build that suits this machine, and the
# constraints keep every later package from replacing it.
$(VENV)/.installed-torch: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade pip
	$(BIN)/python $(PIP_INSTALL) --constraint $(PINS) torch
	touch $@

$(VENV)/.installed: $(VENV)/.installed-torch
	$(BIN)/python $(PIP_INSTALL) --constraint $(PINS) --editable .
	touch $@

# In one go, not after the above: each building of the package takes seconds.
$(VENV)/.installed-dev: $(VENV)/.installed-torch
	$(BIN)/python $(PIP_INSTALL) --constraint $(PINS) --editable '.[test,check,bench,hf]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-systems: $(VENV)/.installed-dev
	$(BIN)/python $(PIP_INSTALL) --constraint $(PINS) --editable '.[accelerate,deepspeed,fabric]'
	touch $@

# Of the pins without torch and sympy, of which each torch wants its own.
$(OLDEST_VENV)/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --upgrade pip
	grep -vE '^(torch|sympy)==' $(PINS) > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) torch==$(OLDEST)
	$(OLDEST_VENV)/bin/python $(PIP_INSTALL) --constraint $(OLDEST_VENV)/constraints.txt \
		torch==$(OLDEST) --editable '.[test,accelerate,deepspeed,fabric]'
	touch $@

# LitGPT wants an older huggingface-hub than the transformers of the other environment. Without
# `requests`, which it does not name, its command does not start.
$(LITGPT)/.installed: $(LITGPT_PINS)
	$(PYTHON) -m venv $(LITGPT)
	$(LITGPT)/bin/python $(PIP_INSTALL) --upgrade pip
	$(LITGPT)/bin/python $(PIP_INSTALL) --constraint $(LITGPT_PINS) torch
	$(LITGPT)/bin/python $(PIP_INSTALL) --constraint $(LITGPT_PINS) litgpt requests
	touch $@

clean:
	rm -rf $(VENV) $(LITGPT) .venv-torch-* $(GPU_WHEELS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
