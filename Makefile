# `make demo` and `make test` are the two commands; both install what they need into .venv first.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
# Processes that share the tests.
WORKERS ?= 2
# Cases whose every call has its shapes checked: some, or all.
SHAPES ?= some

python := $(VENV)/bin/python
stamp := $(VENV)/.installed
peers_stamp := $(PEERS)/.installed
LOWEST ?= .venv-lowest
NETWORKS ?= .venv-networks
networks_stamp := $(NETWORKS)/.installed
# Packages whose networks are tried. timm is not among them: it needs torchvision.
networks := transformers vit-pytorch x-transformers einops monai pytorchcv diffusers torch_geometric peft torch==2.13.0
# Peers of the benchmarks, and of experiment c25. They live in a venv of their own, so that nothing of theirs can leak
# into the checks; with SOAP: make peers, then .venv-peers/bin/python experiments/rerun.py c25
peers := laplace-torch==0.3 curvlinops-for-pytorch backpack-for-pytorch asdfghjkl pytorch-optimizer torch==2.13.0
# Files that begin with an underscore are shared by the benchmarks and are none themselves; uci.py has no peer, needs the
# data sets and the extras for tables, and runs in our own venv.
benchmarks = $(sort $(filter-out benchmarks/_% benchmarks/uci.py,$(wildcard benchmarks/*.py)))

export MPLBACKEND ?= Agg

.DEFAULT_GOAL := help
.PHONY: help install demo test lowest package slow mutants lint style types imports peers networks bench experiments clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(stamp) ## create .venv and install lapwing with the pinned versions

# setuptools goes first, and the build uses it: a pin does not reach into an isolated build environment.
$(stamp): pyproject.toml constraints.txt
	test -x $(python) || $(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(python) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

# The picture of the README: make demo PICTURE=docs/images/demo.png
PICTURE ?= build/demo/demo.png

demo: $(stamp) ## two data sets from table to report in a minute; writes build/demo
	$(VENV)/bin/lapwing demo --out build/demo --picture $(PICTURE)

test: $(stamp) ## tests and doctests, warnings are errors; without those marked slow
	$(python) -m pytest -n $(WORKERS) -m "not slow" --shapes=$(SHAPES) --durations=40 --durations-min=2

lowest: ## tests with the lowest versions that pyproject.toml claims, in a venv of their own
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check "setuptools>=77"
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt --no-build-isolation -e ".[test]"
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) -m "not slow"

package: $(stamp) ## build sdist and wheel, install each into an empty venv and import it
	VENV=$(VENV) .ci/package

slow: $(stamp) networks ## tests that take long: a million rows, real data, peers beside us, other packages' networks
	$(python) -m pytest -n $(WORKERS) -m slow --shapes=$(SHAPES)

mutants: $(stamp) ## break the library in fifty ways, one at a time, and see the tests notice; takes long
	PYTHONPATH=tests $(python) -m mutation.run --jobs $(WORKERS)

lint: style types imports ## style, types and the direction of imports

style: $(stamp)
	$(python) -m ruff check .
	$(python) -m ruff format --check .

types: $(stamp)
	$(VENV)/bin/basedpyright --pythonpath $(python)

imports: $(stamp)
	$(python) -m pytest -q tests/test_imports.py

peers: $(peers_stamp) ## create .venv-peers with the libraries that benchmarks compare with

# torchvision comes along as a dependency, linked against another torch, and then breaks whatever imports it.
$(peers_stamp): pyproject.toml
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $(peers) -e ".[plots]"
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

networks: $(networks_stamp) ## other packages' networks against brute force, in .venv-networks; counts per structure
	HF_HUB_OFFLINE=1 $(NETWORKS)/bin/python -m pytest -n $(WORKERS) --tb=short tests/networks

# torchvision comes along here too.
$(networks_stamp): pyproject.toml
	test -x $(NETWORKS)/bin/python || $(PYTHON) -m venv $(NETWORKS)
	$(NETWORKS)/bin/python -m pip install --quiet --disable-pip-version-check $(networks) -e ".[test]"
	$(NETWORKS)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

bench: $(peers_stamp) ## run every benchmark from a clone of the last commit, peers measured in the same run
	$(PEERS)/bin/python experiments/rerun.py $(benchmarks)

experiments: $(stamp) ## run experiments again from a clone of the last commit; all, or NAMES="c12 c14"
	$(python) experiments/rerun.py $(NAMES)

clean: ## remove caches and build products; venvs and results stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks experiments docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
