# `make demo` and `make test` need Python 3.11 or newer and nothing else: each installs the tested versions of what it
# needs into .venv. PIP_ARGS takes the place of that choice:
#
#   make test PIP_ARGS="--constraint constraints.txt --index-url URL"    the tested versions, from another index
#   make test PYTEST_ARGS="tests/schemas -x"   pytest's
#   make test TEST_PROCESSES=4                 tests side by side in so many processes; 0: in pytest's own
#   make demo DEMO_ARGS="--broker kafka"       the demo's
#   make sbom EXTRAS=npu,trigger,lag           the extras of the listed environment
#   make image IMAGE=registry/relaygr:0.1.0 IMAGE_ARGS=--push PLATFORMS=linux/amd64,linux/arm64

VENV ?= .venv
PIP_ARGS ?= --constraint constraints.txt
PYTEST_ARGS ?=
TEST_PROCESSES ?= auto
DEMO_ARGS ?=
EXTRAS ?= worker,trigger,lag,gateway
PLATFORMS ?= linux/amd64,linux/arm64
IMAGE ?= relaygr
IMAGE_ARGS ?= --output type=oci,dest=build/relaygr-image.tar
IS_NEW_ENOUGH := -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$candidate $(IS_NEW_ENOUGH) && echo $$candidate && break; \
	done)
REQUIRE_PYTHON = @$(PYTHON) $(IS_NEW_ENOUGH) || { \
	echo "Python 3.11 or newer, with its venv module, is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n $(TEST_PROCESSES)

.PHONY: help demo test test-main test-fast test-thorough test-newest test-containers lint format docs site dist sbom image clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.installed-demo ## run the relay here, relay on and relay off, and compare
	$(BIN)/relaygr demo $(DEMO_ARGS)

test: lint ## lint, types and all tests but those of test-containers
	$(PYTEST) -m "not container" $(PYTEST_ARGS)

test-main: $(VENV)/.installed-test ## all tests but outages, soaks, browsers and containers
	$(PYTEST) -m "not outage and not soak and not browser and not container" $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-test ## the tests that are not slow
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-thorough: $(VENV)/.installed-test build/triton-oldest ## many more random sequences and inputs, and kernels, before a release
	RELAYGR_TEST_SOAK_OPERATIONS=1000000 RELAYGR_TEST_CACHE_SEQUENCES=1000 RELAYGR_TEST_FUZZ_EXAMPLES=5000 RELAYGR_TEST_KERNEL_EXAMPLES=1000 \
		$(BIN)/pytest -n 2 tests/schemas/test_fuzz.py tests/workers/test_cache_soak.py tests/workers/test_cache_stateful.py \
		tests/workers/test_triton_programs.py $(PYTEST_ARGS)
	RELAYGR_TEST_ALL_KERNELS=1 $(BIN)/pytest -n 2 --dist load tests/workers/test_triton_compiled.py $(PYTEST_ARGS)
	PYTHONPATH=build/triton-oldest RELAYGR_TEST_ALL_KERNELS=1 $(BIN)/pytest -n 2 --dist load tests/workers/test_triton_compiled.py $(PYTEST_ARGS)

build/triton-oldest: $(VENV)/.installed-test
	$(BIN)/pip install --no-deps --target $@ "triton==3.4.*"

test-newest: ## lint, types and all tests with the newest libraries that the ranges allow, in build/newest
	$(MAKE) test VENV=build/newest PIP_ARGS="--upgrade --upgrade-strategy eager"

test-containers: $(VENV)/.installed-test ## the image and the local stack under Docker (compose/), with what was measured
	$(BIN)/pytest -n 0 -rP -m container $(PYTEST_ARGS)

lint: $(VENV)/.installed-test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test ## let ruff write what it asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-test ## generate messages.md, settings.md, metrics.md, conversion.md, asyncapi.json, test vectors, the chart's files
	$(BIN)/python -m relaygr.schemas.reference > docs/messages.md
	$(BIN)/python -m relaygr.settings_reference > docs/settings.md
	$(BIN)/python -m relaygr.metrics_reference > docs/metrics.md
	$(BIN)/python -m relaygr.conversion_reference > docs/conversion.md
	$(BIN)/python -m relaygr.schemas.asyncapi > docs/asyncapi.json
	$(BIN)/python -m tests.schemas.wire_vectors
	$(BIN)/python -m relaygr.chart_catalogue > compose/helm/relaygr/files/catalogue.yaml

site: $(VENV)/.installed-test ## build the documentation's site into build/site
	$(BIN)/mkdocs build

dist: $(VENV)/.installed-test ## build and check the source archive and the wheel in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

sbom: dist ## list what the wheel installs, in dist/relaygr.cdx.json (CycloneDX)
	$(REQUIRE_PYTHON)
	rm -rf build/sbom
	$(PYTHON) -m venv build/sbom/installed
	build/sbom/installed/bin/python -m pip install $(PIP_ARGS) --constraint constraints.txt "$$(ls dist/*.whl)[$(EXTRAS)]"
	$(PYTHON) -m venv build/sbom/tool
	build/sbom/tool/bin/python -m pip install $(PIP_ARGS) "cyclonedx-bom>=7,<8"
	build/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/relaygr.cdx.json build/sbom/installed

# A library without a wheel for a platform is compiled: the image with the compiler builds, the slim one runs.
image: ## build the image for all PLATFORMS into build/ (docker buildx; other processors need QEMU in binfmt_misc)
	mkdir -p build
	docker buildx build --file compose/Dockerfile --platform $(PLATFORMS) --tag $(IMAGE) \
		--build-arg BUILD_IMAGE=python:3.11-bookworm --build-arg PIP_ARGS="$(PIP_ARGS)" $(IMAGE_ARGS) .

clean: ## remove the virtual environment and what the tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One call of pip for all extras, so that it resolves once.
$(VENV)/.installed-test: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[all,dev]'
	$(BIN)/python -m pip install $(PIP_ARGS) --upgrade --target $(VENV)/transformers 'transformers>=5,<5.40' 'click<8.4'
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-demo: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[all]'
	@touch $@

$(VENV)/.made:
	$(REQUIRE_PYTHON)
	$(PYTHON) -m venv $(VENV)
	@touch $@
