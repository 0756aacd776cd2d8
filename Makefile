# make demo   the default sweep and its report, from nothing
# make test   the tests, from nothing
# make check  lint, format, types
# make slow   the long CPU tier
# make systems  the training systems and programs of others, two ranks on the CPU; LitGPT has an
#             environment of its own (.venv-litgpt)
# make chaos  sweeps that are killed at random moments, CHAOS_KILLS times, and compared with
#             undisturbed ones; prints the counts
# make gpu    the tests and benchmarks that need a CUDA device; says so where there is none.
#             It installs nothing: `make gpu GPU_PYTHON=python3` takes any environment as it is
# make bench  the benchmarks, one after the other

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PINS := .ci/constraints.txt
LITGPT := .venv-litgpt
LITGPT_PINS := .ci/constraints-litgpt.txt
JOBS ?= 2
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Other modules may need packages that an environment without a network lacks.
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)

CHAOS_KILLS ?= 100
CHAOS_SEED ?= 0

.PHONY: demo test check slow systems chaos gpu bench clean

demo: $(VENV)/.installed
	$(BIN)/batchscape sweep sweeps=fixed_global_batch
	$(BIN)/batchscape report outputs/fixed_global_batch

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu and not systems"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "slow and not gpu and not systems"

systems: export BATCHSCAPE_REQUIRE_SYSTEMS := 1
systems: $(VENV)/.installed-systems $(LITGPT)/.installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "systems and not gpu"

chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/chaos.py --kills $(CHAOS_KILLS) --seed $(CHAOS_SEED)

gpu: export PYTHONPATH := $(CURDIR)/src
gpu:
	@if $(GPU_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'; then \
		$(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS) && \
		for benchmark in gpt2_step_time adamw_kernels recorder_overhead_cuda; do \
			$(GPU_PYTHON) benchmarks/gpu/$$benchmark.py || exit 1; \
		done; \
	elif [ $$? -eq 3 ]; then echo "make gpu: no CUDA device here; nothing was run"; \
	else exit 1; fi

bench: $(VENV)/.installed-dev
	for benchmark in benchmarks/*.py; do $(BIN)/python $$benchmark || exit 1; done

# torch comes first and alone: pip then takes the build that suits this machine, and the
# constraints keep every later package from replacing it.
$(VENV)/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(PINS) torch
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[test,check,bench,hf]'
	touch $@

$(VENV)/.installed-systems: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[accelerate,deepspeed,fabric]'
	touch $@

# LitGPT wants an older huggingface-hub than the transformers of the other environment. Without
# `requests`, which it does not name, its command does not start.
$(LITGPT)/.installed: $(LITGPT_PINS)
	$(PYTHON) -m venv $(LITGPT)
	$(LITGPT)/bin/python -m pip install --quiet --upgrade pip
	$(LITGPT)/bin/python -m pip install --quiet --constraint $(LITGPT_PINS) torch
	$(LITGPT)/bin/python -m pip install --quiet --constraint $(LITGPT_PINS) litgpt requests
	touch $@

clean:
	rm -rf $(VENV) $(LITGPT) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
