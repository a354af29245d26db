"""Execute notebooks in place, top to bottom in a fresh kernel, and write carelite/ from them.

Usage: python .ci/notebooks.py [--export] [NOTEBOOK ...]     (default: all; --export: only write the modules)

What differs between runs is kept out of the files. Cell ids follow the position, execution counts run 1..n, timing and
widget state are dropped. A notebook is replaced only when it ran without an error. Badges and bootstrap cells take the
repository's address from pyproject.toml.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import ExecutePreprocessor
from nbdev.export import nb_export
from nbdev.maker import ModuleMaker

ROOT = Path(__file__).parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def repository() -> str:
    """The repository's address in pyproject.toml, for example https://github.com/OWNER/carelite."""
    return re.search(r'^Repository = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def point_at(source: str, url: str) -> str:
    """`source` with the addresses of badges and of the bootstrap cell set to `url`."""
    source = re.sub(r"(git\+)https?://[^\s\"']+", rf"\g<1>{url}", source)
    path = url.removeprefix("https://")
    return re.sub(r"(colab\.research\.google\.com/)github/[^/]+/[^/]+", rf"\g<1>{path.replace('.com', '', 1)}", source)


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Fixed metadata, ids by position, counts 1..n; of a cell's metadata only what a reader or test uses."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:03d}"
        cell.source = point_at(cell.source.rstrip(), repository())
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter", "collapsed")}
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            output.pop("transient", None)
    return notebook


def run(path: Path) -> None:
    """Execute and normalise the notebook at `path`."""
    notebook = nbformat.read(path, as_version=4)
    executor = ExecutePreprocessor(timeout=600, kernel_name="python3", record_timing=False)
    executor.preprocess(notebook, {"metadata": {"path": str(path.parent)}})
    partial = path.with_suffix(".partial")
    nbformat.write(normalise(notebook), partial)
    partial.replace(path)


def export(path: Path) -> None:
    """Write the modules of the notebook at `path`, each anew.

    nbdev-export would append to every module but the first of a notebook, and 05 writes two.
    """
    nb_export(path, ROOT / "carelite", mod_maker=lambda **kwargs: ModuleMaker(**kwargs | {"is_new": True}))


if __name__ == "__main__":
    only_export = "--export" in sys.argv
    named = [Path(argument).resolve() for argument in sys.argv[1:] if argument != "--export"]
    for path in named or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        print(path, flush=True)
        if not only_export:
            run(path)
        export(path)
