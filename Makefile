# Everything a person types. A virtual environment is made in .venv on first use; only Python 3.11+ and make are needed.
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
INSTALL = $(BIN)/pip install --disable-pip-version-check
# Where there is no NVIDIA GPU: the usual torch brings gigabytes of CUDA along. If that index cannot be reached, it is taken all the same.
CPU_TORCH = $(INSTALL) --no-deps --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch
LOGGED = >>$(VENV)/install.log 2>&1 || { tail -n 15 $(VENV)/install.log >&2; exit 1; }

# Where it is set, every process compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help tune real serve test test-vllm lint wheel acceptance evidence acceptance-vllm train clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed (set PYTHON=/path/to/python3)" >&2; exit 2; }
	@echo "installing into $(VENV) (log: $(VENV)/install.log)"
	@$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null 2>&1 || $(CPU_TORCH) >>$(VENV)/install.log 2>&1 || \
		echo "no torch for CPUs from download.pytorch.org: taking the usual one, with gigabytes of CUDA"
	@$(INSTALL) -c constraints.txt -e '.[native,search]' $(LOGGED)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(INSTALL) -c constraints.txt -e '.[dev]' $(LOGGED)
	@touch $@

tune: $(VENV)/.installed ## Record, search, execute and publish for the demo pair
	$(RUN) cli.py tune --pair demo --limit 48 --max-new-tokens 64 $(ARGS)

TEXTS ?= build/real/texts.jsonl

real: $(VENV)/.installed ## The same for Gemma 3 270M and prompt lookup (fetches 253 MB; its terms apply); TEXTS=FILE: other prompts
	PYTHONPATH=tools $(RUN) -m gemma.target --out build/real
	PYTHONPATH=tools $(RUN) -m gemma.texts --out build/real/texts.jsonl
	$(RUN) cli.py check build/real/pair.json $(TEXTS)
	$(RUN) cli.py tune --pair build/real/pair.json --workload $(TEXTS) --limit 48 --max-new-tokens 64 --budget 6m $(ARGS)

$(VENV)/.installed-serve: $(VENV)/.installed
	@$(INSTALL) -c constraints.txt -e '.[native,search,serve]' $(LOGGED)
	@touch $@

serve: $(VENV)/.installed-serve ## Serve the demo pair by OpenAI's API, under what `make tune` published
	$(RUN) cli.py serve --pair demo $(ARGS)

# Three processes for two cores: many tests wait, for a server, a lease, a process.
test: $(VENV)/.installed-dev ## The tests (about 7 minutes on two idle cores)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist loadfile $(ARGS)

# By itself vLLM binds every engine to the same core.
test-vllm: .venv-vllm/.installed ## The tests in a real vLLM on a CPU, in an environment of their own (3.7 GB)
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind .venv-vllm/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile tests/in_vllm $(ARGS)

.venv-vllm/.installed: bench/served/install_vllm_cpu.sh pyproject.toml constraints.txt
	bench/served/install_vllm_cpu.sh $(PYTHON)

# Of the bench, whether what it calls is there: its figures take an hour, and nothing else runs all of it.
CALLS = --config-file= --ignore-missing-imports --follow-imports=silent $(addprefix --disable-error-code=,import-untyped arg-type dict-item misc assignment)

lint: $(VENV)/.installed-dev ## Style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@mkdir -p $(VENV)/typing && ln -sfn $(CURDIR) $(VENV)/typing/spectune # mypy does not follow the editable install
	MYPYPATH=$(VENV)/typing:tools $(RUN) -m mypy
	MYPYPATH=$(VENV)/typing:.:tests:tools $(RUN) -m mypy $(CALLS) -p bench

wheel: $(VENV)/.installed-dev ## Build the wheel, and use it in an empty environment
	.ci/wheel $(RUN)

acceptance: $(VENV)/.installed-dev ## The full-size checks (an hour on 2 cores, resumable; ARGS="NAME" for one); figures in bench/results
	$(RUN) bench/run.py $(ARGS)

evidence: $(VENV)/.installed-dev ## Every figure that is not of today's code, again (resumable; ARGS=--list: what is due, and for how long)
	$(RUN) bench/run.py evidence $(ARGS)

acceptance-vllm: .venv-vllm/.installed ## The full-size checks of a vLLM that serves (ARGS="--only NAME" for one); figures in bench/results
	VLLM_CPU_OMP_THREADS_BIND=nobind .venv-vllm/bin/python bench/run.py served $(ARGS)

train: $(VENV)/.installed ## Train the demo pair anew: make train GSM8K=path/to/gsm8k_train.jsonl
	PYTHONPATH=tools $(RUN) -m train_demo.train --gsm8k $(GSM8K) --out demo/pair

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-vllm .pytest_cache .mypy_cache .ruff_cache .acceptance
