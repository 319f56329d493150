#!/usr/bin/env bash
# gpu-check on a machine with an NVIDIA GPU: one run, one table. Owner: `just gpu-check`.
#
#   tests/gpu-check.sh [OPTIONS OF gpu-check...]
#
# Nothing is built here. It needs target/release/gpu-check (`just gpu-check-build`, on any machine with the same kind of
# Linux), the driver, and either NVRTC or kernels compiled ahead in target/gpu-check/cubins (`just gpu-check-build` makes
# those of sm_90 where it finds NVRTC). Both may come from another machine. GPU_CHECK names another program, CUBINS another
# folder.
set -euo pipefail
cd "$(dirname "$0")/.."

program=${GPU_CHECK:-target/release/gpu-check}
cubins=${CUBINS:-target/gpu-check/cubins}
venv=target/gpu-check/venv

if [ ! -f "$program" ]; then
    echo "error: $program is not there; make it with \`just gpu-check-build\`, here or on another machine" >&2
    exit 2
fi
# Whoever carries files may lose this.
[ -x "$program" ] || chmod +x "$program"

# Whether the loader finds a library without help.
system() { ldconfig -p 2>/dev/null | grep -q "$1"; }

# Folders of NVIDIA's libraries of CUDA 12: of a toolkit that is installed, or of wheels.
folders() {
    ls -d /usr/local/cuda/lib64 /usr/local/cuda-12*/lib64 /opt/cuda/lib64 2>/dev/null || true
    ls -d "$venv"/lib/python3*/site-packages/nvidia/{cuda_nvrtc,cublas}/lib 2>/dev/null || true
    python3 - 2>/dev/null <<'PYTHON' || true
import glob, site
for root in site.getsitepackages() + [site.getusersitepackages()]:
    for part in ("cuda_nvrtc", "cublas"):
        print(*glob.glob(f"{root}/nvidia/{part}/lib"), sep="\n")
PYTHON
}

# Whether a library of this name is anywhere.
anywhere() {
    system "$1" && return 0
    local folder
    while read -r folder; do
        if [ -n "$folder" ] && ls "$folder/$1"* >/dev/null 2>&1; then return 0; fi
    done < <(folders)
    return 1
}

have_cubins() { ls "$cubins"/*.cubin >/dev/null 2>&1; }

# Without NVRTC and without kernels, one wheel is worth its minute.
if ! anywhere libnvrtc.so.12 && ! have_cubins; then
    echo "NVRTC is not here and no kernels were compiled ahead: trying the Python package index" >&2
    if ! { python3 -m venv "$venv" && timeout 120 "$venv/bin/pip" install -q nvidia-cuda-nvrtc-cu12==12.9.86; } >&2; then
        echo "error: no NVRTC, and none to be had; make $cubins with \`$program --compile-ahead sm_90 $cubins\` elsewhere" >&2
        exit 2
    fi
fi

# What the system has comes first: the loader looks here before it looks there only for what is missing.
added=
while read -r folder; do
    if [ -n "$folder" ]; then added="$added${added:+:}$folder"; fi
done < <(folders)
if [ -n "$added" ]; then export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$added"; fi

exec "$program" --cubins "$cubins" "$@"
