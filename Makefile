# `make demo` and `make test` do all their own set-up; BUILD.md says what each target is for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -e
WORKERS ?= 2

.PHONY: demo test test-long bench lint clean

demo: $(VENV)/.demo
	$(BIN)/jdiloco demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m "not long"

test-long: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m "long"

bench: $(VENV)/.test
	$(BIN)/python -m tests.bench_close

lint: $(VENV)/.test
	$(INSTALL) '.[demo,test,lint]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Made again when the dependencies change or the interpreter does.
$(VENV)/.made: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jdiloco needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made
	@echo "Installing the library into $(VENV), once: minutes, most of them JAX."
	$(INSTALL) '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.made
	@echo "Installing the library and what tests need into $(VENV), once: minutes."
	$(INSTALL) '.[demo,test]'
	touch $@

clean:
	rm -rf $(VENV) runs/demo
