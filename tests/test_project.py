"""The project itself: notebooks and package agree, notebooks are executed and clean, the frame is true."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def source(path: Path) -> str:
    return "".join(cell.source + "\n" for cell in nbformat.read(path, as_version=4).cells)


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def faults(path: Path) -> list[str]:
    """What is wrong with a stored notebook, apart from what running it would show."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    notebook, found = nbformat.read(path, as_version=4), []
    cells = code_cells(path)
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not executed in order from 1 to n")
    if notebook.metadata.kernelspec.name != "python3":
        found.append(f"kernel {notebook.metadata.kernelspec.name}")
    if path.stat().st_size > 2**20:
        found.append("over 1 MB")
    for cell in cells:
        if not cell.source.strip():
            found.append("empty cell")
        for magic, name in re.findall(r"^\s*(%{1,2})(\w+)", cell.source, re.M):
            if not (shell.find_cell_magic if magic == "%%" else shell.find_line_magic)(name):
                found.append(f"unknown magic {magic}{name}")
        expected_error = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "error" and not expected_error:
                found.append(f"error output {output.ename}")
            if output.get("name") == "stderr":
                found.append(f"stderr output {output.text[:80]!r}")
    return found


@each_notebook
def test_notebook_is_clean(path):
    assert faults(path) == []


@each_notebook
def test_notebook_anatomy(path):
    cells = nbformat.read(path, as_version=4).cells
    first = cells[0].source
    assert re.match(rf"# {path.stem[:2]} · ", first)
    assert f"/blob/main/notebooks/{path.name})" in first
    at = NOTEBOOKS.index(path)
    for neighbour in NOTEBOOKS[max(at - 1, 0) : at] + NOTEBOOKS[at + 1 : at + 2]:
        assert f"({neighbour.name})" in first, f"no link to {neighbour.name}"
    text = source(path)
    assert "able to" in text and "# References" in text and "# Summary" in text
    assert not re.search(r"\.\./|/work/|/tmp/", text), "a path outside the notebook's folder"
    exercises = len(re.findall(r"^#+ Exercise \d", text, re.M))
    solutions = [c for c in cells if "solution" in c.metadata.get("tags", [])]
    assert 3 <= exercises <= 5 and len(solutions) >= exercises
    assert all(c.metadata.jupyter.source_hidden for c in solutions)
    for cell in code_cells(path):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        exports_a_model = "#| export" in cell.source and "class " in cell.source
        assert len(lines) <= 40 or exports_a_model, f"{len(lines)} lines in one cell"
        assert "NBVAL" not in cell.source
        if "#| export" in cell.source:
            body = ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith("#|")))
            definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
            assert all(isinstance(node, definitions) for node in body.body), (
                "an exported cell that does more than define"
            )


def test_package_is_what_the_notebooks_export(tmp_path):
    for part in ("notebooks", "carelite", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    by_hand = {"__init__.py", "__main__.py"}
    exported = {p.name for p in (ROOT / "carelite").glob("*.py")} - by_hand
    for name in exported - {"backbone.py"}:  # nbdev-export wants a notebook's second module to be there
        (tmp_path / "carelite" / name).unlink()
    (tmp_path / "carelite" / "backbone.py").write_text("stale = True\n")
    subprocess.run([Path(sys.executable).with_name("nbdev-export")], cwd=tmp_path, check=True, capture_output=True)
    assert {p.name for p in (tmp_path / "carelite").glob("*.py")} - by_hand == exported
    for name in sorted(exported):
        assert (tmp_path / "carelite" / name).read_text() == (ROOT / "carelite" / name).read_text(), (
            f"carelite/{name} differs from its notebook; run `make export` (or nbdev-update, to keep the module's text)"
        )


def test_no_module_is_written_twice():
    targets = [
        target
        for path in NOTEBOOKS
        for target in set(re.findall(r"^#\| (?:default_exp|export|exporti) (\w+)", source(path), re.M))
    ]
    assert len(targets) == len(set(targets))


def test_imports_point_upwards():
    order = {}
    for i, path in enumerate(NOTEBOOKS):
        for module in re.findall(r"^#\| (?:default_exp|export) (\w+)", source(path), re.M):
            order[module] = i
    for i, path in enumerate(NOTEBOOKS):
        if path.stem.startswith("00"):
            continue
        for cell in code_cells(path):
            if "#| export" in cell.source:
                for module in re.findall(r"^from carelite\.(\w+) import", cell.source, re.M):
                    assert order[module] <= i, f"{path.name} imports {module}, which a later notebook builds"


CANARIES = {
    "a failing assert": ("assert 1 == 2", [], 1),
    "another output": ("print(2)", [nbformat.v4.new_output("stream", name="stdout", text="1\n")], 1),
    "a misspelt magic": ("%matplotlb inline", [], 1),
    "a dead kernel": ("import os\nos._exit(1)", [], 1),
    "an unexecuted cell": ("print(1)", [], None),
    "an error that was stored": ("1 / 0", [nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="")], 1),
    "a kernel of another name": ("pass", [], 1),
}


def suite_fails(path: Path) -> bool:
    """Whether the checks above or nbval object to the notebook."""
    if faults(path):
        return True
    shutil.copy(ROOT / "pyproject.toml", path.parent)  # the suite's own options; only the wait for a dead kernel is cut
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        path.name,
        "-p",
        "no:cacheprovider",
        "--nbval-cell-timeout=5",
    ]
    return subprocess.run(command, cwd=path.parent, capture_output=True, timeout=120).returncode != 0


def write_notebook(path: Path, code: str, outputs: list, count: int | None, kernel: str = "python3") -> Path:
    cell = nbformat.v4.new_code_cell(code, outputs=outputs, execution_count=count)
    metadata = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata), path)
    return path


@pytest.mark.parametrize("name", CANARIES)
def test_a_bad_notebook_makes_the_suite_fail(name, tmp_path):
    kernel = "my-env" if "kernel of another" in name else "python3"
    assert suite_fails(write_notebook(tmp_path / "canary.ipynb", *CANARIES[name], kernel))


def test_a_good_notebook_does_not(tmp_path):
    output = nbformat.v4.new_output("stream", name="stdout", text="1\n")
    assert not suite_fails(write_notebook(tmp_path / "good.ipynb", "print(1)", [output], 1))


# --- the frame ---


def extras_named(requirement: str) -> set[str]:
    return set(re.search(r"\[(.+?)\]", requirement)[1].split(","))


def test_environment_takes_its_packages_from_the_extras():
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    assert any(re.fullmatch(r"python=3\.\d+", d) for d in conda) and "pip" in conda
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    (requirement,) = pip
    assert requirement.startswith("--editable .[")
    assert extras_named(requirement) <= set(PYPROJECT["project"]["optional-dependencies"])


def test_every_extra_named_anywhere_exists():
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    assert extras == {"notebooks", "train", "dense", "export", "dev", "all"}
    texts = [ROOT / "Makefile", ROOT / "README.md", *NOTEBOOKS, *(ROOT / "carelite").glob("*.py")]
    for path in texts:
        for named in re.findall(r"(?:carelite|\.)\[([a-z,]+)\]", path.read_text()):
            assert set(named.split(",")) <= extras, f"{path.name} names {named}"


def test_no_upper_bound_keeps_newer_releases_out():
    groups = [PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"].values()]
    assert not [r for group in groups for r in group if re.search(r"<|==|~=", r)]


def test_the_repository_is_named_once_and_derived_everywhere():
    spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    url = PYPROJECT["project"]["urls"]["Repository"]
    assert script.repository() == url
    bootstraps = set()
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert script.point_at(cell.source, url) == cell.source, f"{path.name}: run `make notebooks`"
        bootstraps.add(code_cells(path)[0].source)
    assert len(bootstraps) == 1, "the bootstrap cells differ"
    assert f"git+{url}" in bootstraps.pop()
    owner = "/".join(url.split("/")[-2:])
    for path in [*NOTEBOOKS, ROOT / "README.md"]:
        for named in re.findall(r"colab\.research\.google\.com/github/([^/]+/[^/]+)/blob", path.read_text()):
            assert named == owner, path.name


def test_version_stands_once():
    import carelite

    assert PYPROJECT["project"]["version"] == carelite.__version__


def test_readme_is_true():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    for path in re.findall(r"\]\(([^)#]+?)\)|src=\"([^\"]+)\"", readme):
        target = next(filter(None, path))
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for notebook in NOTEBOOKS:
        assert notebook.name in readme, notebook.name
    for alt in re.findall(r"!\[([^\]]*)\]", readme):
        assert alt, "a picture without alternative text"


def test_figures_are_made_by_notebooks():
    made = set(re.findall(r"[\w-]+\.png", "".join(map(source, NOTEBOOKS))))
    assert {p.name for p in (ROOT / "figures").glob("*")} <= made


def test_workflow_and_ci_call_the_readme_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text()


# --- the bootstrap cell ---


def environment_without_carelite(folder: Path) -> Path:
    """A virtual environment with all of this one's packages (as links) but carelite; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (target,) = folder.glob("lib/python*/site-packages")
    (here,) = {p for p in map(Path, sys.path) if p.name == "site-packages" and p.is_relative_to(sys.prefix)}
    for entry in here.iterdir():
        if "carelite" not in entry.name and "editable" not in entry.name and entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def clone(folder: Path) -> Path:
    """A git repository with the working tree's files, from which pip can install."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in filter(lambda n: not n.startswith(("notebooks/", "figures/", "tests/")), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "clone"]):
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_bootstrap_installs_carelite_and_leaves_torch_and_numpy(tmp_path):
    python = environment_without_carelite(tmp_path / "venv")
    repository = clone(tmp_path / "clone")
    url = PYPROJECT["project"]["urls"]["Repository"]
    cell = code_cells(NOTEBOOKS[0])[0].source.replace(url, f"file://localhost{repository}")
    program = (
        "import importlib.metadata as m, importlib.util as u\n"
        "assert u.find_spec('carelite') is None\n"
        "before = {p: (m.version(p), u.find_spec(p).origin) for p in ('torch', 'numpy')}\n"
        f"{cell}\n"
        "importlib.invalidate_caches()\n"
        "assert before == {p: (m.version(p), u.find_spec(p).origin) for p in ('torch', 'numpy')}\n"
        "print(u.find_spec('carelite').origin)"
    )
    # No index is asked: everything else is there, and the build uses the setuptools of this environment.
    env = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PYTHONPATH": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert str(tmp_path / "venv") in done.stdout
    assert json.dumps(str(ROOT))[1:-1] not in done.stdout


def test_bootstrap_does_nothing_where_carelite_is(project_python):
    cell = code_cells(NOTEBOOKS[0])[0].source
    project_python(f"import subprocess\nsubprocess.run = None\n{cell}")
