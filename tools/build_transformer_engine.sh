#!/usr/bin/env bash
# Compiles Transformer Engine's PyTorch half with g++ alone: it is C++ without device code, and nvcc is not needed.
#
#   tools/build_transformer_engine.sh PYTHON SOURCE OUT [FILE.cpp ...]
#
# PYTHON: of an environment with torch's build for CUDA 13.  SOURCE: the unpacked source distribution transformer_engine_torch.
# OUT gets objects, the headers that torch's wheels lack, and the module.  With FILEs, paths below SOURCE/csrc, only these
# are compiled, and nothing is linked.  A file takes 15 to 30 s of a core; JOBS=2 says how many are compiled at once.
set -euo pipefail
python=$1
source=$(realpath "$2")
mkdir -p "$3"
out=$(realpath "$3")
shift 3

"$python" -m pip --disable-pip-version-check install -qq --no-deps --upgrade --target "$out/headers" \
    'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
folders=(
    "$out/headers/nvidia/cu13/include" "$out/headers/nvidia/cu13/include/cccl"
    "$site/nvidia/cu13/include" "$site/nvidia/cudnn/include" "$site/nvidia/nccl/include"
    "$source/common_headers" "$source/common_headers/common" "$source/common_headers/common/include" "$source/csrc"
    "$site/torch/include" "$site/torch/include/torch/csrc/api/include"
    "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
)
flags=(
    -std=c++17 -O2 -g0 -fPIC -fvisibility=hidden
    -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=transformer_engine_torch -DUSE_CUDA "${folders[@]/#/-I}"
)

cd "$source/csrc"
if (($#)); then files=("$@"); else mapfile -t files < <(find . -name '*.cpp' | sort); fi
compile() { # FILE: its object is there only when it is whole, so that a build that was cut off goes on
    local object
    object=$OBJECTS/$(tr / _ <<<"${1#./}").o
    [[ -s $object ]] || { g++ "${@:2}" -c "$1" -o "$object.new" && mv "$object.new" "$object"; }
}
export -f compile
export OBJECTS=$out/objects
mkdir -p "$OBJECTS"
printf '%s\n' "${files[@]}" | xargs -P "${JOBS:-2}" -I{} bash -c 'compile "$@"' _ {} "${flags[@]}"
(($#)) && exit 0

cp "$source/PKG-INFO" "$out/PKG-INFO" # names the version that the other two parts must have
g++ -shared -o "$out/transformer_engine_torch$suffix" "$OBJECTS"/*.o \
    -L"$site/torch/lib" -lc10 -ltorch -ltorch_cpu -ltorch_cuda -lc10_cuda -ltorch_python \
    -L"$site/nvidia/cu13/lib" -l:libcudart.so.13 -Wl,-rpath,'$ORIGIN'
