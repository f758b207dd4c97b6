# `make voyage`: the whole main job on this machine. `make test`: every check but the slow ones.
# Both make their own environment in .venv with nothing but python3 and a package index.
PYTHON ?= python3
VENV ?= .venv
bin := $(VENV)/bin
series := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
pins := $(wildcard requirements/$(series).txt)
install = $(bin)/python -m pip install --quiet --disable-pip-version-check $(if $(pins),-c $(pins))
run_installed := $(VENV)/run-installed-$(series)
dev_installed := $(VENV)/dev-installed-$(series)

.PHONY: voyage test slow clean

voyage: $(run_installed)
	$(bin)/argosy voyage pocket

test: $(dev_installed)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python -m pytest -n 2 --durations 15 -m "not slow and not gpu"

slow: $(dev_installed)
	$(bin)/python -m pytest -n 2 --durations 8 -m "slow and not gpu"

$(run_installed): pyproject.toml $(pins)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Argosy needs Python 3.11 or newer, $(PYTHON) is $(or $(series),not there); name another: make voyage PYTHON=python3.12"; exit 1; }
	@echo "Installing Argosy into $(VENV) (Python $(series)$(if $(pins),, with the newest packages: no pins for this version)); about a minute"
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(install) -e .
	@touch $@

$(dev_installed): $(run_installed)
	@$(install) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
