# Every command that a developer, a user of the README or CI runs. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check check-native profile env model cluster unit generate format constraints bench bench-scheduling clean

BIN := .venv/bin
CLUSTER := PYTHONPATH=tests $(BIN)/python -m cluster
ENV := .venv/.installed

# The order in which a failure is found soonest
TESTS := tests/unit tests/contract tests/server tests/operator tests/e2e
PYTEST_ARGS ?=

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(ENV) model ## serve the sample LLMService on this machine and ask it a question; KEEP=1 leaves it serving
	@KEEP="$(KEEP)" PORT="$(PORT)" scripts/demo.sh

test: $(ENV) model cluster ## run every test, on the real model, a real API server and a real node
	@echo "test: unit, contract, server, operator and end-to-end tests"
	@$(BIN)/python -m pytest --durations=10 $(PYTEST_ARGS) $(wildcard $(TESTS))

check: $(ENV) ## lint, format, types, layers, generated files, documentation; changes nothing
	@echo "check: ruff" && $(BIN)/ruff check && $(BIN)/ruff format --check
	@echo "check: mypy --strict" && $(BIN)/mypy
	@MYPYPATH=tests $(BIN)/mypy --explicit-package-bases tests/cluster tests/e2e
	@echo "check: layers" && $(BIN)/lint-imports
	@echo "check: generated files" && $(CLUSTER) build helm && $(BIN)/python scripts/sync_generated.py --check
	@echo "check: documentation" && $(BIN)/python -m pytest -q $(wildcard tests/unit/test_*docs*.py tests/unit/test_chart_*.py)

check-native: $(ENV) ## run the CPU kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@echo "check-native: sanitizers" && scripts/check_native.sh

profile: $(ENV) model ## print where the time of a step goes on this CPU, by stage; QUICK=1 for a glance
	@$(BIN)/python -m benchmarks.profile_step $(if $(QUICK),--quick)

env: $(ENV) ## make .venv with both packages and the tools

$(ENV): pyproject.toml server/pyproject.toml operator/pyproject.toml constraints.txt scripts/env.sh
	@scripts/env.sh
	@touch $@

model: $(ENV) ## put the models of demo and tests into the model store, once
	@echo "model: SmolLM2-135M-Instruct" && $(BIN)/python scripts/demo_model.py
	@echo "model: all-MiniLM-L6-v2" && $(BIN)/python scripts/embedding_model.py

cluster: $(ENV) ## build and install what the tests' clusters need, once (ten minutes or more)
	@echo "cluster: programs of the tests' clusters" && $(CLUSTER) prepare

unit: $(ENV) ## run the unit tests
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) tests/unit

generate: $(ENV) ## render the chart's CRD, install.yaml and the reference pages from their sources
	@$(CLUSTER) build helm && $(BIN)/python scripts/sync_generated.py
	@$(BIN)/python scripts/settings_reference.py --write && $(BIN)/python scripts/llmservice_reference.py --write

format: $(ENV) ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix --exit-zero --quiet && $(BIN)/ruff format

constraints: $(ENV) ## write the installed versions into constraints.txt
	@{ echo "# The versions that everything is developed and tested with. Made by \`make constraints\`."; \
	   $(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable; } > constraints.txt && touch $(ENV)

bench: $(ENV) model ## measure ours beside vLLM, OpenVINO, llama.cpp and transformers; QUICK=1 for one short round with one peer
	@$(BIN)/python -m benchmarks.comparison $(if $(QUICK),--quick)

bench-scheduling: $(ENV) model ## measure admission, fairness, scheduling's cost, the simulator; QUICK=1 writes nothing
	@for name in overload fairness scheduler_cost simulator; do \
	  echo "bench: $$name" && $(BIN)/python -m benchmarks.$$name $(if $(QUICK),--quick); done

clean: ## remove .venv and everything else that was made in this tree (not ~/.cache/paceline)
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .state
	@find . -name __pycache__ -o -name '*.egg-info' | xargs -r rm -rf
