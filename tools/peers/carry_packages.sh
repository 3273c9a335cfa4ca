#!/usr/bin/env bash
# Takes the real flashinfer and sgl_kernel packages to a GPU machine that reaches no package index and takes 64 MiB a call.
#
#   tools/peers/carry_packages.sh pack              # here: .pkgs/site.tar.xz (about 30 MB); needs pip, nvcc 13, half an hour
#   tools/peers/carry_packages.sh unpack [FOLDER]   # there: into FOLDER (default /tmp/site), then imports everything once
#
# Between the two, .pkgs travels with the tree (.git/info/exclude should name /.pkgs/). There, with FOLDER in PYTHONPATH:
# tools/peers/package_evidence.py. What travels: every Python file of the packages, untouched, with their metadata, so that
# versions and public functions are those of the wheels; of compiled code only what top-k on an sm_90 GPU needs:
#   flashinfer   its "topk" module, from its own sources with the flags of its own JIT, where it looks for prebuilt modules
#                (flashinfer/data/aot); no sources, no other kernels
#   sgl_kernel   sm90/common_ops; not flash_ops and the other attention libraries, not triton_kernels
#   tvm_ffi      the wheel as it is (flashinfer needs it, so does dsa_topk)
# sglang-kernel is the newest release whose library loads with torch 2.11: 0.4.6.post1 and 0.4.10 miss symbols of later
# torch versions. Not in the archive, so expected there: torch 2.11 with CUDA 13, numpy, requests, tabulate, tqdm, ninja,
# einops, click, nvidia-ml-py, cuda-bindings.
#
# Settings (environment): PYTHON with pip (default <repo>/.venv/bin/python), CUDA_HOME (default /usr/local/cuda),
# PKGS_WORK (wheels and objects, default /tmp/dsa-packages).
set -euo pipefail

flashinfer_version=0.7.4
sglang_kernel_version=0.4.6
tvm_ffi_version=0.1.15.post2
python_version=3.12 # of the GPU machine
limit=$((48 << 20)) # what of 64 MiB is left for this beside the tree

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
python=${PYTHON:-$repo/.venv/bin/python}
cuda=${CUDA_HOME:-/usr/local/cuda}
work=${PKGS_WORK:-/tmp/dsa-packages}
archive=$repo/.pkgs/site.tar.xz

wheel() { # name version glob: prints the wheel's path, downloading it first where it is missing
  local name=$1 version=$2 glob=$3 platforms=() n
  if ! compgen -G "$work/wheels/$glob" >/dev/null; then
    for n in 2_17 2_24 2_27 2_28 2_31 2_34 2_35 2014; do platforms+=(--platform "manylinux${n/#2_/_2_}_x86_64"); done
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python_version" \
      --implementation cp "${platforms[@]}" -d "$work/wheels" "$name==$version" >&2
  fi
  compgen -G "$work/wheels/$glob" | head -n 1
}

extract() { # wheel folder pattern...: the members that match one of the patterns (regular expressions, from the start)
  "$python" - "$@" <<'PY'
import re, sys, zipfile
wheel, folder, *patterns = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if any(re.match(p, name) for p in patterns)])
PY
}

build_topk() { # flashinfer's wheel: leaves $work/topk.so
  [[ -e $work/topk.so ]] && return
  local data=$work/flashinfer/flashinfer/data curand=$cuda/include objects=() source
  [[ -e $work/flashinfer/.complete ]] || {
    extract "$1" "$work/flashinfer" 'flashinfer/data/(include|csrc|cutlass/include|cutlass/tools/util/include|cccl|spdlog)/'
    touch "$work/flashinfer/.complete"
  }
  if [[ ! -e $curand/curand.h ]]; then # its sampling header, which top-k includes, wants curand's
    curand=$work/curand/nvidia/cu13/include
    [[ -e $curand/curand.h ]] || extract "$(wheel nvidia-curand 10.4.5.25 'nvidia_curand-*.whl')" "$work/curand" 'nvidia/cu13/include/'
  fi
  extract "$(wheel apache-tvm-ffi "$tvm_ffi_version" "apache_tvm_ffi-$tvm_ffi_version-*.whl")" "$work/tvm_ffi" 'tvm_ffi/(include|lib)/'
  for source in topk flashinfer_topk_binding flashinfer_fast_topk_clusters_binding cub_topk; do # the last takes long
    objects+=("$work/objects/$source.o")
    [[ -e ${objects[-1]} ]] && continue
    "$cuda/bin/nvcc" -c "$data/csrc/$source.cu" -o "$work/objects/$source.o.part" --compiler-options=-fPIC \
      -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -DNDEBUG -use_fast_math --expt-relaxed-constexpr \
      -static-global-template-stub=false -Xfatbin=-compress-all --compress-mode=size -DPy_LIMITED_API=0x03090000 \
      -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 \
      -DFLASHINFER_ENABLE_FP8_E8M0 -DFLASHINFER_ENABLE_FP4_E2M1 -I"$data/cccl/cub" -I"$data/cccl/libcudacxx/include" \
      -I"$data/cccl/thrust" -isystem "$work/tvm_ffi/tvm_ffi/include" -isystem "$data/include" -isystem "$data/csrc" \
      -isystem "$data/cutlass/include" -isystem "$data/cutlass/tools/util/include" -isystem "$data/spdlog/include" \
      -isystem "$curand"
    mv "$work/objects/$source.o.part" "$work/objects/$source.o"
  done
  g++ -shared "${objects[@]}" -L"$work/tvm_ffi/tvm_ffi/lib" -ltvm_ffi -L"$cuda/lib64" -lcudart -o "$work/topk.so.part"
  strip --strip-unneeded "$work/topk.so.part"
  mv "$work/topk.so.part" "$work/topk.so"
}

pack() {
  mkdir -p "$work/wheels" "$work/objects" "$(dirname "$archive")"
  local flashinfer sglang_kernel tvm_ffi site=$work/site
  flashinfer=$(wheel flashinfer-python "$flashinfer_version" "flashinfer_python-$flashinfer_version-*.whl")
  sglang_kernel=$(wheel sglang-kernel "$sglang_kernel_version" "sglang_kernel-$sglang_kernel_version-*.whl")
  tvm_ffi=$(wheel apache-tvm-ffi "$tvm_ffi_version" "apache_tvm_ffi-$tvm_ffi_version-*.whl")
  build_topk "$flashinfer"
  rm -rf "$site"
  extract "$flashinfer" "$site" 'flashinfer/(?!data/).*\.py$' '[^/]*\.dist-info/'
  extract "$sglang_kernel" "$site" 'sgl_kernel/.*\.py$' 'sgl_kernel/sm90/' '[^/]*\.dist-info/'
  extract "$tvm_ffi" "$site" '.*'
  mkdir -p "$site/flashinfer/data/aot/topk"
  cp "$work/topk.so" "$site/flashinfer/data/aot/topk/topk.so"
  "$python" - "$site" "$archive" <<'PY'
import sys, tarfile
site, archive = sys.argv[1:]
with tarfile.open(archive + ".part", "w:xz", preset=9) as tar:
    tar.add(site, arcname=".")
PY
  mv "$archive.part" "$archive" # atomic: a call that copies .pkgs never takes half a file
  ls -l "$archive"
  (($(stat -c %s "$archive") <= limit)) || { echo "carry_packages: more than $limit bytes: too much for one call" >&2 && exit 1; }
}

unpack() { # folder
  mkdir -p "$1"
  python3 -m tarfile -e "$archive" "$1"
  # Without its compiler: a prebuilt module that does not load is an error here, not minutes of building.
  FLASHINFER_DISABLE_JIT=1 PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH} python3 - <<'PY'
import importlib.metadata, torch, tvm_ffi, flashinfer, sgl_kernel
from flashinfer.topk import get_topk_module

get_topk_module()
names = ("torch", "apache-tvm-ffi", "flashinfer-python", "sglang-kernel")
print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names), "|", sgl_kernel.common_ops.__file__)
PY
}

case ${1:-} in
  pack) pack ;;
  unpack) unpack "${2:-/tmp/site}" ;;
  *) sed -n '2,6p' "$0" && exit 2 ;;
esac
