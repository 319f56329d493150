#!/usr/bin/env bash
# gpu-check on a machine with an NVIDIA GPU: one run, one table. Owner: `just gpu-check`.
#
#   tests/gpu-check.sh [OPTIONS OF gpu-check...]
#
# Nothing is built here. It needs target/release/gpu-check (`just gpu-check-build`, on any machine with the same kind of
# Linux), the driver, and either NVRTC or kernels compiled ahead in target/gpu-check/cubins (`just gpu-check-build` makes
# those too). Both may come from another machine. GPU_CHECK names another program, CUBINS another folder.
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
loads() {
    local folder
    local -a own=()
    IFS=: read -r -a own <<<"${LD_LIBRARY_PATH:-}"
    for folder in "${own[@]}"; do
        if [ -e "$folder/$1" ]; then return 0; fi
    done
    { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -qF "$1"
}

# Folders where CUDA's libraries may be: of a toolkit that is installed, and of NVIDIA's Python packages.
folders() {
    local pattern
    for pattern in "$venv"/lib/python3*/site-packages/nvidia/{cuda_nvrtc,cublas}/lib /usr/local/cuda*/lib64 /opt/cuda/lib64; do
        if [ -d "$pattern" ]; then (cd "$pattern" && pwd); fi
    done
    python3 - 2>/dev/null <<'PYTHON' || true
import glob, site
for root in site.getsitepackages() + [site.getusersitepackages()]:
    for folder in glob.glob(f"{root}/nvidia/*/lib"):
        print(folder)
PYTHON
}

# Makes a library load if it is anywhere.
provide() {
    local folder
    if loads "$1"; then return 0; fi
    while read -r folder; do
        if [ -e "$folder/$1" ]; then
            export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
            return 0
        fi
    done < <(folders)
    return 1
}

provide libcublasLt.so.12 || true
if ! provide libnvrtc.so.12; then
    case " $* " in
        *" --compile-ahead "*) needed=true ;;
        *) if ls "$cubins"/*.cubin >/dev/null 2>&1; then needed=false; else needed=true; fi ;;
    esac
    # Without kernels that were compiled ahead, one package is worth its minute.
    if $needed; then
        echo "NVRTC is not here: trying the Python package index" >&2
        if ! { python3 -m venv "$venv" && timeout 120 "$venv/bin/pip" install -q nvidia-cuda-nvrtc-cu12==12.9.86; } >&2; then
            echo "error: no NVRTC; compile the kernels elsewhere: tests/gpu-check.sh --compile-ahead sm_90 $cubins" >&2
            exit 2
        fi
        provide libnvrtc.so.12
    fi
fi

exec "$program" --cubins "$cubins" "$@"
