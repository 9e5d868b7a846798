# Every target sets up .venv by itself; set-up runs again only when pyproject.toml or constraints.txt changes.
#
#   make train                     SmolLM2-135M learns to query databases, in about five minutes on two CPU cores
#   make train MODEL=tiny          the whole path in under two minutes, on a toy model that plays a guessing game
#   make train PRESET=search       another preset; ARGS="train.steps=50 train.seed=1" changes settings
#   make test                      all tests             make test ARGS="-k store -x"
#   make test-again                what failed in make test, once more and alone
#   make check                     format, lint, types, import contracts
#   make quick                     the checks and the unit tests without model work, in two to three minutes
#   make bench                     speed figures, as JSON
#   make campaign                  a long test: NAME=newcomer, service_load, view_size ...: the files of tests/campaigns
#   make docs                      the documentation as a site, in build/site; dead links fail
#   make sandbox                   install bubblewrap, which worlds that run code or SQL need (as root)
#   make browser                   install Chromium, in which the tests look at `turnwise view` (as root)
#   make setup TORCH=torch         with a CUDA build of torch; without TORCH the pinned version is installed

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
MODEL ?= smollm2
NAME ?= service_load
PRESET ?= $(if $(filter tiny,$(MODEL)),guess_number_tiny,text_to_sql)
QUICK := $(if $(filter guess_number_tiny,$(PRESET)),warmup.steps=250 train.steps=60 eval.every=20)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Images of containers switch bytecode off; here hundreds of processes would compile what they import, each for itself.
export PYTHONDONTWRITEBYTECODE :=
CONSTRAINED := -c $(VENV)/constraints.txt -e '.[dev]'

.PHONY: help setup sandbox browser train test check quick quick-worlds quick-engine quick-others format docs bench campaign clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 15

setup: $(STAMP)

# torch comes first and alone: asked for together with the rest, pip may pick a newer build with gigabytes of CUDA.
# Its pin is then left out of the constraints, so that a build chosen with TORCH=... stays. The rest is installed by uv
# in a tenth of pip's time; pip does it where uv cannot, for example where only pip knows the package index.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "turnwise needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo 'setting up $(VENV) (about 1.3 GB; minutes on a slow line) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet "$$(grep '^uv==' constraints.txt)"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(CONSTRAINED) || $(BIN)/python -m pip install --quiet $(CONSTRAINED)
	@touch $@

# Models of the store are fetched first; any other MODEL is a directory, a .gguf file or a name on the hub.
train: $(STAMP) $(if $(filter code swe text_to_sql workspace,$(PRESET)),sandbox)
	@case '$(MODEL)' in smollm2|tiny) $(BIN)/turnwise model fetch $(MODEL);; esac
	$(BIN)/turnwise train $(PRESET) model=$(MODEL) $(QUICK) $(ARGS)

# Bubblewrap walls off what a policy writes: code, SQL, commands. Root on a Debian gets it here; anyone else is told how.
sandbox:
	@command -v bwrap > /dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			echo 'installing bubblewrap ...'; apt-get update -qq && apt-get install -y -qq bubblewrap > /dev/null; \
		fi; command -v bwrap > /dev/null || echo 'bubblewrap is missing; worlds that run code or SQL will not start' \
			'and tests of the sandbox will fail: apt-get install bubblewrap' >&2; }

# Chromium, for the tests of the viewer. They are skipped where it is missing.
browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			echo 'installing chromium ...'; apt-get update -qq && apt-get install -y -qq chromium > /dev/null; \
		fi; command -v chromium > /dev/null || echo 'chromium is missing; tests of the viewer will be skipped:' \
			'apt-get install chromium' >&2; }

# Without ARGS the tests run in pieces, JOBS at a time: the next piece starts when one is done, so no core waits for the
# other. Four on two cores, because many tests wait: for deadlines, sandboxes, other processes. Each piece prints its
# result when it is done.
# Their order changes from day to day, because no test may rely on another; ORDER=N repeats one.
JOBS ?= 4
ORDER ?= $(shell date +%j)
FOLDERS := $(filter-out contract e2e unit,$(notdir $(patsubst %/,%,$(sort $(dir $(wildcard tests/*/test_*.py))))))
PIECES := $(addprefix test-,runs services $(FOLDERS) clusters documents units worlds)
test: $(STAMP) sandbox browser
	@rm -rf $(addprefix .pytest_cache/,$(PIECES) $(addsuffix .failed,$(PIECES))); mkdir -p .pytest_cache
	$(if $(ARGS),$(BIN)/python -m pytest -q $(ARGS),@$(MAKE) --no-print-directory -k -O -j$(JOBS) $(PIECES))

.PHONY: $(PIECES) test-again
TESTS := $(BIN)/python -m pytest -q
PIECE = $(TESTS) --random-order $(ORDER) --durations 12 -o cache_dir=.pytest_cache/$@
FAILED = || { touch .pytest_cache/$@.failed; exit 1; }
SERVICES := $(wildcard $(addprefix tests/contract/test_,*_sdk.py *_client.py service_*.py cookbook.py adapters_packages.py))
CLUSTERS := $(wildcard $(addprefix tests/e2e/test_,cluster_*.py env_workers.py *learners.py ray.py samplers.py sglang.py torchrun.py full_weights.py))
WORLDS := tests/unit/envs
PLAY := $(addprefix tests/unit/,judges rollout single_turn)
ENGINE := $(addprefix tests/unit/,engine training)
test-services: $(STAMP)
	$(PIECE) $(SERVICES) $(FAILED)

test-documents: $(STAMP)
	$(PIECE) $(addprefix --ignore ,$(SERVICES)) tests/contract $(FAILED)

test-clusters: $(STAMP)
	$(PIECE) $(CLUSTERS) $(FAILED)

test-runs: $(STAMP)
	$(PIECE) $(addprefix --ignore ,$(CLUSTERS)) tests/e2e $(FAILED)

test-worlds: $(STAMP)
	$(PIECE) $(WORLDS) $(PLAY) $(FAILED)

test-units: $(STAMP)
	$(PIECE) $(addprefix --ignore ,$(WORLDS) $(PLAY)) tests/unit $(FAILED)

$(addprefix test-,$(FOLDERS)): test-%: $(STAMP)
	$(PIECE) tests/$* $(FAILED)

# Runs the tests that failed in the last `make test` once more, with nothing beside them. All of them must pass. A piece
# that failed and does not say in which test, because it died, fails here too.
test-again: $(STAMP)
	@for piece in $(PIECES); do \
		test -e .pytest_cache/$$piece.failed || continue; \
		echo "once more and alone, of $$piece:"; cat .pytest_cache/$$piece/v/cache/lastfailed; echo; \
		$(TESTS) -o cache_dir=.pytest_cache/$$piece --last-failed --last-failed-no-failures none || exit 1; \
	done; echo 'what failed beside other tests passed alone'

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

# More at once than cores, because many tests wait: for deadlines, sandboxes, other processes.
QUICK_TESTS := OMP_NUM_THREADS=1 $(TESTS) -m 'not gpu and not slow and not model'
quick: $(STAMP) sandbox
	@$(MAKE) --no-print-directory -j4 check quick-worlds quick-others quick-engine

quick-worlds: $(STAMP)
	$(QUICK_TESTS) $(WORLDS)

quick-engine: $(STAMP)
	$(QUICK_TESTS) $(PLAY) $(ENGINE)

quick-others: $(STAMP)
	$(QUICK_TESTS) $(addprefix --ignore ,$(WORLDS) $(PLAY) $(ENGINE)) tests/unit

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The generator has an environment of its own. Its menu and its reference pages are made by docs/site.
MKDOCS := .venvs/mkdocs-material-9.8.1
$(MKDOCS)/bin/mkdocs:
	$(PYTHON) -m venv $(MKDOCS)
	$(MKDOCS)/bin/python -m pip install --quiet mkdocs-material==9.8.1

docs: $(STAMP) $(MKDOCS)/bin/mkdocs
	$(BIN)/python docs/site/pages.py
	NO_MKDOCS_2_WARNING=1 $(MKDOCS)/bin/mkdocs build --strict --quiet
	@echo 'look at it: $(PYTHON) -m http.server --directory build/site'

campaign: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m campaigns.$(NAME) $(ARGS)

bench: $(STAMP)
	$(BIN)/turnwise bench sample --json $(ARGS)
	$(BIN)/turnwise bench train --json $(ARGS)
	$(BIN)/turnwise bench tree --json $(ARGS)
	$(BIN)/turnwise bench rollout --json $(ARGS)
	$(BIN)/turnwise bench sandbox --json $(ARGS)

clean:
	rm -rf $(VENV) .venvs build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
