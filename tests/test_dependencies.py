"""Dependencies run one way: config, errors, plan <- gemm <- partition <- runtime."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import afore_kernels

PACKAGE = Path(afore_kernels.__file__).parent
# A module of a layer may import its own layer and those before it.
LAYERS = [("errors",), ("config",), ("plan",), ("gemm",), ("partition",), ("runtime",)]
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# `gemm` is usable alone: it knows the configuration, but no plans.
FORBIDDEN = {"gemm": {"plan"}}


def imported_modules(source: str) -> Iterator[str]:
    """Every `afore_kernels.X` that a module imports anywhere, as the word X."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "afore_kernels":
            names = [f"afore_kernels.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "afore_kernels" and rest:
                yield rest.split(".")[0]


def find_violations(layer: str, source: str) -> list[str]:
    return [
        name
        for name in imported_modules(source)
        if RANKS.get(name, 0) > RANKS[layer] or name in FORBIDDEN.get(layer, ())
    ]


@pytest.mark.parametrize("layer", RANKS)
def test_layer_imports_only_lower_layers(layer: str) -> None:
    path = PACKAGE / layer
    files = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    for file in files:
        assert find_violations(layer, file.read_text()) == [], file


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("gemm", "from afore_kernels.partition.pack import partition_pairs"),
        ("gemm", "import afore_kernels.plan"),
        ("partition", "def f():\n    from afore_kernels import runtime"),
        ("plan", "from afore_kernels.gemm import tiles"),
    ],
)
def test_violation_is_found(layer: str, source: str) -> None:
    assert find_violations(layer, source)
