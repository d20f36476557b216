#!/usr/bin/env bash
# Makes .venv/bare-gpu-machine: what a GPU machine has that benchmarks/gpu_run brings the rest to (tests/bare_gpu_machine.txt).
#
#   tools/set_up_bare_machine.sh STAMP
#
# An environment of its own, of Python 3.12, with torch's CUDA build: 5 GB.  It needs no GPU.  PYTHON3 may name the Python.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=$1
folder=.venv/bare-gpu-machine

fail() { printf '\nbare machine: failed: %s\n' "$*" >&2; exit 1; }

is_3_12() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

python=
for candidate in "${PYTHON3:-python3.12}" python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python3.12; do
    if is_3_12 "$candidate"; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "no Python 3.12 was found, which that machine has. Install it, or name one: PYTHON3=/path/to/python3.12"

# The folder has its name only when it is whole: a test skips where there is none.
rm -rf "$folder" "$folder.new"
"$python" -m venv "$folder.new"
"$folder.new"/bin/python -m pip --disable-pip-version-check install -qq --no-deps --requirement tests/bare_gpu_machine.txt ||
    fail "pip cannot install tests/bare_gpu_machine.txt: see what it says above"
mv "$folder.new" "$folder"
touch "$stamp"
