#!/usr/bin/env bash
# Conformance on a machine with a GPU, in one call: two fuzzing runs, and beside them the quick suite on the cuda backend
# and on each of its kernels, then on the peers that tools/peers/build.sh has built.
#
#   OUT=/tmp/results tools/gpu_conformance.sh        about MINUTES (5) + 1 minutes; needs python3 with torch, typer, rich
#
# Nothing that fails, hangs or crashes stops the rest: each step has a limit, prints its exit code (0 right, 1 failures,
# 2 could not run, 124 out of time) and the end of its output. In $OUT: fuzz-1.json, fuzz-2.json, check-cuda.json and
# check-peers.json (the reports of `dsa-topk check` of all backends in one file), conformance.log, and replays.tar.gz
# when ours failed. Exit code: 1 if a step of ours was not right (peers do not count), else 0.
# Settings (environment): OUT, MINUTES (whole), PYTHON, DEVICE, LANES (checks at a time), CHECK_LIMIT and PEER_LIMIT (s
# for each backend), DEADLINE (s for everything), PEERS (names in tools/peers/check_adapters.py, may be empty).
set -uo pipefail

cd "$(dirname "$0")/.." || exit 2
out=${OUT:-conformance-out}
minutes=${MINUTES:-5}
python=${PYTHON:-python3}
device=${DEVICE:-cuda:0}
lanes=${LANES:-4}
check_limit=${CHECK_LIMIT:-150}
peer_limit=${PEER_LIMIT:-100}
deadline=${DEADLINE:-$((minutes * 60 + 150))}
peers=${PEERS-sgl_v2 ds_fp32 fi_native fi_det fi_tie_small}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD/src PYTHONUNBUFFERED=1
mkdir -p "$out" || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

step() { # name limit command...: leaves name.log and name.code
  local name=$1 limit=$2 code left began=$SECONDS
  shift 2
  left=$((deadline - SECONDS))
  ((limit > left)) && limit=$left
  if ((limit < 1)); then
    echo 124 >"$work/$name.code"
    echo "== $name: not run, no time left"
    return
  fi
  # KILL after TERM: a process that waits for a hanging kernel does not hear the first.
  timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1 </dev/null
  code=$?
  ((code == 137)) && code=124
  echo "$code" >"$work/$name.code"
  echo "== $name: exit code $code after $((SECONDS - began)) s; $(grep -v '^ *$' "$work/$name.log" | tail -n 1 | cut -c 1-300)"
}

check() { # name limit backend: into name.json
  step "$1" "$2" "$python" -m dsa_topk.cli check --backend "$3" --suite quick --device "$device" --timeout 60 \
    --json "$work/$1.json" --save "$work/replays"
}

# The same command, but a call that kills or stops its worker is not shrunk (14 starts of a process each time), or one
# fault would use up the peer's time.
unshrunk='import dsa_topk.conformance.isolate as i; i._CRASH_TRIALS = 0; from dsa_topk.cli import main; main()'
check_peer() { # adapter
  step "peer-$1" "$peer_limit" "$python" -c "$unshrunk" check --backend "tools.peers.check_adapters:$1" --suite quick \
    --device "$device" --timeout 20 --json "$work/peer-$1.json" --save "$work/replays-of-peers"
}

merge() { # prefix target: the reports of prefix-*.json in one file; those that left none are named
  "$python" - "$work" "$1" "$2" <<'PY'
import json, pathlib, sys

from dsa_topk._files import write_json

work, prefix, target = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
merged, reports, codes, commands = {}, [], {}, []
for code in sorted(work.glob(f"{prefix}-*.code")):
    name = code.stem.removeprefix(f"{prefix}-")
    codes[name] = int(code.read_text())
    try:
        content = json.loads(code.with_suffix(".json").read_text())
    except (OSError, ValueError):
        continue
    reports += content.pop("reports")
    commands.append(content.pop("command"))
    merged = content
write_json(target, {**merged, "commands": commands, "exit_codes": codes, "reports": reports})
for report in reports:
    counts = ", ".join(f"{number} {status}" for status, number in report["counts"].items())
    print(f"{report['backend']} ({report['mode']}): {report['problems']} problems, {report['rows']} rows: {counts}")
PY
}

# Once, before the clocks of the fuzzing start: the others find the compiled module in the cache.
step build 240 "$python" -m dsa_topk.cli build

for seed in 1 2; do
  step "fuzz-$seed" $((minutes * 60 + 90)) "$python" -m dsa_topk.cli fuzz --backend cuda --minutes "$minutes" --seed "$seed" \
    --device "$device" --json "$out/fuzz-$seed.json" --save "$work/replays" &
done

# Kernels that share a row take 2 and 7 blocks a row: the smallest, and one that divides nothing.
backends=$("$python" - <<'PY'
from dsa_topk._plan import KERNELS, SEVERAL, SPREAD

for kernel in KERNELS:
    sizes = (2, 7) if kernel in SEVERAL else (5,) if kernel in SPREAD else ()
    print(*(f"cuda-{kernel}-{size}" for size in sizes) if sizes else (f"cuda-{kernel}",))
PY
) || echo "== kernels: could not be listed"
# shellcheck disable=SC2206  # a list on purpose
backends=(cuda $backends)
running=()
for ((lane = 0; lane < lanes; lane++)); do
  (for ((i = lane; i < ${#backends[@]}; i += lanes)); do check "ours-${backends[i]}" "$check_limit" "${backends[i]}"; done) &
  running+=($!)
done
wait "${running[@]}"

for peer in $peers; do
  check_peer "$peer" &
done
wait # for the fuzzing too

merge ours "$out/check-cuda.json"
[[ -n $peers ]] && merge peer "$out/check-peers.json"
for log in "$work"/*.log; do
  printf '======== %s\n' "$(basename "$log" .log)"
  cat "$log"
done >"$out/conformance.log"
[[ -d $work/replays ]] && tar -czf "$out/replays.tar.gz" -C "$work" replays

bad=0
for code in "$work"/{fuzz,ours}-*.code; do
  [[ $(cat "$code") == 0 ]] || { bad=1 && echo "== not right: $(basename "$code" .code)"; }
done
exit $bad
