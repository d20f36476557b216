#!/usr/bin/env bash
# Installs what some tests need beyond the environment, so that none of them is skipped for lack of an installation.
#
#   tools/set_up_oracles.sh [STAMP]
#
# Debian's packages where their programs are missing; and from the lists in tests/, into folders of .venv: `oracles`,
# which tests import from, `framework` and `docs`, environments of their own; on Python 3.11 also the megatron-core of newer
# Pythons, which `make test-megatron` puts before the environment's.  Nothing in the environment itself is replaced.  Slurm is fetched by its own tests (tests/support/slurm/set_up.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=${1:-.venv/.ready-oracles}
python=.venv/bin/python
lists=(tests/oracles.txt tests/framework.txt tests/megatron.txt)

say() { printf 'oracles: %s\n' "$*" >&2; }
fail() { printf '\noracles: failed: %s\n' "$*" >&2; exit 1; }

# What is missing of Debian's packages, for `apt-get install`.
missing_packages() {
    command -v chromium chromium-browser google-chrome >/dev/null || echo chromium
    command -v g++ >/dev/null || echo g++
    if [[ $(uname -m) == x86_64 ]]; then
        [[ -e /usr/include/x86_64-linux-gnu/asm/unistd_64.h ]] || echo linux-libc-dev
    else
        [[ -e /usr/include/asm-generic/unistd.h ]] || echo linux-libc-dev
    fi
}

install_packages() {
    local remedy="install $* yourself, and again"
    local as_root=()
    command -v apt-get >/dev/null || fail "this machine has no apt-get: $remedy"
    if [[ $(id -u) != 0 ]]; then
        sudo -n true 2>/dev/null || fail "only root may install packages, and sudo asks for a password: $remedy"
        as_root=(sudo -n)
    fi
    "${as_root[@]}" apt-get -qq update || fail "apt-get update fails: see what it says above, or $remedy"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$@" >/dev/null ||
        fail "apt-get cannot install $*: see what it says above, or $remedy"
}

[[ -x $python ]] || fail "there is no .venv: tools/set_up.sh makes it, which make does by itself"

# One set-up at a time; whoever waited finds the work done.
exec 9<tools/set_up_oracles.sh
command -v flock >/dev/null && flock 9

mapfile -t missing < <(missing_packages)
if ((${#missing[@]})); then
    say "1/5 Debian's packages: ${missing[*]}"
    install_packages "${missing[@]}"
fi

newer() { # than the stamp, each of these
    local each
    for each in "$@"; do [[ $stamp -nt $each ]] || return 1; done
}
version() { sed -n "s/^$1=*\([0-9.]*\).*/\1/p" tests/megatron.txt; }
megatron=.venv/megatron-core-$(version megatron-core) # beside the older one, which Python 3.11 has
transformer_engine=.venv/transformer_engine-$(version transformer-engine)
"$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' || megatron=
if [[ -d .venv/oracles && -d .venv/framework && -d .venv/docs && (-z $megatron || -d $megatron) ]] && newer "${lists[@]}" tools/set_up_oracles.sh; then exit 0; fi

# A folder has its name only when it is whole: a test skips where there is none, and fails where it cannot import.
say "2/5 .venv/oracles: verl, TRL, services, parsers"
rm -rf .venv/oracles .venv/oracles.new
"$python" -m pip --disable-pip-version-check install -qq --no-deps --target .venv/oracles.new --requirement tests/oracles.txt ||
    fail "pip cannot install tests/oracles.txt: see what it says above"
mv .venv/oracles.new .venv/oracles

say "3/5 .venv/framework: openai-agents"
rm -rf .venv/framework .venv/framework.new
"$python" -m venv .venv/framework.new
.venv/framework.new/bin/python -m pip --disable-pip-version-check install -qq --no-deps --requirement tests/framework.txt ||
    fail "pip cannot install tests/framework.txt: see what it says above"
mv .venv/framework.new .venv/framework

say "4/5 .venv/docs: mkdocs"
make --silent PYTHON3="$PWD/$python" .venv/docs/.ready || fail "mkdocs was not installed: see make docs"

# Its code is Python and runs on 3.11, which its metadata forbids; but for datasets/helpers_cpp, which nothing here imports.
if [[ -n $megatron ]]; then
    say "5/5 $megatron"
    rm -rf "$megatron" "$megatron.new" "$transformer_engine"
    beside() { # NAME FOLDER [pip's options]: what tests/megatron.txt has of that name
        "$python" -m pip --disable-pip-version-check install -qq --no-deps --target "$2" "${@:3}" \
            --requirement <(grep "^$1=" tests/megatron.txt) || fail "pip cannot install $1: see what it says above"
    }
    beside megatron-core "$megatron.new" --python-version 3.12 --only-binary=:all:
    beside triton "$megatron.new"
    beside transformer-engine "$transformer_engine"
    mv "$megatron.new" "$megatron"
fi

touch "$stamp"
say "ready in ${SECONDS} s"
