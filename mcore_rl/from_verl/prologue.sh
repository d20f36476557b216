# What bash reads before a script of verl's: functions in the place of programs.  Records of them go to descriptor 60.
# Written for bash 4.3 and later; nothing here may depend on `set -eux` of the script, or on a program.
trap '' PIPE

__told() {
    local word
    printf '%s\0' "$BASHPID(" >&60
    for word; do printf '%s\0' "$BASHPID=$word" >&60; done
    printf '%s\0' "$BASHPID)" >&60
}

__drain() { while IFS= read -r -n 4096 _; do :; done; }

# Any program: its words are told, what it reads is read, and what it would print is a mark.  A word that is itself a
# command of verl's (ssh NODE "python3 -m verl...", docker run ... bash -c "...") is run in its place.
__run() {
    local word last=
    for word; do
        case $last:$word in -m:verl* | -m:recipe*) break ;; esac
        last=$word word=
    done
    [ -n "$word" ] || for word in "${@:2}"; do
        case $word in
        *[[:space:]]-m[[:space:]]*verl*) (eval "$word") && return 0 || return 0 ;;
        esac
    done
    __told "$@"
    __drain
    case $1 in
    mkdir | rm | cp | mv | ln | touch | chmod | chown | sleep | tee | clear | pip | pip3 | ray | conda | wandb) ;;
    *) printf '<output-of-%s>\n' "${1##*/}" 2>/dev/null ;;
    esac
    return 0
}

command_not_found_handle() { __run "$@"; }

bash() {
    local word
    while [[ ${1-} == -* && ${1-} != -c && ${1-} != *c ]]; do shift; done
    case ${1-} in
    "") __drain ;;
    -*) word=${2-}; shift 2; (eval "$word") || return 0 ;;
    *) if { : <"$1"; } 2>/dev/null; then (source "$@") || return 0; else __told bash "$@"; fi ;;
    esac
    return 0
}
sh() { bash "$@"; }

source() {
    local file=$1
    shift
    if { : <"$file"; } 2>/dev/null; then builtin source "$file" "$@"; else __told source "$file"; fi
}
.() { source "$@"; }

exec() {
    [ $# -gt 0 ] || return 0
    while [[ ${1-} == -* ]]; do shift; done
    "$@"
    exit 0
}
exit() {
    wait
    builtin exit "$@"
}
command() {
    case ${1-} in
    -v | -V) printf '%s\n' "${2-}" ;;
    -p) shift; "$@" ;;
    *) "$@" ;;
    esac
}
cd() { builtin cd "$@" 2>/dev/null || return 0; }
ulimit() { return 0; }
which() { printf '%s\n' "${1-}"; }

dirname() {
    local path=${1%"${1##*[!/]}"}
    case $path in
    */*) path=${path%/*}; printf '%s\n' "${path:-/}" ;;
    *) printf '.\n' ;;
    esac
}
basename() {
    [ "${1-}" != -- ] || shift
    local path=${1%"${1##*[!/]}"}
    path=${path##*/}
    printf '%s\n' "${path%"${2-}"}"
}
realpath() {
    local path=${*: -1}
    case $path in /*) ;; .) path=$PWD ;; *) path=$PWD/${path#./} ;; esac
    printf '%s\n' "$path"
}
readlink() { realpath "$@"; }
date() {
    local word
    for word; do
        case $word in +*) printf "%(${word#+})T\n" -1; return 0 ;; esac
    done
    printf '%(%c)T\n' -1
}
seq() {
    local first=1 step=1 last=${*: -1} number
    [ $# -lt 2 ] || first=$1
    [ $# -lt 3 ] || step=$2
    for ((number = first; step > 0 ? number <= last : number >= last; number += step)); do printf '%s\n' "$number"; done
}
cat() {
    local line path
    [ $# -gt 0 ] || set -- /dev/fd/0
    for path; do
        while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line" 2>/dev/null; done <"$path"
    done 2>/dev/null || printf '<output-of-cat>\n'
    return 0
}
# By name, since a script may put folders of programs on its PATH.
for __name in python python3 torchrun ray accelerate deepspeed pip pip3 nvidia-smi huggingface-cli hf nproc mkdir rm ls tee; do
    eval "$__name() { __run $__name \"\$@\"; }"
done
unset __name
