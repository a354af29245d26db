# Every target sets up what it needs in .venv by itself. PYTHON=python3.12 make … chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# One test process per core, each with one thread: small models gain little from more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

.PHONY: demo test test-all lab export notebooks figures

demo: .venv/demo.ready                ## train CARE-S0 on real digits, evaluate, export to Core ML, verify
	$(BIN)/carelite demo

test: .venv/dev.ready                 ## every test and every notebook
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PYTEST) -m "not unchecked and not slow" --jaxtyping-packages=carelite,beartype.beartype
	$(PYTEST) -m "unchecked and not slow"
	$(PYTEST) --nbval notebooks/

test-all: test                        ## and what takes longer: every model at full size
	$(PYTEST) -m slow

lab: .venv/dev.ready                  ## open the notebooks
	$(BIN)/jupyter lab notebooks

export: .venv/dev.ready               ## write carelite/ from the notebooks
	$(BIN)/nbdev-export

notebooks: .venv/dev.ready            ## execute all notebooks in place and write carelite/ from them
	$(BIN)/python notebooks/build.py

figures: .venv/dev.ready              ## execute all notebooks and save their pictures to figures/
	CARELITE_FIGURES=$(CURDIR)/figures $(BIN)/python notebooks/build.py

.venv/demo.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[train,export]"
	touch $@

.venv/dev.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[notebooks,train,dense,export,dev]"
	touch $@
