# Every target sets up what it needs: .venv with one rung of the ladder of machines, installed once.
#
#   RUNG             cpu (the default), cuda or rocm: which extra is installed, and which builds of torch are accepted
#   TORCH_INDEX_URL  the wheel index that torch comes from; empty: wherever pip finds it
#   PYTHON3          the Python that .venv is made from; empty: the first python3 that is 3.11 or newer
#   PACKAGE          for make upgrade-report: NAME==VERSION
#   PYTEST_ARGS      given to pytest: make test PYTEST_ARGS="tests/parallel -k layout"

RUNG ?= cpu
TORCH_INDEX_URL ?=
PYTHON3 ?=
PYTEST_ARGS ?=
PACKAGE ?=

BIN := .venv/bin
STAMP := .venv/.ready-$(RUNG)
RUN := runs/arithmetic
CHECKED := mcore_rl tests benchmarks tools launch
DOCS := .venv/docs
ORACLES := .venv/.ready-oracles
BARE := .venv/bare-gpu-machine/.ready
GPU_KIT := build/gpu-kit
TRIED := build/resolve
MEGATRON := $(CURDIR)/.venv/megatron-core-0.19.2
OF_MEGATRON := tests/parallel/test_cpu.py tests/config/test_megatron_fields.py tests/planning/test_states.py tests/rehearsal \
	tests/accelerators/test_transformer_engine.py tests/parity/test_transformers.py \
	$(addprefix tests/training/test_,$(addsuffix .py,checkpoint fusions grouped_experts norm_joint optimizer rotation router routing run_state sandwich))
FOR_HELP := numpy pyarrow PyYAML rich

LINT = $(BIN)/ruff check --quiet $(CHECKED)
FORMAT = $(BIN)/ruff format --quiet --check $(CHECKED)
TYPES = $(BIN)/mypy
LEVELS = $(BIN)/lint-imports --no-logo
PYTEST = $(BIN)/python -m pytest -n 3 --dist=loadfile --no-loadscope-reorder
TESTS = $(PYTEST) --tier=$(@:test-%=%) $(PYTEST_ARGS)

# All of it, also where some fails.  Types are judged beside the rest, which now and then waits for something.
GATE = failed=; try() { echo "== $$1"; "$$@" || failed="$$failed $$1"; }; \
	said=$$(mktemp); nice $(TYPES) >$$said 2>&1 & typing=$$!; \
	lint() { $(LINT); }; format() { $(FORMAT); }; levels() { $(LEVELS); }; tests() { $(TESTS); }; \
	types() { wait $$typing; ended=$$?; cat $$said; rm $$said; return $$ended; }; \
	try lint; try format; try levels; try tests; try types; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed" >&2; exit 1; fi

.DEFAULT_GOAL := help
.PHONY: help train check test test-ci test-megatron test-full lint format types docs resolve upgrade-report bench gpu-kit lock \
	dist clean
export PYTHON3

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(STAMP) ## Teach a tiny mixture of experts to calculate: sft, then GRPO, on this machine
	@$(BIN)/mcore-rl prepare arithmetic --difficulty 1 --train 4000 --val 400 --out $(RUN)/data
	@$(BIN)/mcore-rl prepare tiny-model --data $(RUN)/data --out $(RUN)/model
	@$(BIN)/mcore-rl sft recipe=arithmetic_sft
	@$(BIN)/mcore-rl train recipe=arithmetic_grpo

check: $(STAMP) ## Lint, types, levels, and the tests that start neither training processes nor vLLM, Ray, Slurm
	@$(GATE)

test: $(STAMP) ## The same, and a few tests of everything that starts processes
	@$(GATE)

test-ci: $(STAMP) $(ORACLES) ## make test, and then all else that CI runs; installs Chromium and others' libraries
	@failed=; $(MAKE) test || failed=1; $(MAKE) test-megatron || failed=1; $(TESTS) --beyond=test || failed=1; test -z "$$failed"

# On Python 3.11, whose megatron-core is the older one; on newer ones all tests run with it.
test-megatron: $(STAMP) $(ORACLES) ## The tests that say how Megatron computes, with the newest megatron-core that is known
	@test ! -d $(MEGATRON) || { export PYTHONPATH=$(MEGATRON); \
	  $(PYTEST) --tier=ci $(OF_MEGATRON) && $(PYTEST) --tier=test tests/invariance && \
	  $(PYTEST) --tier=ci tests/invariance -k "w2-tp2 and (olmoe or qwen3_next or gpt_oss)"; }

test-full: $(STAMP) $(ORACLES) $(BARE) ## Lint, types, levels and every test; installs 5 GB more, on Python 3.12
	@$(GATE)

lint: $(STAMP) ## ruff's rules and format, and who imports whom
	@$(LINT)
	@$(FORMAT)
	@$(LEVELS)

format: $(STAMP) ## Rewrite every file in the house's format
	@$(BIN)/ruff check --quiet --select I --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

types: $(STAMP) ## mypy, strict
	@$(TYPES)

docs: $(DOCS)/.ready ## The pages as a site with search, in build/site; a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# An environment of its own: the site needs none of the package's dependencies, and the package none of the site's.
$(DOCS)/.ready: pyproject.toml
	@$${PYTHON3:-python3} -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(DOCS)/bin/python -m pip install -qq --group docs
	@touch $@

resolve: ## On PYTHON3: what the package needs resolves, and every --help answers without most of it
	@rm -rf $(TRIED) && $${PYTHON3:-python3} -m venv $(TRIED)
	@$(TRIED)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	@$(TRIED)/bin/python -m pip install -qq --dry-run --constraint constraints.txt \
	  $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) '.[cpu]'
	@$(TRIED)/bin/python -m pip install -qq --constraint constraints.txt $(FOR_HELP)
	@$(TRIED)/bin/python -m pip install -qq --no-deps .
	@for command in $$($(TRIED)/bin/mcore-rl --help | awk '/^  [a-z]/ { print $$1 }'); do \
	  $(TRIED)/bin/mcore-rl $$command --help >/dev/null || exit 1; done

bench: $(STAMP) ## Every benchmark, one after the other; each prints its targets
	@failed=; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || failed="$$failed $$file"; done; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed" >&2; exit 1; fi

gpu-kit: $(STAMP) ## What a whole run on a bare GPU machine needs, in build/gpu-kit (docs/gpu_facts.md)
	@$(BIN)/python -m benchmarks.gpu_run build $(GPU_KIT)

upgrade-report: $(STAMP) ## PACKAGE=NAME==VERSION: which lines that tests look at have moved; without it, what is newer
	@$(BIN)/python tools/upgrade_report.py $(PACKAGE)

# Lines with a marker are for one Python each, and stay.
lock: $(STAMP) ## Write what is installed to constraints.txt, once it has passed the tests on the CPU rung
	@marked=$$(sed -n 's/^\([^#]*==\).*;.*/\1/p' constraints.txt | sort -u); \
	{ sed -n '/^#/p' constraints.txt; \
	  { sed -n '/^[^#].*;/p' constraints.txt; \
	    $(BIN)/pip freeze --all --exclude-editable | sed '/^pip=/d; s/+cpu$$//' | grep -vF "$$marked"; \
	  } | LC_ALL=C sort -f; } > constraints.new
	@mv constraints.new constraints.txt

dist: $(STAMP) ## The source distribution and the wheel, in dist/
	@$(BIN)/python -m build --no-isolation

clean: ## Remove caches and builds; .venv and runs/ stay
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# What tests are held against, and need beside the environment.
$(ORACLES): tools/set_up_oracles.sh tests/oracles.txt tests/framework.txt tests/megatron.txt | $(STAMP)
	@tools/set_up_oracles.sh $@

# A GPU machine without its GPU, for the test that unpacks the kit there.
$(BARE): tools/set_up_bare_machine.sh tests/bare_gpu_machine.txt | $(STAMP)
	@tools/set_up_bare_machine.sh $@

$(STAMP): pyproject.toml constraints.txt
	@tools/set_up.sh $(RUNG) $@ $(TORCH_INDEX_URL)
