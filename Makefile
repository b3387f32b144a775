# Everything runs in .venv, made on first use. Nothing is installed again while what it was made from is older.

TORCH ?= torch==2.13.0
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
BUILT := $(VENV)/.built
CPP_BUILD := build/cpp
CXX_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name 'sources.txt')
CXX_FILES := $(filter %.cpp %.h,$(CXX_SOURCES))

.PHONY: demo test pytest ctest bench lint format wheel clean

demo: $(BUILT)
	$(BIN)/python examples/transformers_outputs.py

# pytest exits with 5 when it ran no test; ctest is told to fail then.
test: pytest ctest

pytest: $(BUILT)
	$(BIN)/python -m pytest

ctest: $(DEPENDENCIES)
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/ctest.sh $(CPP_BUILD)

bench: $(BUILT)
	$(BIN)/python benchmarks/convert.py

lint: $(DEPENDENCIES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(DEPENDENCIES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: $(BUILT)
	$(BIN)/pip wheel --no-build-isolation --no-deps -w dist .

$(DEPENDENCIES): requirements-dev.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# In one command: what depends on torch must not bring another one.
	$(BIN)/pip install --quiet "$(TORCH)" -r requirements-dev.txt
	touch $@

$(BUILT): $(DEPENDENCIES) setup.py pyproject.toml $(filter-out csrc/tests/%,$(CXX_SOURCES))
	$(BIN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf build dist *.egg-info lite_ext/*.so lite_ext/_build_info.json $(BUILT)
