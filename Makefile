# The whole project in a few words. Everything lives in .venv and build/; nothing is installed outside this folder.
#
#   make run       install, fetch the default model, and let it answer
#   make test      install what the tests need and run them
#   make           list the targets
#
# Stamps in .venv remember what is installed, so that a second call takes no time. Python files are used in place;
# a change below csrc/ or in CMakeLists.txt rebuilds the native module on the next call.

PYTHON ?= python3
PROMPT ?= Explain in two sentences why a library keeps an index of its books.
export PROMPT
PYTEST_JOBS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
# Build tools come from the package index, so that the machine needs no cmake of its own.
BUILD_TOOLS := "cmake>=3.26" "ninja>=1.11"
EDITABLE := install --quiet --no-build-isolation --editable
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt
PACKAGE_SOURCES := $(shell find src -type f -name '*.py' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help install run test lint format docs wheel check clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

install: $(VENV)/stamp-install ## Build Octavo into .venv, ready to use

run: install ## Fetch the default model and stream an answer (PROMPT="..." asks something else)
	@$(BIN)/octavo pull smollm2-135m > /dev/null
	$(BIN)/octavo generate --chat -p "$$PROMPT" --max-tokens 96

test: $(VENV)/stamp-install $(VENV)/stamp-test ## Run the tests (PYTEST_ARGS="-k name" for some)
	$(BIN)/python -m pytest -n $(PYTEST_JOBS) -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/stamp-install $(VENV)/stamp-lint ## Check format, rules, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@find csrc -name '*.cpp' -o -name '*.h' | xargs -r $(BIN)/clang-format --dry-run --Werror
	@$(BIN)/python scripts/outliers.py

format: $(VENV)/stamp-install $(VENV)/stamp-lint ## Rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	@find csrc -name '*.cpp' -o -name '*.h' | xargs -r $(BIN)/clang-format -i

docs: install ## Write the generated parts of docs/: commands, errors, pictures
	$(BIN)/python scripts/write_cli_docs.py
	$(BIN)/python scripts/write_error_docs.py
	$(BIN)/python scripts/write_metrics_docs.py
	$(BIN)/python scripts/draw_kv_pictures.py

wheel: $(VENV)/stamp-build-tools ## Build dist/octavo-*.whl, which installs without a compiler
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -1t dist/octavo-*.whl | head -n 1

check: lint test ## What .ci/run runs

clean: ## Remove what the build made; keep .venv
	rm -rf build dist

# --- stamps -----------------------------------------------------------------------------------------------------------

$(VENV)/stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed, $(PYTHON) is older; try make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: no venv module; on Debian: apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/stamp-build-tools: $(VENV)/stamp-venv pyproject.toml
	@command -v $(or $(CXX),c++) >/dev/null || { echo "error: no C++ compiler; on Debian: apt install g++"; exit 1; }
	@echo "Installing build tools"
	@$(PIP) install --quiet $(BUILD_TOOLS) \
	  $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	@touch $@

$(VENV)/stamp-install: $(VENV)/stamp-build-tools $(NATIVE_SOURCES)
	@echo "Building and installing Octavo"
	@$(PIP) $(EDITABLE) '.[serve]'
	@touch $@

$(VENV)/stamp-test: $(VENV)/stamp-build-tools
	@echo "Installing what the tests need"
	@$(PIP) $(EDITABLE) '.[test]'
	@touch $@ $(VENV)/stamp-install

$(VENV)/stamp-lint: $(VENV)/stamp-build-tools
	@echo "Installing what the checks need"
	@$(PIP) $(EDITABLE) '.[lint]'
	@touch $@ $(VENV)/stamp-install
