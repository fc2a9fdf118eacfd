"""The public surface: names, imports, the error tree and docstrings."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import afore_kernels
from afore_kernels import errors

PACKAGE = Path(afore_kernels.__file__).parent
SOURCES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("name", afore_kernels.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(afore_kernels, name) is not None
    assert name in dir(afore_kernels)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        afore_kernels.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["", ".config", ".errors", ".plan", ".runtime.planner"])
def test_import_needs_no_torch(module: str) -> None:
    code = f"import sys, afore_kernels{module}; sys.exit('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert finished.returncode == 0


def drawn_tree(docstring: str) -> Iterator[tuple[str, str | None]]:
    """Name and parent of each line of a drawing, which indents by four columns."""
    ancestors: list[str] = []
    for line in docstring.split("::")[1].splitlines():
        name = line.strip(" │├└─").partition(" ")[0]
        if name:
            depth = (line.index(name) - 4) // 4
            ancestors[depth:] = [name]
            yield name, ancestors[depth - 1] if depth else None


def test_error_tree_is_its_drawing() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.AforeError)
    }
    parents = {
        name: None if value is errors.AforeError else value.__bases__[0].__name__
        for name, value in classes.items()
    }
    assert list(drawn_tree(errors.__doc__ or "")) == list(parents.items())


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public classes, functions and methods of public classes, with their dotted names."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")

    return visit(tree.body, "")


@pytest.mark.parametrize("file", SOURCES)
def test_everything_public_has_a_docstring(file: str) -> None:
    tree = SOURCES[file]
    missing = [
        name
        for name, node in public_definitions(tree)
        if not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    if tree.body and not ast.get_docstring(tree):
        missing.append("the module itself")
    assert missing == []
