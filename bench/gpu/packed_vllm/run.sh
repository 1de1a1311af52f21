#!/usr/bin/env bash
# run.sh [ARGUMENT ...]: on the machine with the GPU, in the root of the checkout: takes the parts that came with this call
# (build/vllm-packed/N), and once all are there unpacks them and runs `bench/run.py gpu_vllm` with these arguments.
# What is there is not done again. Figures go to $OUT; those of an earlier call are taken from build/$NAME (gpu_vllm).
# Runs with other arguments, as --draft head or --tune, have a NAME of their own.
#
# Where a server does not start, in this order: ATTENTION=TRITON_ATTN; COMPILE='{"mode":0,"cudagraph_mode":"NONE"}';
# VLLM_USE_V2_MODEL_RUNNER=0 COMPILE='{}'.
set -u
NAME=${NAME:-gpu_vllm} work=${WORK:-/tmp/vllm-packed}
OUT=${OUT:-$PWD/build/$NAME}
mkdir -p "$work/parts" "$work/link" "$work/$NAME" "$OUT"
cp build/vllm-packed/[0-9]*/part* "$work/parts/" 2> /dev/null

if [ ! -e "$work/site/.unpacked" ]; then
  [ -e "$work/parts/parts" ] || { echo "missing: build/vllm-packed/1; pack.sh makes it, carry names it"; exit 3; }
  read -r count sum < "$work/parts/parts"
  for n in $(seq "$count"); do
    [ -e "$work/parts/part.$n" ] || { echo "missing: part $n of $count; carry build/vllm-packed/$n in the next call"; exit 0; }
  done
  cat $(seq -f "$work/parts/part.%g" "$count") > "$work/site.tar.xz"
  [ "$(sha256sum < "$work/site.tar.xz" | cut -c1-64)" = "$sum" ] || { echo "missing: the parts are not of one packing; carry them anew"; rm -f "$work"/parts/*; exit 3; }
  mkdir -p "$work/site"
  python3 - "$work" <<'PYTHON' || exit 3
import sys, tarfile
work = sys.argv[1]
with tarfile.open(f"{work}/site.tar.xz", "r|xz") as packed:
    packed.extractall(f"{work}/site", filter="tar")
open(f"{work}/site/.unpacked", "w").close()
PYTHON
fi

ln -sfn "$PWD" "$work/link/spectune"
export PYTHONPATH=$work/site:$work/link PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_CACHE_ROOT=$work/cache VLLM_USE_FLASHINFER_SAMPLER=0
compile=${COMPILE:-'{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'}
export SPECTUNE_VLLM_ARGS="${SPECTUNE_VLLM_ARGS---dtype bfloat16 --gpu-memory-utilization 0.45 --attention-backend ${ATTENTION:-FLASH_ATTN} --compilation-config '$compile'}"
nvidia-smi --query-gpu=name,driver_version,memory.free --format=csv,noheader
command -v gcc cc > /dev/null || echo "no C compiler: Triton needs one"
for kept in "$work/$NAME" "build/$NAME"; do
  [ "$kept" -ef "$OUT" ] || [ -e "$OUT/rows.jsonl" ] || cp "$kept"/* "$OUT/" 2> /dev/null
done
# While the pair is written; its log says which of vLLM's libraries computes.
[ -s "$OUT/libraries.log" ] || python3 bench/gpu/packed_vllm/libraries.py > "$OUT/libraries.log" 2>&1 &
python3 bench/run.py gpu_vllm --out "$OUT" --folder "$work/ballast" "$@"
code=$?
wait
cp "$OUT"/* "$work/$NAME/" 2> /dev/null
grep -h "FAIL" "$OUT/libraries.log" 2> /dev/null
exit $code
