"""The shape of the code base, read from its sources: who may import whom, and how long things may be.

Each check was seen to fail: on an import of `export` in `memory`, of `lightning` in `calibration`, of a `torch._`
module outside `graph/compat.py`, on an import inside a function, on two files that import each other, and on a long
function.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_compress"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))
ORDER = (
    "statistics", "algorithms", "recipe", "graph", "memory", "distributed", "calibration",
    "export", "foresight", "report", "data", "plugin", "command",
)  # fmt: skip
"""A folder imports from folders before it; `errors` is for all, `__init__` shows what is public, `__main__` runs it."""
PRIVATE_IMPORTS = {"torch": "graph/compat.py", "transformers": "graph/compat.py", "lightning": "plugin/compat.py"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Import = ast.Import | ast.ImportFrom


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(node: Import) -> list[str]:
    """Dotted names of what an import statement may load: modules, and what is taken from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "relative imports hide the folder they come from"
    return [f"{node.module}.{alias.name}" for alias in node.names]


def imports(path: Path) -> Iterator[tuple[Import, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported(node):
                yield node, name


def folder(path: Path) -> str:
    """The place of a file in `ORDER`."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def own_module(name: str) -> Path | None:
    """The file of this package that a dotted name lives in."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[1:length])
        if place.with_suffix(".py").is_file() and length > 1:
            return place.with_suffix(".py")
        if (place / "__init__.py").is_file():
            return place / "__init__.py"
    raise AssertionError(f"{name} is no module of ours")


def test_every_folder_has_its_place() -> None:
    folders = {folder(path) for path in FILES} - {"__init__", "__main__", "errors"}
    assert folders <= set(ORDER), "a new folder needs a place in CONTRIBUTING.md's list and in ORDER"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_down(path: Path) -> None:
    if folder(path) in ("__init__", "__main__"):
        return
    for node, name in imports(path):
        other = own_module(name)
        if other is None or other == ROOT / "errors.py":
            continue
        assert folder(path) != "errors", "errors.py imports nothing of ours"
        where = f"{relative(path)}:{node.lineno} imports {name}"
        assert folder(other) in ORDER, where
        assert ORDER.index(folder(other)) <= ORDER.index(folder(path)), where


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_foreign_imports_stay_where_they_belong(path: Path) -> None:
    for node, name in imports(path):
        top, *rest = name.split(".")
        where = f"{relative(path)}:{node.lineno} imports {name}"
        assert top != "pytorch_lightning", where
        if top in ("lightning", "lightning_fabric"):
            assert folder(path) in ("plugin", "command"), where
        if top in PRIVATE_IMPORTS and any(part.startswith("_") and not part.startswith("__") for part in rest):
            assert relative(path) == PRIVATE_IMPORTS[top], where


THROUGH = {
    "numpy": "torchmetrics", "sympy": "torch", "yaml": "omegaconf", "pydantic": "compressed-tensors",
    "huggingface_hub": "transformers", "tqdm": "transformers", "lightning_utilities": "lightning", "PIL": "pillow",
    "hydra": "hydra-core",
}  # fmt: skip
OPTIONAL = {"matplotlib", "soundfile", "triton"}
"""Packages that others bring or that have another name; and those that are asked for where they are needed."""


def test_what_is_imported_is_declared() -> None:
    """Else a plain installation fails on import. Seen to fail: without pillow, which only the extras brought."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split("[<>=]", each)[0].replace("-", "_") for each in project["dependencies"]}
    found = {name.partition(".")[0] for path in FILES for _, name in imports(path)}
    foreign = found - set(sys.stdlib_module_names) - OPTIONAL - {PACKAGE}
    assert {THROUGH.get(name, name).replace("-", "_") for name in foreign} <= declared


def test_no_import_cycles() -> None:
    graph = {
        path: {other for _, name in imports(path) if (other := own_module(name)) not in (None, path)} for path in FILES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_own_imports_inside_functions(path: Path) -> None:
    for function in (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                own = [name for name in imported(node) if name.partition(".")[0] == PACKAGE]
                assert not own, f"{relative(path)}:{node.lineno} imports {own[0]} inside {function.name}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_text_files_have_an_encoding(path: Path) -> None:
    """Else it is the locale's. Seen to fail: on the report of a run in a folder whose name a locale cannot write."""
    for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if name in ("read_text", "write_text"):
            where = f"{relative(path)}:{call.lineno} calls {name} without an encoding"
            assert "encoding" in (keyword.arg for keyword in call.keywords), where


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_lengths(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {length} lines"
