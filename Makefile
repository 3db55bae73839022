# Commands of the project; CONTRIBUTING.md explains them. Everything runs inside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
ARGS ?=

.PHONY: help serve test check format wheel gpu bench-spike bench-peers clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# A stamp per set of packages: nothing is installed again until the files that name them change.
$(VENV)/.serve: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "paceline: installing pinned dependencies into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "paceline: installing development tools into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[demo,dev,postgresql]'
	@touch $@

serve: $(VENV)/.serve  ## Install, prepare the demo model and serve it on 127.0.0.1:8000
	@$(BIN)/paceline serve $(MODEL) $(ARGS)

test: $(VENV)/.dev  ## Run the whole test suite
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev  ## Formatting, lint, types and the floors
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

wheel: $(VENV)/.dev  ## A wheel with the step path compiled, in dist/ (a C compiler, a minute)
	@# By way of an archive: compiled in place, the working tree would keep what shadows its sources.
	@rm -rf dist && $(BIN)/hatchling build -t sdist >/dev/null
	@HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@rm dist/*.tar.gz && ls dist/*.whl

bench-spike: $(VENV)/.serve  ## Reproduce the README's spike table (minutes)
	@$(BIN)/paceline bench spike --serve $(MODEL) $(ARGS)

bench-peers: $(VENV)/.serve  ## Measure beside transformers on the same weights (many minutes)
	@$(BIN)/paceline bench peers --serve $(MODEL) $(ARGS)

# A machine with a GPU usually brings its own torch: then nothing is installed, not even a venv.
GPU_NEEDS := import sys, numpy, torch, transformers; assert sys.version_info >= (3, 11)

gpu:  ## Put the GPU on trial: exactness, speed, the spike (8 minutes; gpu.json in $OUT or here)
	@if $(PYTHON) -c '$(GPU_NEEDS)' >/dev/null 2>&1; then \
		$(PYTHON) -m controller.bench.gpu $(ARGS); \
	else \
		$(MAKE) --no-print-directory $(VENV)/.serve && $(BIN)/python -m controller.bench.gpu $(ARGS); \
	fi

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
