"""What the tests that need a cluster, a GPU or an idle machine import is there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SKIPPED = sorted(
    path for folder in ("bench", "cluster") for path in (TESTS / folder).glob("**/*.py")
)


@pytest.mark.parametrize("path", SKIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_imports_of_tests_that_are_skipped_here(path):
    """They would fail only where they run, which is seldom."""
    missing = [
        f"{node.module}.{name.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and str(node.module).split(".")[0] in {"support", "steadytrain"}
        for name in node.names
        if not exists(node.module, name.name)
    ]
    assert missing == []


def exists(module, name):
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True
