# make demo   trains a small GPT on a virtual 2 × 2 mesh in this one process
# make test   runs the tests of parts, in one process, but for those of Inductor and those marked slow
# make test-equivalence   runs those of whole models on virtual ranks, but for those marked slow: a step is the model's, memory what was predicted
# make test-ranks   runs those on ranks that are processes, but for those marked slow
# make test-slow   runs the slow ones: every model on every mesh, 50 random plans each (docs/slow-suites.md has the last result)
# make test-backends   a training step of eight models by each backend, on virtual ranks and on processes, and parts by the default one
# make test-kernels   runs the Triton kernels: interpreted in one process, compiled for GPUs that need not be here in another
# make lint   formatting, lint and types
# Each sets up .venv by itself, once. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests and virtual ranks share the cores: one thread a test process is quicker than all of them in each, and Inductor's own processes.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_COMPILE_THREADS=1
# loadgroup keeps the tests of a file, and those on real ranks, in one process, where they share fixtures and one pool of ranks.
PYTEST_ARGS ?= -n 2 --dist loadgroup

.PHONY: demo test test-equivalence test-ranks test-slow test-backends test-kernels lint format clean

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/train_gpt.py --mesh dp=2,tp=2

test: $(VENV)/.installed-test
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "not slow and not ranks and not equivalence and not backends" $(PYTEST_ARGS)

test-equivalence: $(VENV)/.installed-test
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "equivalence and not slow and not backends" $(PYTEST_ARGS)

test-ranks: $(VENV)/.installed-test
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "ranks and not slow and not backends" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-test
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-backends: $(VENV)/.installed-test
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m backends $(PYTEST_ARGS)

# Triton decides at import whether it interprets: two processes. The first line fails where Triton is not installed.
test-kernels: $(VENV)/.installed-test
	$(BIN)/python -c 'import triton'
	$(TEST_ENVIRONMENT) TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreter $(PYTEST_ARGS)
	$(TEST_ENVIRONMENT) COMPILE_KERNELS=1 $(BIN)/python -m pytest tests/kernels/compiled $(PYTEST_ARGS) --dist load

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "autopar needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing autopar and what it needs into $(VENV) ..."
	$(PIP) --editable '.[examples]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing autopar and what its tests need into $(VENV) ..."
	$(PIP) --editable '.[examples,test]'
	@touch $@ $(VENV)/.installed-demo
