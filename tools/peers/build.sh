#!/usr/bin/env bash
# Builds the peers' kernels (sglang's topk_v2 and DeepSelect, FlashInfer's top-k) from their own published wheels into
# .peers/so, for machines where the peers' Python packages are not installed. No GPU and no torch needed.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/peers/build.sh [target ...]          default: probe v2 ds
  fetch     download and unpack the wheels only
  probe     sglang's occupancy probe (asked for C8 and C16 at run time: v2 is of no use without it)
  v2        sglang topk_v2, launched with PDL, for the cluster counts C8 and C16
  ds        DeepSelect fp32 with page table (buckets 512, 1024, 4096) and without (4096)
  ds-bf16   DeepSelect bf16, the same buckets
  fi        FlashInfer's top-k module (radix and filtered; a minute or two of compile)
  floor     our read floor; also a second one, not in the repository, where its source is at hand (benchmarks/check_floor.py
            compares the two)
settings (environment)
  PEERS_WORK  unpacked wheels and objects (default /tmp/bench-peers)   OUT   shared objects (default <repo>/.peers/so)
  C8, C16     answers of sglang's probe on the target GPU (default 30 and 7: an H200)
  WHEELS      folder looked through before anything is downloaded (default /tmp/dl)
  PYTHON      python with pip (default: <repo>/.venv/bin/python)   CUDA_HOME   CUDA 13 toolkit (default /usr/local/cuda)
TEXT
}

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
work=${PEERS_WORK:-/tmp/bench-peers}
out=${OUT:-$repo/.peers/so}
wheels=${WHEELS:-/tmp/dl}
cuda=${CUDA_HOME:-/usr/local/cuda}
python=${PYTHON:-$repo/.venv/bin/python}
c8=${C8:-30}
c16=${C16:-7}
arch=(-gencode=arch=compute_90a,code=sm_90a)

# The versions that the recorded benchmarks compare with.
sglang_version=0.5.23
tvm_ffi_version=0.1.15.post2
flashinfer_version=0.7.4

unpack() { # requirement wheel-glob folder member-prefix...
  local requirement=$1 glob=$2 folder=$3
  shift 3
  [[ -e $folder/.complete ]] && return
  mkdir -p "$folder" "$work/wheels"
  local wheel
  wheel=$(find "$wheels" "$work/wheels" -name "$glob" 2>/dev/null | head -1 || true) # either folder may be missing
  if [[ -z $wheel ]]; then
    "$python" -m pip download --quiet --no-deps "$requirement" -d "$work/wheels"
    wheel=$(find "$work/wheels" -name "$glob" | head -1)
  fi
  # Only the members named: the FlashInfer wheel holds some ten thousand files that nothing here includes.
  "$python" - "$wheel" "$folder" "$@" <<'PY'
import sys, zipfile
wheel, folder, *prefixes = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.startswith(tuple(prefixes) or "")])
PY
  touch "$folder/.complete"
}

fetch() {
  unpack "apache-tvm-ffi==$tvm_ffi_version" "apache_tvm_ffi-$tvm_ffi_version-*.whl" "$work/tvmffi"
  unpack "sglang==$sglang_version" "sglang-$sglang_version-*.whl" "$work/sglang" sglang/kernels/jit/ sglang/kernels/ops/
}

fetch_flashinfer() {
  unpack "flashinfer-python==$flashinfer_version" "flashinfer_python-$flashinfer_version-*.whl" "$work/fi" \
    flashinfer/data/cutlass/include flashinfer/data/cutlass/tools/util/include flashinfer/data/cccl flashinfer/data/spdlog \
    flashinfer/data/include flashinfer/data/csrc/topk flashinfer/data/csrc/flashinfer_topk flashinfer/data/csrc/tvm_ffi \
    flashinfer/data/csrc/cub_topk flashinfer/topk.py
}

fetch_curand() { # FlashInfer's sampling header, which topk.cu includes, wants curand's: toolkits without it take the wheel
  [[ -e $cuda/include/curand.h ]] || unpack "nvidia-curand" "nvidia_curand-*.whl" "$work/curand" nvidia/cu13/include/
}

link() { # name object...
  local name=$1
  shift
  local staged
  staged=$(mktemp "$out/.$name.XXXXXX")
  g++ -shared "$@" -L"$work/tvmffi/tvm_ffi/lib" -ltvm_ffi -L"$cuda/lib64" -lcudart -o "$staged"
  strip --strip-unneeded "$staged"
  chmod 755 "$staged"
  mv "$staged" "$out/$name.so" # atomic: a machine that copies .peers never sees half a file
  ls -l "$out/$name.so"
}

# One translation unit per module: the peer's own header plus the exports its Python JIT would have generated.
sglang_module() { # name header extra-flags export=expression...
  local name=$1 header=$2 flags=$3 entry
  shift 3
  [[ -e $out/$name.so && -z ${FORCE:-} ]] && { echo "$name.so is there (FORCE=1 builds it again)"; return; }
  local source=$work/src/$name.cu jit=$work/sglang/sglang/kernels/jit
  {
    printf '#include <tvm/ffi/%s>\n' container/tensor.h dtype.h error.h extra/c_env_api.h function.h
    printf '#include "%s/csrc/%s"\nnamespace sglang {\n' "$jit" "$header"
    for entry in "$@"; do printf 'TVM_FFI_DLL_EXPORT_TYPED_FUNC(%s, (%s));\n' "${entry%%=*}" "${entry#*=}"; done
    printf '}\n'
  } >"$source"
  # shellcheck disable=SC2086  # $flags is a list on purpose
  "$cuda/bin/nvcc" -c "$source" -o "$work/obj/$name.o" -Xcompiler -fPIC "${arch[@]}" -DSGL_CUDA_ARCH=900 -std=c++20 -O3 \
    --expt-relaxed-constexpr $flags -I"$work/tvmffi/tvm_ffi/include" -I"$jit/include"
  link "$name" "$work/obj/$name.o"
}

deepselect() { # fp32 | bf16
  local dtype=$1 vendor=$work/sglang/sglang/kernels/jit/csrc/deep_select/vendor cutlass=$work/fi/flashinfer/data/cutlass
  local flags="--expt-extended-lambda --use_fast_math --ftz=false -Xptxas=--register-usage-level=10 -I$vendor"
  flags+=" -I$vendor/3rdparty/kerutils/include -I$cutlass/include -I$cutlass/tools/util/include"
  # Threads, blocks per SM, elements per round, rounds and pipeline depth: sglang's own table in ops/attention/deep_select.py.
  config() { echo "TopkSelectConfig<${dtype}_t, int32_t, false, false, false, $1, $2, $3, $4, 4096, $5, 512, 1, $6>"; }
  local page bucket configs
  for page in true false; do
    for bucket in 4096 1024 512; do
      [[ $page == false && $bucket != 4096 ]] && continue # k = 512 and 1024 are measured with a page table only
      case $dtype-$bucket in
        fp32-4096) configs=$(config 4096 256 1 4096 3 $page) ;;
        fp32-*) configs=$(config $bucket 512 1 8192 3 $page) ;;
        bf16-4096) configs=$(config 4096 512 1 8192 3 $page) ;;
        bf16-1024) configs="$(config 1024 512 1 8192 5 $page), $(config 1024 256 2 4096 3 $page)" ;;
        bf16-512) configs="$(config 512 512 1 8192 5 $page), $(config 512 256 2 4096 4 $page)" ;;
      esac
      sglang_module "ds_${dtype}_${bucket}_$page" deep_select/entry.cuh "$flags" "topk=deep_select::TopkNormal<$configs>::topk"
    done
  done
}

flashinfer() {
  [[ -e $out/fi_topk.so && -z ${FORCE:-} ]] && { echo "fi_topk.so is there (FORCE=1 builds it again)"; return; }
  local data=$work/fi/flashinfer/data source objects=()
  # cub_topk.cu and the SM100 cluster binding are left out (half an hour of compile, never chosen on Hopper for k = 2048):
  # their entry points are cut from the binding by a filter, nothing else changes.
  "$python" "$here/trim_binding.py" "$data/csrc/flashinfer_topk_binding.cu" "$work/src/fi_binding.cu"
  for source in "$work/src/fi_binding.cu" "$data/csrc/topk.cu"; do
    "$cuda/bin/nvcc" -c "$source" -o "$work/obj/fi_$(basename "$source" .cu).o" -Xcompiler -fPIC "${arch[@]}" -std=c++17 -O3 \
      -use_fast_math -DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 \
      --expt-relaxed-constexpr -Xfatbin=-compress-all -DNDEBUG -I"$data/csrc" -I"$data/include" -I"$work/tvmffi/tvm_ffi/include" \
      -I"$data/cccl/cub" -I"$data/cccl/libcudacxx/include" -I"$data/cccl/thrust" \
      -isystem "$data/cutlass/include" -isystem "$data/spdlog/include" -isystem "$work/curand/nvidia/cu13/include"
    objects+=("$work/obj/fi_$(basename "$source" .cu).o")
  done
  link fi_topk "${objects[@]}"
}

floor() { # the one object here that is ours: for GPU machines without nvcc
  local theirs
  "$cuda/bin/nvcc" -shared -Xcompiler=-fPIC,-fvisibility=hidden -std=c++17 -O3 "${arch[@]}" \
    "$repo/src/dsa_topk/bench/csrc/floor.cu" -o "$out/dsa_floor.so"
  # Outside of the repository: a folder that some checkouts have inside or beside them.
  for theirs in "$repo/shared/peers-bench/floors.cu" "$repo/../shared/peers-bench/floors.cu"; do
    [[ -e $theirs ]] || continue
    "$cuda/bin/nvcc" -shared -Xcompiler=-fPIC -O3 "${arch[@]}" "$theirs" -o "$out/floors.so"
    break
  done
  ls -l "$out"/*floor*.so
}

mkdir -p "$work/src" "$work/obj" "$out"
[[ $# -eq 0 ]] && set -- probe v2 ds
for target in "$@"; do
  case $target in
    -h | --help) usage && exit ;;
    fetch) fetch && fetch_flashinfer ;;
    probe) fetch && sglang_module sgl_probe occupancy/cluster_probe.cuh "" get_max_active_clusters=get_max_active_clusters ;;
    v2)
      fetch
      kernel="TopKKernel<true>"
      sglang_module "sgl_v2_pdl_${c8}_$c16" deepseek_v4/topk_v2.cuh "-DSGL_TOPK_V2_MAX_C8_OCC2=$c8 -DSGL_TOPK_V2_MAX_C16_OCC1=$c16" \
        "topk_transform_paged=$kernel::transform_paged" "topk_transform_ragged=$kernel::transform_ragged" "topk_plan=$kernel::plan"
      ;;
    ds) fetch && fetch_flashinfer && deepselect fp32 ;;
    ds-bf16) fetch && fetch_flashinfer && deepselect bf16 ;;
    fi) fetch && fetch_flashinfer && fetch_curand && flashinfer ;;
    floor) floor ;;
    *) usage >&2 && exit 2 ;;
  esac
done
