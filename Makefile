# `make lab` runs the course, `make test` tests it; both set up what they need in .venv first.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help lab test lint bench notebook clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

lab: .venv/lab-installed ## set up, then run the course and show what each step did here
	@echo "== running the course; the page will be runs/small/index.html"
	$(BIN)/labkit run --profile small

test: .venv/dev-installed ## set up, then run the unit tests and all notebooks in the tiny profile
	@echo "== unit tests"
	$(BIN)/python -m pytest -n auto --dist loadfile
	@echo "== notebooks, tiny profile, and the explorer in a browser, where there is one: minutes"
	$(BIN)/python -m pytest -s -rs -m "(notebook or compiles or browser) and not gpu"

lint: .venv/dev-installed ## check style, and that no notebook holds outputs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --keep-id --verify notebooks/*.ipynb

bench: .venv/lab-installed ## benchmarks of the lab's own choices
	$(BIN)/python bench/wait_policy.py

notebook: .venv/lab-installed ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

clean: ## remove the virtual environment and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each of these files says that a part of the set-up is complete; a changed pin installs again.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "labkit needs Python 3.11 or newer, and $(PYTHON) is not. Try: make lab PYTHON=python3.12"; \
	  exit 1; }
	@echo "== making a virtual environment in .venv"
	$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/lab-installed: requirements.txt pyproject.toml | .venv/made
	@echo "== installing the pinned packages, some minutes"
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps -e .
	@touch $@

.venv/dev-installed: requirements-dev.txt .venv/lab-installed
	@echo "== installing what the tests need"
	$(BIN)/python -m pip install -r requirements-dev.txt
	@touch $@
