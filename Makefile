# make demo    set up, generate a project, train it on two ranks
#              (TASK=segmentation for the other kind, FLAGS="..." for flags of its main.py)
# make test    set up, run all tests
# make check   set up, lint and the quick tests
# make pages   regenerate pages that quote code; check and test do this first and fail if any was stale
# make soak    set up, randomised long-running tests, for MINUTES=30
#              (SEED=... as one before; CASE=damage/12 that case alone; tests/soak/__main__.py)
# make docs    build the documentation to site/, in an environment of its own
#
# They install the versions in constraints.txt, which passed. CONSTRAINTS= takes the newest there
# are, CONSTRAINTS=constraints-oldest.txt the oldest of what training needs.

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
CONSTRAINTS ?= constraints.txt
TASK ?= classification
FLAGS ?=
export MINUTES ?= 30
# Of pytest: many tests wait, for time-outs and signals, while others compute.
WORKERS ?= 3
QUICK = channels checkpoints environment errors files flags folders masks reading samples

# No caches in the template folder: cookiecutter would copy them into projects.
export RUFF_NO_CACHE = true
export PYTHONDONTWRITEBYTECODE = 1

python = "$(VENV)/bin/python"
template = {{cookiecutter.project_slug}}
project = demo/$(TASK)

.PHONY: demo test check pages soak docs ready

test: pages
	$(python) -m pytest --numprocesses $(WORKERS) --dist loadgroup --maxschedchunk 1

check: pages
	$(python) -m pytest --numprocesses 2 tests/template/test_docs.py tests/template/test_limits.py \
		tests/template/test_template.py $(QUICK:%=tests/library/test_%.py)

pages: ready
	$(python) tests/quoting.py

soak: ready
	test -n "$(CASE)" || $(python) -m pytest --numprocesses $(WORKERS) --dist loadgroup -m soak
	$(python) tests/soak

demo: ready
	find "$(template)" -name '.*_cache' -prune -exec rm -rf {} +
	$(python) -m cookiecutter . --no-input --overwrite-if-exists --output-dir demo \
		project_name="Demo" project_slug=$(TASK) task=$(TASK)
	PYTHON="$$(cd "$(VENV)/bin" && pwd)/python" $(project)/launch.sh --resume never $(FLAGS)
	@echo
	@echo "The project:     $(project)"
	@echo "The checkpoint:  $(project)/runs/default/best.pt"
	@echo "The images:      $(project)/runs/default/examples.png and curves.png"
	@echo "Next:            cd $(project), edit main.py, dataset.py or model.py, and"
	@echo "                 PYTHON=../../$(VENV)/bin/python ./launch.sh --resume never"

docs: $(DOCS_VENV)/ready
	"$(DOCS_VENV)/bin/zensical" build --clean --strict

$(DOCS_VENV)/ready: requirements-docs.txt
	$(PYTHON) -m venv "$(DOCS_VENV)"
	"$(DOCS_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade \
		-r requirements-docs.txt
	touch "$@"

ready: $(VENV)/ready-$(or $(CONSTRAINTS),newest)

$(VENV)/ready-%: requirements.txt $(CONSTRAINTS) $(wildcard $(template)/tasks/*/requirements.txt)
	$(PYTHON) -m venv "$(VENV)"
	rm -f "$(VENV)"/ready*
	$(python) -m pip install --quiet --disable-pip-version-check --upgrade \
		--upgrade-strategy eager -r requirements.txt $(CONSTRAINTS:%=--constraint %)
	touch "$@"
