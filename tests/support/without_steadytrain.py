"""The beginning of a program that uses a model where there is no steadytrain."""

from __future__ import annotations

from typing import Final

PROGRAM: Final = """
import json, sys

class WithoutSteadytrain:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "steadytrain":
            raise ImportError(name)

sys.meta_path.insert(0, WithoutSteadytrain())
"""
"""It imports `json` and `sys`. What follows cannot import steadytrain."""
