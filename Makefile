# Needs Python 3.11 or newer and make; everything else is put into .venv, from the package index.
#
#   make PYTHON=python3.12 test        another interpreter than the first that is new enough
#   make TORCH=torch==2.12.0 test      another torch; TORCH_OPTIONS takes options of pip, an index say
#   make bench BENCHMARKS=benchmarks/selection.py BENCH_OPTIONS=--json
#
# What is installed once is not installed again: touch pyproject.toml to have it looked at.

VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_OPTIONS ?=
PYTEST_OPTIONS ?=
# A test file stays in one process; each wants a processor and up to 2 GB.
PYTEST_WORKERS ?= -n auto --maxprocesses 4 --dist loadfile
DEMO_OPTIONS ?=
# minipile.py needs a data set and hours: run it by hand.
BENCHMARKS ?= $(filter-out benchmarks/minipile.py,$(sort $(wildcard benchmarks/*.py)))
BENCH_OPTIONS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINS := $(VENV)/constraints.txt
# Whatever is missing must show as missing, not as a wait for the network.
OFFLINE := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Tests compute with tiny matrices: a second thread costs more than it does.
TESTING := $(OFFLINE) OMP_NUM_THREADS=1

GPU_TESTS = $(shell grep -rlE 'mark\.gpu\b' tests --include='test_*.py')
GPU_BENCHMARKS = $(shell grep -lse '--device' $(BENCHMARKS))
# `make gpu PYTHON=python3` uses that interpreter as it is; without PYTHON it is .venv's.
GPU_PYTHON := $(or $(PYTHON),$(BIN)/python)
GPU_READY := $(if $(PYTHON),,$(VENV)/.dev-ready)

.PHONY: help demo demo-curriculum demo-vision test check bench gpu wheel clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile

demo: $(VENV)/.demo-ready ## index this machine's Python source, adapt the bundled model, compare
	$(OFFLINE) $(BIN)/ttt-adapt demo $(DEMO_OPTIONS)

demo-curriculum: $(VENV)/.dev-ready ## a small model picks what to practise, practises by RL, gets better; ~4 min
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/ttt-adapt curriculum demo $(DEMO_OPTIONS)

demo-vision: $(VENV)/.dev-ready ## train small MTTT and Vision-TTT models on digits and photographs, look inside; ~20 min
	$(OFFLINE) $(BIN)/ttt-adapt vision demo $(DEMO_OPTIONS)

test: $(VENV)/.dev-ready ## run every test that needs no GPU
	$(TESTING) $(BIN)/pytest -m 'not gpu' $(PYTEST_WORKERS) $(PYTEST_OPTIONS)

check: $(VENV)/.dev-ready ## lint, format, types, the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TESTING) $(BIN)/pytest -q tests/test_house.py tests/test_house_imports.py tests/test_exports.py

bench: $(VENV)/.bench-ready ## run the benchmarks, the quick form where there is one
	@set -e; for file in $(filter-out benchmarks/gpu.py,$(BENCHMARKS)); do \
	  options='$(BENCH_OPTIONS)'; \
	  if [ -z "$$options" ] && grep -qe '"--quick"' $$file; then options=--quick; fi; \
	  echo "== $$file $$options"; $(OFFLINE) $(BIN)/python $$file $$options; \
	done

gpu: $(GPU_READY) ## run the tests and benchmarks that need a CUDA device
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: expected a CUDA device, torch found none")'
	$(if $(GPU_TESTS),,$(error no test is marked gpu))
	$(OFFLINE) $(GPU_PYTHON) -m pytest -m gpu $(PYTEST_OPTIONS) $(GPU_TESTS)
	@set -e; for file in $(GPU_BENCHMARKS); do \
	  echo "== $$file --device cuda $(BENCH_OPTIONS)"; \
	  $(OFFLINE) PYTHONPATH=. $(GPU_PYTHON) $$file --device cuda $(BENCH_OPTIONS); \
	done

# The wheel is made from the sdist, so that what the sdist lacks is missed here and not by a user. It
# is tried in an environment of its own, away from this folder, over the packages of .venv; those
# come last and without their .pth files, so that the editable installation stays out of sight.
wheel: $(VENV)/.dev-ready ## build sdist and wheel, install the wheel elsewhere, try it there
	rm -rf build dist
	$(BIN)/python -m build --outdir dist
	@set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; \
	root=$$PWD; \
	$(BIN)/python -m venv "$$place/venv"; \
	"$$place/venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps --no-index dist/*.whl; \
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$purelib" > "$$("$$place/venv/bin/python" -c "$$purelib")/packages.pth"; \
	cd "$$place"; \
	$(OFFLINE) "$$place/venv/bin/python" -I "$$root/.ci/smoke.py" "$$root"

clean: ## remove what building and testing left; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# An environment with torch alone, first: what follows then finds torch there and never replaces it.
$(VENV)/.torch-ready: constraints.txt
	@python=; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: expected Python 3.11 or newer, found $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1);" \
	    "install one and name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; \
	fi; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "make: $$python cannot make virtual environments: its modules venv and ensurepip are missing;" \
	    "on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi; \
	if ! $(PIP) --version >/dev/null 2>&1; then \
	  echo "making $(VENV) with $$($$python --version)"; $$python -m venv --clear $(VENV); \
	fi
	@grep -v '^torch==' constraints.txt > $(PINS)
	@echo "installing $(TORCH) into $(VENV), if it is not there"
	@$(PIP) install -q -c $(PINS) '$(TORCH)' $(TORCH_OPTIONS)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> $(PINS)
	@touch $@

$(VENV)/.demo-ready: $(VENV)/.torch-ready pyproject.toml
	@echo "installing ttt-adapt with embeddings and reports into $(VENV): a minute or two, once"
	@$(PIP) install -q -c $(PINS) -e '.[offline,report]'
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.torch-ready pyproject.toml
	@echo "installing ttt-adapt and its development tools into $(VENV): a few minutes, once"
	@$(PIP) install -q -c $(PINS) -e '.[dev]'
	@touch $(VENV)/.demo-ready $@

$(VENV)/.bench-ready: $(VENV)/.dev-ready
	@echo "installing what the benchmarks compare with into $(VENV)"
	@$(PIP) install -q -c $(PINS) -e '.[dev,bench]'
	@touch $@
