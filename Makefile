# make study      from nothing to results/digits/index.html; STUDY=name for another study
# make report     Snakemake's own report of a finished study, results/digits/report.html
# make publish    its tables and figures to results/published/, for git
# make test       the test suite           make lint       style of code and workflow
# make bench      time of our attacks beside other libraries', results/bench/attacks.md
# make format     mend the style           make schemas    schemas of the study files from the code
STUDY ?= digits
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CORES ?= all
VENV := .venv
BIN := $(VENV)/bin
# Snakemake starts job scripts with the python it finds first.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: study report publish test bench lint format schemas clean-venv

study: $(VENV)/study.stamp
	snakemake --cores $(CORES) --quiet host reason --config study=$(STUDY)
	@echo "Look at results/$(STUDY)/index.html"

report: $(VENV)/study.stamp
	snakemake --cores $(CORES) --config study=$(STUDY) --report results/$(STUDY)/report.html

# Tables and figures of a finished study to results/published/, which git tracks; no weights, no outcomes.
publish: $(VENV)/study.stamp
	snakemake --cores $(CORES) --quiet host reason --config study=$(STUDY)
	rm -rf results/published/$(STUDY)
	mkdir -p results/published/$(STUDY)/figures results/published/$(STUDY)/tables
	cp results/$(STUDY)/figures/*.png results/published/$(STUDY)/figures
	cp results/$(STUDY)/tables/* results/published/$(STUDY)/tables
	cp results/$(STUDY)/study.json results/published/$(STUDY)

test: $(VENV)/test.stamp
	pytest -n 2 --dist loadfile tests

# Times depend on what else runs, so the race is run again each time; its models are trained once, with all cores.
bench: $(VENV)/test.stamp
	snakemake --cores $(CORES) --quiet host reason --config study=bench --set-threads train=$(shell nproc) \
	  --forcerun bench_attacks
	@cat results/bench/attacks.md

lint: $(VENV)/test.stamp
	ruff check .
	ruff format --check .
	snakefmt --check workflow
	snakemake --lint

format: $(VENV)/test.stamp
	ruff check --fix .
	ruff format .
	snakefmt workflow

# The JSON schema of study files, for editors, from the signatures of the methods.
schemas: $(VENV)/study.stamp
	python -m classwise.schema workflow/schemas

# Exact versions come from requirements.lock; what to install, from pyproject.toml.
$(VENV)/study.stamp: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/study.stamp
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[test]'
	touch $@

clean-venv:
	rm -rf $(VENV)
