#!/bin/sh
# Builds the software CUDA device: build.sh FOLDER puts libcuda.so.1, libnvrtc.so.12, libcublasLt.so.12 and the headers
# that kernels are compiled with there. A folder on LD_LIBRARY_PATH, it is a driver with a device for every program.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$1/images"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$here"
compile() {
    name=$1
    shift
    "${CXX:-c++}" -g1 -std=c++17 -Wall -Wextra -fPIC -shared -fvisibility=hidden -U_FORTIFY_SOURCE -I . "$@" \
        -Wl,-soname,"$name" -Wl,-Bsymbolic -o "$out/$name"
}
cp simt.h simt_run.h simt_types.h simt_try.h "$out"
compile libnvrtc.so.12 -O1 nvrtc.cpp &
compile libcuda.so.1 -O1 driver.cpp memory.cpp stream.cpp module.cpp fault.cpp -ldl -lpthread
wait $!
compile libcublasLt.so.12 -O2 cublaslt.cpp "$out/libcuda.so.1"
# Programs look for the names without numbers first: empty libraries that need the others.
for pair in libcuda.so:libcuda.so.1 libnvrtc.so:libnvrtc.so.12 libcublasLt.so:libcublasLt.so.12; do
    compile "${pair%%:*}" -x c++ /dev/null -x none -Wl,--no-as-needed "$out/${pair##*:}"
done
