# Every target sets up .venv by itself; a second call installs nothing.
PYTHON ?= python3
RUN := .venv/bin/python
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(RUN) -m pytest -n 2 --dist worksteal
SOURCES = core/src cli/src $(wildcard plugins/*/*/src)

.PHONY: env train test test-all soak check bench docs wheels clean

env:
	@$(PYTHON) tools/setup_env.py

train: env
	.venv/bin/kernel train --plugins alibi,blurpool $(ARGS)

test: env
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: env
	$(PYTEST) -m "not soak and not gpu" $(ARGS)

soak: env
	for seed in 1 2 3 4 5; do KERNEL_TEST_SEED=$$seed $(PYTEST) -m "not gpu" -q || exit 1; done

check: env
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy $(SOURCES)
	$(RUN) tools/docs.py --check

docs: env
	$(RUN) tools/docs.py

# the comparisons have an environment of their own, .venv-bench
bench:
	@$(PYTHON) bench/setup_peers.py
	.venv-bench/bin/python bench/step_overhead.py
	.venv-bench/bin/python bench/gpt2_step.py
	.venv-bench/bin/python bench/startup.py
	.venv-bench/bin/python bench/checkpoint.py

wheels: env
	$(RUN) tools/wheels.py dist

clean:
	rm -rf .venv .venv-bench dist runs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
