#!/bin/sh
# Compiles and runs a test of kernels written by hand, without the rest: try.sh FILE.cpp [compiler options].
# FILE.cpp includes the .cu files and has a main() that calls SIMT_TRY(kernel, grid, block, dynamic_bytes, schedule,
# arguments...), which returns 0 or prints what went wrong.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
program=$(mktemp -t simt.XXXXXX)
trap 'rm -f "$program"' EXIT
source=$1
shift
"${CXX:-c++}" -O2 -g -std=c++17 -Wall -Wno-attributes -Wno-unknown-pragmas -fvisibility=hidden -fno-gnu-unique -DSIMT -I "$here" \
    -I "$here/../../kernels/src/cuda" -include simt.h "$@" -x c++ "$source" -o "$program"
"$program"
