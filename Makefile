# `make demo` takes a fresh clone to an exact Nemotron-H; `make test` is what CI runs.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12; do $$p -c '' 2>/dev/null && echo $$p && break; done)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP = $(VENV)/.installed

.PHONY: install demo test lint clean

install: $(STAMP)

# The lock is complete, so --no-deps keeps out the wheels that do not import beside CPU torch; the uninstall mends a .venv made by hand.
$(STAMP): requirements/cpu.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --no-deps -r requirements/cpu.txt
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/agent run --model nemotron-3.5 --from-scratch

lint: $(STAMP)
	$(VENV)/bin/ruff check agent consistency sandboxes bench tests
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python agent sandboxes

test: lint
	$(VENV)/bin/python -m pytest

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
