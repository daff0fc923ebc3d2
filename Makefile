# Two commands: `make demo` and `make test`. Both make the environment first where it is missing.
#
#   make demo                      the main job on the embedded model
#   make test                      lint, types and the first tier of tests, on a machine without a GPU
#   make test WORKERS=4            tests in four processes instead of two
#   make test-all                  all tests: sweeps, browsers, Ray, soak, every target, limits on time
#   make demo PYTHON=python3       under a Python that already has torch with CUDA or ROCm, as it is
#   make smoke                     the minute before a commit
#   make browser                   a Chromium for the tests of the server's page, where apt has one
#   make learn                     the course's pages, pictures and notebooks from its lessons
#   make learn-record              runs the whole course and records our figures, under the Python that is active
#   make docs                      the site, into build/site: docs, course, API reference, measured tables
#   make package                   wheel and sdist, checked; the demo from the wheel, in a new environment
#   make soak                      64 clients on a server, ten hostile minutes between three quiet ones and three
#   make cpu-peers                 demo on a CPU beside llama.cpp (pip install llama-cpp-python), three quiet minutes
#   make corpus-speed TEXT=folder  the data chain, its kernels and its peers on real text, two quiet cores
#   make gpu-test, gpu-bench, gpu-training, gpu-training-large, gpu-training-memory, gpu-training-waits, gpu-training-gate, gpu-training-kernels, gpu-minhash, gpu-compare, gpu-climb, gpu-cells, gpu-modules, gpu-traces  on a machine with a GPU, under the Python that is active there

BASE_PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
ACTIVE := python3
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is written when a module is first imported. pip would compile all it installs, which is
# half of its time; and without any, each process that a test starts would compile what it imports.
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

# A PYTHON given by the user is used as it is; otherwise everything runs in .venv.
ifeq ($(origin PYTHON),undefined)
  PYTHON := $(VENV)/bin/python
  NEEDS := $(READY)
endif
RUN := PYTHONPATH=$(CURDIR) $(PYTHON)
# Only plugins that the tests use, by their modules: pytest would rewrite the assertions in all of a
# package that brings one, and schemathesis and langsmith have hundreds of modules.
PYTEST := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(RUN) -m pytest -p hypothesispytest \
  -p schemathesis.pytest.plugin
SOAK := PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PYTHON) -m soak
WORKERS ?= 2
PARALLEL := -p xdist -n $(WORKERS) --dist loadfile --durations 20 --ignore tests/cpu/test_compile.py tests/cpu

.PHONY: help env demo test test-all checked smoke lint compiled built browser soak cpu-peers corpus-speed corpus-memory gpu-test gpu-bench gpu-training gpu-training-large gpu-training-memory gpu-training-waits gpu-training-gate gpu-training-kernels gpu-minhash gpu-compare gpu-climb gpu-cells gpu-modules gpu-traces package learn learn-record docs clean

help:
	@sed -n 's/^#   //p' Makefile

env: $(READY)

$(READY): pyproject.toml constraints.txt constraints-triton.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Ridgeline needs Python 3.11 or newer; name one with BASE_PYTHON=..."; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt torch
	$(VENV)/bin/python -c 'import triton' 2>/dev/null \
	  || $(PIP_INSTALL) -c constraints-triton.txt triton
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(NEEDS)
	$(RUN) -m ridgeline hardware
	$(RUN) -m ridgeline generate demo "Why is the sky blue? Answer in two sentences." --max-tokens 96
	$(RUN) -m ridgeline optimize demo --out demo-optimized --budget 3m --resume

# Types are checked by one process, and kernels compiled by others beside it: neither minds company,
# as tests that wait for processes do.
test: TIER := -m "not slow"
test: checked
	$(PYTEST) $(TIER) $(PARALLEL)

test-all: export RIDGELINE_TEST_CLOCK := 1
test-all: browser checked
	$(PYTEST) $(PARALLEL)
	$(SOAK) demo --seconds 600 --clients 64

checked: $(NEEDS)
	$(MAKE) --no-print-directory -j2 lint compiled built TIER='$(TIER)'

compiled: $(NEEDS)
	$(PYTEST) $(TIER) tests/cpu/test_compile.py

# The CPU kernels of this machine, on the core that lint leaves free: or the first tests wait for them.
built: $(NEEDS)
	$(RUN) -c 'from ridgeline.kernels.host_library import prepare; prepare()'

# The page's tests need a browser, and say so where there is none. Installing one needs root: it is
# done here only where that is given already, as in a container on Debian or Ubuntu.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq -o Acquire::http::Timeout=10 >/dev/null \
	    && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0; \
	fi; \
	echo "no Chromium here: tests of the server's page are skipped; install chromium to run them"

smoke: lint
	$(PYTEST) -m smoke tests/cpu

lint: $(NEEDS)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Built and installed as a user would: no checkout on the path, no extras.
package:
	rm -rf dist .package
	$(BASE_PYTHON) -m venv .package/build
	.package/build/bin/python -m pip install --quiet build twine
	.package/build/bin/python -m build --outdir dist
	.package/build/bin/python -m twine check --strict dist/*
	$(BASE_PYTHON) -m venv .package/user
	.package/user/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd .package && user/bin/python -I $(CURDIR)/tests/installed.py

learn: $(NEEDS)
	$(RUN) -m ridgeline.learn.pages docs

# Needs torch, Triton and the standard library alone: on a GPU as it is, on two quiet cores too.
learn-record:
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline.learn.record --save results --ours

# Into build/site. Pages open as files; search needs them served: python3 -m http.server -d build/site
# (its plugin for files would load a script from elsewhere). Its packages are an extra of their own.
DOCS_READY := $(VENV)/.docs-ready
ifeq ($(origin PYTHON),command line)
  DOCS_NEEDS :=
else
  DOCS_NEEDS := $(DOCS_READY)
endif

$(DOCS_READY): $(READY)
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(NEEDS) $(DOCS_NEEDS)
	$(RUN) docs/site/stage.py build/site-source
	cd build && PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(abspath $(PYTHON)) -m mkdocs build --strict --quiet -f mkdocs.yml
	$(RUN) docs/site/links.py build/site

soak: $(NEEDS)
	$(SOAK) demo --seconds 600 --clients 64

gpu-test:
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m pytest tests/gpu

gpu-bench:
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline hardware --refresh --save results
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline bench kernels --save results
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline bench sequences --save results
	for workload in batch-1 prefill "throughput --no-prefix-cache"; do \
	  PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline bench engine --shape llama-3.1-8b \
	    --workload $$workload --rounds 3 --save results || exit 1; \
	done

# What training calls: checked against the references, then timed beside torch's and, where it can be
# imported, Liger's (a pure Python wheel in a folder): `make gpu-training-kernels PEERS=../liger`.
# Some of them: OPS="adamw rotary"
PEERS ?=
OPS ?=
gpu-training-kernels:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(PEERS) $(ACTIVE) -m training_kernels $(OPS) --save results

# A training step of the 1B shape: checked against the plain loop, timed, divided, beside Liger's.
gpu-training:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(PEERS) $(ACTIVE) -m training_speed

# All weights and adapters of an 8B shape, and the 1B shape under a layout of one rank.
gpu-training-large:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m training_speed_large

# What steps of four shapes hold beside what was planned, with each recomputation.
gpu-training-memory:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m training_memory --save results

# How long the device is idle between the steps of a run over text, and what saving costs: TEXT=folder
TOKENIZER ?= demo
gpu-training-waits:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m training_waits --data $(TEXT) \
	  --tokenizer $(TOKENIZER) --flags "--save-every 40 --keep 1"

# 2,000 steps of a 31 M shape from nothing in each precision, three seeds, all at once: TEXT=folder
TEXT ?= text
gpu-training-gate:
	for seed in 0 1 2; do for precision in fp32 bf16 fp8; do \
	  PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m training_gate run $$precision $$seed --data $(TEXT) & \
	  done; done; wait
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m training_gate table

# Signatures and near duplicates: checked against a CPU, then timed, from host memory too.
cpu-peers:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PYTHON) -m cpu_peers --save results

# Corpora on real text: `python -m corpus_speed prepare FOLDER text` first; PEERS is a Python that has
# datatrove and tokenizers.
corpus-speed:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PYTHON) -m corpus_speed $(TEXT) \
	  $(if $(PEERS),--peers $(PEERS)) --save results

# What ten times the memory given takes, about half an hour
corpus-memory:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(PYTHON) -m corpus_speed memory $(TEXT) 10

gpu-minhash:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m minhash_speed --save results

# Two checkouts on one GPU, in turns: `make gpu-compare BEFORE=../ridgeline-before`
gpu-compare:
	for round in 1 2; do for tree in $(BEFORE) $(CURDIR); do \
	  for what in "--workload batch-1 --rounds 3" "--workload prefill --rounds 2" \
	      "--workload throughput --no-prefix-cache --rounds 1" \
	      "--workload batch-1 --scheme int4-g128 --head int8 --rounds 3"; do \
	    echo "== $$tree: $$what"; \
	    (cd $$tree && PYTHONPATH=$$tree $(ACTIVE) -m ridgeline bench engine --shape llama-3.1-8b $$what) \
	      || exit 1; \
	  done; done; done

# One or more of the names in tests/climb_cells.py: make gpu-cells CELLS="llama-8b-batch-1"
CELLS ?= llama-8b-batch-1 llama-8b-throughput
gpu-cells:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m climb_cells $(CELLS) $(if $(TRACE),--trace $(TRACE)) --save results

gpu-climb:
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline kernels build
	for phase in "--batch 1 --context 1024" "--batch 64 --context 1024 --prefill 4x2048"; do \
	  PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline profile --shape llama-3.1-8b $$phase --save results \
	    || exit 1; \
	done
	for goal in latency throughput; do \
	  PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline optimize --shape llama-3.1-8b --for $$goal \
	    --quality off --budget 8m --out climb-$$goal --resume || exit 1; \
	done
	PYTHONPATH=$(CURDIR) $(ACTIVE) -m ridgeline report accuracy

# Traffic over time on two shapes, for what `ridgeline plan --for serve` simulates: TRACE=trace.csv
gpu-traces:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m serving_traces $(if $(TRACE),--trace $(TRACE)) --save results

# Vision models under ridgeline.optimize beside torch.compile(mode="max-autotune"), in one run
gpu-modules:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(ACTIVE) -m vision_bench --save results

clean:
	rm -rf $(VENV) .package .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
