# Two commands do everything on a fresh machine with Python 3.11 or newer: `make quickstart` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test test-quick test-full lint reference picture

quickstart: .venv/.installed
	rm -rf runs/quickstart
	$(BIN)/shardwise train examples/quickstart.toml
	$(BIN)/shardwise report runs/quickstart
	@echo
	@echo 'To type shardwise as it is, activate the environment once in each shell: source $(BIN)/activate'

PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=20

test: .venv/.installed-dev
	$(MAKE) --jobs=2 lint test-quick

test-quick: export PYTHONHASHSEED = 0
test-quick: .venv/.installed-dev  ## the same examples and the same order of sets every time; `make test-full` tries others every time
	$(PYTEST) -m "not full"

test-full: lint
	$(PYTEST)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

reference: .venv/.installed
	$(BIN)/python -m shardwise.config.reference > docs/configuration.md

.venv/.created:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "shardwise needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.created pyproject.toml constraints.txt
	$(INSTALL) --editable '.[torch]'
	touch $@

.venv/.installed-dev: .venv/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

picture: .venv/.installed  ## the pictures in docs/, from the last `make quickstart` and the planner; the page needs chromium
	$(BIN)/python -c 'import io, rich.console as c; from shardwise.observe import render, summarise; \
	console = c.Console(record=True, width=90, file=io.StringIO()); render(summarise("runs/quickstart"), console); \
	console.save_svg("docs/quickstart.svg", title="shardwise report runs/quickstart")'
	$(BIN)/shardwise plan examples/llama3-70b-64xh100.toml --json | $(BIN)/python -c 'import io, json, sys, rich.console as c; from shardwise.library.plan_show import show; \
	console = c.Console(record=True, width=110, file=io.StringIO(), highlight=False); show(json.load(sys.stdin), console); \
	console.save_svg("docs/plan.svg", title="shardwise plan examples/llama3-70b-64xh100.toml")'
	$(BIN)/shardwise plan examples/llama3-70b-64xh100.toml layout.pipeline=4 --html /tmp/shardwise-plan.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=3000 --window-size=1100,2700 \
	--screenshot=docs/plan-page.png file:///tmp/shardwise-plan.html
	sed -i '/@font-face/,/}/d' docs/quickstart.svg docs/plan.svg  # a picture needs no font from the network
