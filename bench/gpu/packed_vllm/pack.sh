#!/usr/bin/env bash
# pack.sh OUT [WHEEL]: vLLM for a Hopper GPU beside a Python 3.12 that has torch 2.11, as OUT/1, OUT/2 ... of PART_MIB (36) at most.
# WHEEL: vllm-*-cp312-*.whl for x86-64 where it lies here, else it is downloaded (327 MB). Needs pip, unzip and xz.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd) wheel=${2:-} version=${VLLM_VERSION:-0.32.0}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
site=$build/site
mkdir "$site"

platforms=(--only-binary=:all: --python-version 3.12 --implementation cp)
for tag in $(seq -f 'manylinux_2_%g' 39 -1 5) manylinux2014 manylinux2010 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
if [ -z "$wheel" ]; then
  python3 -m pip download -q --no-deps "${platforms[@]}" -d "$build" "vllm==$version"
  wheel=$(echo "$build"/vllm-*.whl)
fi

# Left out: FlashAttention 2, which has no code for Hopper, kernels of other models and architectures, the front end in Rust.
unzip -q "$wheel" -d "$site" -x '*_vllm_fa2_C*' vllm/vllm-rs 'vllm/third_party/deep_gemm/*' 'vllm/third_party/fmha_sm100/*' \
  'vllm/_flashkda*' 'vllm/_deepselect*' 'vllm/_flashmla*' 'vllm/_qutlass*' 'vllm/_moe_C*' 'vllm/benchmarks/*' \
  'vllm/entrypoints/serve/instrumentator/static/*'
python3 -m pip install -q --no-deps --no-compile "${platforms[@]}" --target "$site" -r "$here/packages.txt"

prune() { # of a library, only GPU code for Hopper, and of that what holds one of the words
  python3 "$here/fatbin.py" prune "$site/$1" "$build/pruned.so" "${@:2}"
  mv "$build/pruned.so" "$site/$1"
}
prune vllm/_C_stable_libtorch.abi3.so
prune vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so \
  flash_fwd_hdim64_bf16_,flash_fwd_hdim128_bf16_,flash_fwd_combine_cu,flash_prepare_scheduler_cu

find "$site" -name __pycache__ -prune -exec rm -rf {} +
rm -rf "$site/bin"
tar -C "$site" --sort=name --mtime=@0 --owner=0 --group=0 -cf - . | xz --x86 --lzma2=preset=9e,dict=128MiB > "$build/site.tar.xz"
rm -rf "$out"/[0-9]*
split -b "${PART_MIB:-36}M" -a 1 --numeric-suffixes=1 "$build/site.tar.xz" "$build/part."
count=$(ls "$build"/part.* | wc -l)
sum=$(sha256sum < "$build/site.tar.xz" | cut -c1-64)
for n in $(seq "$count"); do
  mkdir "$out/$n"
  mv "$build/part.$n" "$out/$n/part.$n"
  echo "$count $sum" > "$out/$n/parts"
done
du -sh "$site" "$out"/[0-9]*
