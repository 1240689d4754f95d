"""With this folder on PYTHONPATH, the steps of a pipeline do almost nothing.

Everything around them is real: the command, the processes, the stages, the events.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_STEPS = "steadytrain.pipelines.steps"
_EMPTY = (
    "torch",
    "transformers",
    "steadytrain.components.tasks.causal_lm",
    "steadytrain.components.tasks.fused_head",
    "steadytrain.components.train.loop",
)
"""Packages and modules that steps only import early. They are empty here, with all inside them."""


class _Quick(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name == _STEPS:
            return importlib.util.spec_from_file_location(
                name, Path(__file__).with_name("quick.py")
            )
        if any(name == empty or name.startswith(f"{empty}.") for empty in _EMPTY):
            return ModuleSpec(name, loader=None, is_package=True)
        return None


sys.meta_path.insert(0, _Quick())
