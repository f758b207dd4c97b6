# `make voyage`: the whole main job on this machine. `make test`: every check but the slow ones.
# Both make their own environment in .venv with nothing but python3 and a package index.
PYTHON ?= python3
VENV ?= .venv
bin := $(VENV)/bin
series := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
pins := $(wildcard requirements/$(series).txt)
install = $(bin)/python -m pip install --quiet --disable-pip-version-check $(if $(pins),-c $(pins))

.PHONY: voyage test slow clean

voyage: $(VENV)/run-installed
	$(bin)/argosy voyage pocket

test: $(VENV)/dev-installed
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python -m pytest -n 2 -m "not slow and not gpu"

slow: $(VENV)/dev-installed
	$(bin)/python -m pytest -m "slow and not gpu"

$(VENV)/run-installed: pyproject.toml $(pins)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Argosy needs Python 3.11 or newer; $(PYTHON) is $(series). Name another: make voyage PYTHON=python3.12"; exit 1; }
	@echo "Installing Argosy into $(VENV) (Python $(series)); about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(install) -e .
	@touch $@

$(VENV)/dev-installed: $(VENV)/run-installed
	@$(install) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
