#!/usr/bin/env bash
# Builds the Python module under the address and undefined-behaviour sanitizers and runs the tests with it.
# What is given is handed to pytest. Leaks are not looked for: the interpreter and torch keep much to the end on purpose.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/asan
package=$build/package/lite_ext
python=$PWD/.venv/bin/python
PATH=$PWD/.venv/bin:$PATH

cmake -S . -B "$build" -G Ninja -DPython3_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DLITE_EXT_SANITIZE=address,undefined -DLITE_EXT_TESTS=OFF >/dev/null
cmake --build "$build" --target _C
rm -rf "$package"
mkdir -p "$package"
cp -r lite_ext/. "$package"
cp "$build"/_C.*.so "$package"

export PYTHONPATH=$PWD/$build/package
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 UBSAN_OPTIONS=print_stacktrace=1
export LITE_EXT_SANITIZED=1
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
run() { "$python" -m pytest -p no:cacheprovider -o faulthandler_timeout=1800 "$@"; }

if [ $# -gt 0 ]; then
    run "$@"
else
    # torch's compiler and other processes are not ours; the pool, which hides the end of outputs, is on for its own tests.
    run tests --ignore tests/test_pool.py --ignore tests/models --ignore tests/integrations \
        --ignore tests/torch_features/test_feature_compile.py --ignore tests/torch_features/test_feature_distributed.py \
        --ignore tests/test_compile.py --ignore tests/test_compile_wrapper.py --ignore tests/test_bench_command.py \
        --ignore tests/test_build.py
    LITE_EXT_POOL=1 run tests/test_pool.py
fi
