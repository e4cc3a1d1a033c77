# `make demo` and `make test` do all their own set-up; BUILD.md says what each target is for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: demo test test-long bench lint clean

demo: $(STAMP)
	$(BIN)/jdiloco demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "long"

bench: $(STAMP)
	$(BIN)/python -m tests.bench_close

lint: $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[demo,test,lint]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Made again when the dependencies change or the interpreter does.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jdiloco needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs
