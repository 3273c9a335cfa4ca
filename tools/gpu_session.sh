#!/usr/bin/env bash
# Everything that a change of src/ needs from an H200, in one call of some eight minutes on a machine with two GPUs: figures on
# GPU 0 (alone on it), beside them both fuzzers and the quick suite on GPU 1, then the tests and the sanitizers.
#
#   OUT=/tmp/results tools/gpu_session.sh COMMIT      # PYTHONPATH holds apache-tvm-ffi; .peers/so the peers' objects;
#                                                     # .pkgs/site.tar.xz the real packages (carry_packages.sh), or none
#
# Build the kernels beforehand (`dsa-topk build --arch 90a --cache-dir DIR`) and set DSA_TOPK_CACHE_DIR, or the first step pays
# for it. In $OUT: nvidia-h200.json (to tests/results/), fuzz-*.json (to tests/results/conformance/), decode.json, prefill.json and
# packed.json (to benchmarks/results/nvidia-h200/; then `dsa-topk bench --docs`), floor.json (to benchmarks/floor/), packages.json (to
# tests/results/packages/nvidia-h200.json), ncu.csv (tools/profile_kernels.py makes a table of it for docs/kernel-notes.md).
#
# The tests still meet the fuzzers' last minutes on GPU 1, where a test of the timer may fail: then run the tests again alone,
# `python tools/gpu_evidence.py --keep-sanitizers $OUT/nvidia-h200.json --out NEW.json` (three minutes).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
out=${OUT:?where the results go}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD/src PYTHONUNBUFFERED=1 DSA_TOPK_COMMIT=${1:?the commit}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
other=0
[ "$(nvidia-smi -L | wc -l)" -gt 1 ] && other=1

# The bench has a share of the processors to itself, so that host times are its own.
mine=() rest=()
if [ "$(nproc)" -ge 16 ]; then
  mine=(taskset -c 0-7)
  rest=(taskset -c "8-$(($(nproc) - 1))")
fi

tests() {
  CUDA_VISIBLE_DEVICES=$([ $other = 1 ] && echo 1,0 || echo 0) timeout 320 "${rest[@]}" python3 tools/gpu_evidence.py --limit 310 \
    --out "$out/nvidia-h200.json" >"$out/tests.log" 2>&1
  echo "tests: exit code $? after $SECONDS s; $(tail -n 1 "$out/tests.log")"
  touch "$work/tests.done"
}
conformance() {
  OUT=$work/conformance CUDA_VISIBLE_DEVICES=$other PEERS='' MINUTES=5 DEADLINE=330 timeout 340 "${rest[@]}" tools/gpu_conformance.sh \
    >"$work/conformance.log" 2>&1
  echo "conformance: exit code $? after $SECONDS s"
  grep '^==' "$work/conformance.log"
  cp "$work"/conformance/fuzz-*.json "$out/"
}
bench() { # name budget peers arguments...
  local name=$1 budget=$2 peers=$3
  shift 3
  CUDA_VISIBLE_DEVICES=0 timeout $((budget + 30)) "${mine[@]}" python3 -m dsa_topk.bench "$@" --peers "$peers" \
    --json "$out/$name.json" --budget "$budget" >"$work/$name.log" 2>&1
  echo "$name: exit code $? after $SECONDS s"
}
profile() { # needs a machine that lets ncu read counters; a refusal is told
  CUDA_VISIBLE_DEVICES=0 timeout 90 "${mine[@]}" ncu --clock-control none -k 'regex:(filter|resident|split|order)_kernel' \
    --csv --page raw --section SpeedOfLight --section WarpStateStats --section SchedulerStats --section Occupancy \
    --section MemoryWorkloadAnalysis --section LaunchStats python3 tools/profile_kernels.py >"$out/ncu.csv" 2>"$work/ncu.log"
  echo "ncu: exit code $? after $SECONDS s; $(tail -n 1 "$work/ncu.log")"
}
packages() { # the real flashinfer and sgl-kernel packages, where they were carried along
  [ -e .pkgs/site.tar.xz ] || return 0
  tools/peers/carry_packages.sh unpack "$work/site" >"$work/packages.log" 2>&1 &&
    CUDA_VISIBLE_DEVICES=0 PYTHONPATH=$work/site:$PWD/src FLASHINFER_DISABLE_JIT=1 timeout 130 "${rest[@]}" python3 \
      tools/peers/package_evidence.py --check-limit 30 --out "$out/packages.json" >>"$work/packages.log" 2>&1
  echo "packages: exit code $? after $SECONDS s; $(tail -n 1 "$work/packages.log")"
}

[ $other = 1 ] && conformance &
CUDA_VISIBLE_DEVICES=0 timeout 25 "${mine[@]}" python3 benchmarks/check_floor.py "$out/floor.json"
bench prefill 70 sgl_v2,ds_fp32,fi_native --suite prefill,k,dist --only mode=ragged,packed
bench decode 90 sgl_v2,ds_fp32,fi_det --suite decode,mtp,k,dist --only mode=decode,mtp,mixed
bench packed 20 fi_native,fi_det,fi_tieS,fi_tieL --suite packed
profile
packages &
# Figures come first, alone on their GPU: tests of two GPUs would use it as well, and others make the host busy.
if [ $other = 1 ]; then tests & else tests; conformance & fi
until [ -e "$work/tests.done" ]; do sleep 1; done
CUDA_VISIBLE_DEVICES=0 timeout 300 python3 tools/gpu_evidence.py --add-sanitizers --tool-limit 150 --out "$out/nvidia-h200.json" |
  tail -n 12
wait
tail -n 400 "$work"/*.log >"$out/session.log"
