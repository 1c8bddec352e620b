# A fresh machine needs Debian's python3, python3-venv and make; everything else goes into .venv.
PYTHON ?= python3
JOBS ?= 2
IMAGE_PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
PIP := $(BIN)/python -m pip --disable-pip-version-check
# PyPI's torch comes with gigabytes of CUDA: where there is no GPU, PyTorch's own index has a build without. `make setup
# TORCH_INDEX=` takes PyPI's.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# For tiny models a second thread saves little, and on a busy machine threads that wait for one another spin for minutes.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
export HF_HUB_DISABLE_TELEMETRY := 1
unexport PYTHONDONTWRITEBYTECODE  # without bytecode every process of the tests compiles all files again

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all test-gpu-image lint bench parity site curated constraints

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with the pinned packages; again when pyproject.toml or constraints.txt changed

# torch goes first and by its exact version, so that nothing else picks a build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else \
		f"kvbench needs Python 3.11 to 3.13, {sys.executable} is {sys.version.split()[0]}. Say: make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "no venv: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt pip setuptools
	$(PIP) install -q -c constraints.txt --no-deps --retries 2 $(TORCH_INDEX:%=--extra-index-url %) "$$(grep '^torch==' constraints.txt)"
	PYTHONWARNINGS=ignore $(PIP) install -q -c constraints.txt --no-build-isolation -e ".[data,lm-eval,report,server,query]" --group dev
	@touch $@

demo: $(STAMP) ## Run SnapKV on the needle task with the bundled model, under 90 s
	$(ONE_THREAD) $(BIN)/kvbench run --method snapkv --task niah

test: $(STAMP) ## Run the fast tests, in about four minutes: every method, task, kernel operation and command once
	$(ONE_THREAD) $(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(STAMP) ## Run the tests that `make test` leaves out, or with MINUTES=8 as many as fit
	$(ONE_THREAD) $(BIN)/pytest -n $(JOBS) -m slow $(MINUTES:%=--minutes %)

test-all: $(STAMP) ## Run every test
	$(ONE_THREAD) $(BIN)/pytest -n $(JOBS)

# PyPI's torch comes with CUDA's libraries, as in the image: 5 GB. No GPU is needed.
test-gpu-image: IMAGE := $(VENV)-gpu-image
test-gpu-image: ## With the versions of the GPU image (5 GB): compile all kernels for sm_90, run the GPU suite on the CPU
	@$(IMAGE_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { \
		echo "The GPU image has Python 3.12, and '$(IMAGE_PYTHON)' is not. Say: make IMAGE_PYTHON=PATH test-gpu-image"; exit 1; }
	test -x $(IMAGE)/bin/python || $(IMAGE_PYTHON) -m venv $(IMAGE)
	$(IMAGE)/bin/python -m pip --disable-pip-version-check install -q -r scripts/gpu_image.txt
	$(ONE_THREAD) PYTHONPATH=$(CURDIR) $(IMAGE)/bin/python -m pytest -q -o minversion=8 -o addopts=--import-mode=importlib \
		-o filterwarnings=default tests/kernels/test_compile.py tests/bench/test_captured_region.py
	out=$$(mktemp -d) && PATH=$$PWD/$(IMAGE)/bin:$$PATH scripts/gpu_suite.sh --dry --out $$out \
		probe methods core tests all answers lengths largest long models diffusion invariants && rm -r $$out

lint: $(STAMP) ## ruff, and mypy strict over kvbench with its methods, tasks and kernels
	$(BIN)/ruff check
	$(BIN)/mypy

bench: $(STAMP) ## Measure what the harness costs, and a decode step of each method
	$(BIN)/python scripts/bench.py
	! grep -q '"status": "done"' results/bench/cpu-2-cores-steps.json || rm results/bench/cpu-2-cores-steps.json
	$(ONE_THREAD) $(BIN)/kvbench bench --method all --method snapkv+adakv --method snapkv+kivi --model random:two-layers \
		--length 16384 --chunk 2048 --timing step --budget 25% --out results/bench/cpu-2-cores-steps.json

# kvpress needs an older transformers, so it gets an environment of its own in the user's cache.
parity: $(STAMP) ## Compare kept entries and logits with kvpress's, and write docs/parity.md
	$(ONE_THREAD) $(BIN)/python scripts/parity/run.py $(TORCH_INDEX)

site: $(STAMP) ## Build the leaderboard from results/ into site/
	$(BIN)/kvbench leaderboard build results -o site

curated: ## Write results/CURATED: the hashes of the curated runs' verifications, after any of them changed
	cd results && for x in */*/verification.json; do test -e "$${x%/*}/manifest.json" || echo "$$x"; done \
		| LC_ALL=C sort | xargs sha256sum > CURATED

# What it holds is what a new environment gets today, torch and transformers apart, which are chosen here.
constraints: ## Write constraints.txt anew
	rm -rf $(VENV)-new
	$(PYTHON) -m venv $(VENV)-new
	$(VENV)-new/bin/python -m pip install -q -U pip "setuptools<82"
	$(VENV)-new/bin/python -m pip install -q torch==2.13.0
	$(VENV)-new/bin/python -m pip install -q torch==2.13.0 transformers==5.23.0 --no-build-isolation -e ".[accelerate,data,lm-eval,query,ray,report,server]" --group dev
	{ sed '/^[^#]/d' constraints.txt; $(VENV)-new/bin/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(VENV)-new
