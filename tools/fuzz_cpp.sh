#!/usr/bin/env bash
# tools/fuzz_cpp.sh [SECONDS]: runs libFuzzer on the plan and the tile function, under the address and
# undefined-behaviour sanitizers. It begins with the corpus in csrc/tests/corpus; `--minimise` writes a small one there.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-600}
build=build/fuzz
corpus=csrc/tests/corpus
clang=${CLANGXX:-clang++}
if ! command -v "$clang" >/dev/null; then
    echo "libFuzzer comes with clang, and $clang is not on PATH: apt-get install clang" >&2
    exit 1
fi

mkdir -p "$build/corpus" "$corpus"
"$clang" -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    csrc/tests/fuzz_tiles.cpp csrc/plan/plan.cpp csrc/plan/tiles.cpp -o "$build/fuzz_tiles"
if [ "${1:-}" = --minimise ]; then
    rm -rf "$build/small"
    mkdir "$build/small"
    "$build/fuzz_tiles" -merge=1 "$build/small" "$build/corpus" "$corpus"
    rm -f "$corpus"/*
    # The smallest inputs; the others are found again in seconds.
    find "$build/small" -type f -size -2 -printf '%s %p\n' | sort -n | head -n 60 | cut -d' ' -f2 | xargs -I{} cp {} "$corpus"
    exit 0
fi
"$build/fuzz_tiles" -max_total_time="$seconds" -max_len=512 -print_final_stats=1 "$build/corpus" "$corpus"
