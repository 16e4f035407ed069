# Every job a person does, one target each. `make` alone lists them.
#   DATASET=ucf101   which dataset (default: sample)
#   JOBS=4           processes (default: all cores)
#   DATA= MANIFESTS= the two roots (default: data, manifests)
#   ARGS="..."       anything else, passed on to the script

DATASET ?= sample
DATA ?= data
MANIFESTS ?= manifests
PYTHON ?= python3
PY := .venv/bin/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS_ARG = $(if $(JOBS),--jobs $(JOBS))
WHERE = --dataset "$(DATASET)" --data "$(DATA)" --manifests "$(MANIFESTS)"

.DEFAULT_GOAL := help
.PHONY: help setup demo sample frames manifest verify pack train profile tune doctor bench report preview test lint check format

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: .venv/.done ## the virtual environment .venv with everything, once

# The file says that it is whole: a set-up that was interrupted is done again.
.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable ".[cluster,dev,plots,spectral,tensorboard]"
	touch $@

demo: .venv/.done ## sample videos -> frames -> manifest -> pack -> a short training -> a summary, from nothing
	$(PY) -m scripts.demo --data "$(DATA)" --manifests "$(MANIFESTS)" $(JOBS_ARG) $(ARGS)

sample: .venv/.done ## draw the small dataset whose classes need motion to tell apart
	$(PY) -m scripts.make_sample --data "$(DATA)" $(JOBS_ARG) $(ARGS)

frames: .venv/.done ## decode what is new or changed; then the manifest
	$(PY) -m scripts.extract_frames $(WHERE) $(JOBS_ARG) $(ARGS)

manifest: .venv/.done ## the manifest from frames and split lists alone
	$(PY) -m scripts.build_manifest $(WHERE) $(ARGS)

verify: .venv/.done ## check every folder of frames; REPAIR=1 makes anew what fails
	$(PY) -m scripts.verify_frames $(WHERE) $(JOBS_ARG) $(if $(REPAIR),--repair) $(ARGS)

pack: .venv/.done ## the byte store: all JPEGs in one file that every worker maps
	$(PY) -m scripts.pack_frames $(WHERE) $(ARGS)

train: .venv/.done ## train and evaluate a clip classifier; resumes
	$(PY) -m scripts.train $(WHERE) $(if $(MODEL),--model $(MODEL)) $(ARGS)

profile: .venv/.done ## where the time of training goes, and a verdict
	$(PY) -m scripts.profile_loader $(WHERE) $(if $(MODEL),--model $(MODEL)) $(ARGS)

tune: .venv/.done ## one factor at a time, a row for each trial, the winner saved for make train
	$(PY) -m scripts.tune_loader $(WHERE) $(if $(MODEL),--model $(MODEL)) $(ARGS)

report: .venv/.done ## a page to look at: classes, lengths, failures, sample clips
	$(PY) -m scripts.report $(WHERE) $(ARGS)

preview: .venv/.done ## a picture of what training sees: PNG and GIF
	$(PY) -m scripts.preview $(WHERE) $(ARGS)

doctor: .venv/.done ## what this machine has, and what will hurt
	$(PY) -m scripts.doctor $(WHERE) $(ARGS)

bench: .venv/.done ## this loader and this extractor beside the others, in one run; ARGS=offline or online
	$(PY) -m scripts.bench $(ARGS)

test: .venv/.done ## the tests
	$(PY) -m pytest $(ARGS)

lint: .venv/.done ## format, lint, types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

check: lint test ## format, lint, types and tests: the same for a person and for CI

format: .venv/.done ## write the format, mend what lint can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
