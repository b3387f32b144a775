# Everything runs in .venv, made on first use. Nothing is installed again while what it was made from is older.

TORCH ?= torch==2.13.0
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
BUILT := $(VENV)/.built
CPP_BUILD := build/cpp
CXX_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name 'sources.txt')
CXX_FILES := $(filter %.cpp %.h,$(CXX_SOURCES)) $(shell find csrc -name '*.cu')

# A second environment, for the build with CUDA: it needs nvcc and no device.
TORCH_CUDA ?= torch==2.14.1
CUDA_VENV := .venv-cuda
CUDA_DEPENDENCIES := $(CUDA_VENV)/.dependencies
CUDA_BUILT := $(CUDA_VENV)/.built
CUDA_SOURCES := $(CXX_SOURCES) $(shell find csrc -name '*.cu') csrc/sources_cuda.txt
PYTHON_SOURCES := $(shell find lite_ext -name '*.py')

# The stamps hold which torch was installed: where another is asked for, they are out of date.
ifneq ($(TORCH),$(shell cat $(DEPENDENCIES) 2>/dev/null))
.PHONY: $(DEPENDENCIES)
endif
ifneq ($(TORCH_CUDA),$(shell cat $(CUDA_DEPENDENCIES) 2>/dev/null))
.PHONY: $(CUDA_DEPENDENCIES)
endif

.PHONY: demo test pytest ctest cuda-test gpu-check fuzz fuzz-cpp memcheck asan bench perf-guard lint format wheel clean

demo: $(BUILT)
	$(BIN)/python examples/transformers_outputs.py

# pytest exits with 5 when it ran no test; ctest is told to fail then.
test: pytest ctest

pytest: $(BUILT)
	$(BIN)/python -m pytest

ctest: $(DEPENDENCIES)
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/ctest.sh $(CPP_BUILD)

# The test-suite with the CUDA build (but for third parties' models and drop-ins, which the CPU build holds), away from the checkout so that the installed package is the one tested.
cuda-test: $(CUDA_BUILT)
	mkdir -p build/cuda-test
	cd build/cuda-test && ../../$(CUDA_VENV)/bin/python -m pytest -c ../../pyproject.toml --rootdir ../.. -p no:cacheprovider ../../tests --ignore ../../tests/models --ignore ../../tests/integrations
	$(CUDA_VENV)/bin/python tools/check_cuda_kernel.py

# On a machine with a GPU: build, tests, sanitizers, launches, benchmark. Without one it says so.
gpu-check: $(CUDA_BUILT)
	$(CUDA_VENV)/bin/python tools/gpu_check.py

# Random trees held against Tensor.to: N cases. SEED and CASE reproduce one that was printed.
fuzz: $(BUILT)
	$(BIN)/python tests/fuzz/run.py --cases $(or $(N),20000) $(and $(SEED),--seed $(SEED)) $(and $(CASE),--case $(CASE))

# libFuzzer on the C++ plan and tile function, for SECONDS; it comes with clang.
fuzz-cpp:
	tools/fuzz_cpp.sh $(or $(SECONDS),600)

# The C++ tests under valgrind.
memcheck: ctest
	LITE_EXT_POOL=1 valgrind --quiet --error-exitcode=1 $(CPP_BUILD)/plain/cpp_tests --gtest_brief=1

# The Python tests with the module built under the address and undefined-behaviour sanitizers. PYTEST= runs some of them.
asan: $(BUILT)
	tools/asan.sh $(PYTEST)

# Writes figures, a table and pictures to benchmarks/results, in under five minutes.
bench: $(BUILT)
	$(BIN)/python benchmarks/run.py

# Instruction counts by valgrind beside the stored ones. Without valgrind it says so.
perf-guard: $(BUILT)
	$(BIN)/python tools/perf_guard.py

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest lite_ext._C
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(DEPENDENCIES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# The wheel's version says what it was compiled for (+cpu.torch213). What an earlier wheel was made from would be packed
# again, modules deleted since then included.
wheel: $(BUILT)
	rm -rf build/lib.*
	LITE_EXT_LOCAL_LABEL=1 $(BIN)/pip wheel --no-build-isolation --no-deps -w dist .

$(DEPENDENCIES): requirements-dev.txt Makefile
	rm -f $@
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# In one command: what depends on torch must not bring another one.
	$(BIN)/pip install --quiet "$(TORCH)" -r requirements-dev.txt
	echo "$(TORCH)" >$@

$(BUILT): $(DEPENDENCIES) setup.py tools/cuda_build.py pyproject.toml $(filter-out csrc/tests/%,$(CXX_SOURCES))
	$(BIN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

$(CUDA_DEPENDENCIES): requirements-dev.txt Makefile
	rm -f $@
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install --quiet "$(TORCH_CUDA)" -r requirements-dev.txt
	echo "$(TORCH_CUDA)" >$@

$(CUDA_BUILT): $(CUDA_DEPENDENCIES) setup.py tools/cuda_build.py pyproject.toml $(CUDA_SOURCES) $(PYTHON_SOURCES)
	LITE_EXT_CUDA=1 $(CUDA_VENV)/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf build dist *.egg-info lite_ext/*.so lite_ext/_build_info.json $(BUILT)
