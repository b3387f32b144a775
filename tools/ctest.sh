#!/usr/bin/env bash
# Builds the C++ tests in the folder given and runs them, plain and under the address and undefined-behaviour sanitizers.
# GoogleTest comes from the system if it is installed, else
# from Debian's package, unpacked into the build folder, else CMake fetches it.
set -euo pipefail

mkdir -p "$1"
build=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
unpacked=$build/googletest

has_googletest() {
    local probe
    probe=$(mktemp -d)
    printf 'cmake_minimum_required(VERSION 3.25)\nproject(probe CXX)\nfind_package(GTest REQUIRED)\n' >"$probe/CMakeLists.txt"
    local answer=0
    cmake -S "$probe" -B "$probe/build" -G Ninja "$@" >/dev/null 2>&1 || answer=1
    rm -rf "$probe"
    return $answer
}

unpack_debian_package() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    local packages
    packages=$(mktemp -d)
    if ! (cd "$packages" && apt-get download -q libgtest-dev >/dev/null 2>&1); then
        # A new machine may have no lists of packages yet; only root may fetch them.
        [ "$(id -u)" = 0 ] && apt-get update -q >/dev/null 2>&1 &&
            (cd "$packages" && apt-get download -q libgtest-dev >/dev/null 2>&1) || { rm -rf "$packages"; return 1; }
    fi
    mkdir -p "$unpacked"
    dpkg -x "$packages"/libgtest-dev_*.deb "$unpacked"
    rm -rf "$packages"
}

prefix=()
if ! has_googletest; then
    [ -d "$unpacked/usr" ] || unpack_debian_package || true
    if has_googletest "-DCMAKE_PREFIX_PATH=$unpacked/usr"; then
        prefix=("-DCMAKE_PREFIX_PATH=$unpacked/usr")
    else
        echo "GoogleTest is not installed: CMake will fetch it"
    fi
fi

run() {
    local folder=$1
    shift
    cmake -S "$root" -B "$folder" -G Ninja -DPython3_EXECUTABLE="$(command -v python)" "${prefix[@]}" "$@"
    cmake --build "$folder" --target cpp_tests
    ctest --test-dir "$folder" --no-tests=error --output-on-failure
}

run "$build/sanitized" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLITE_EXT_SANITIZE=address,undefined
run "$build/plain" -DCMAKE_BUILD_TYPE=RelWithDebInfo
