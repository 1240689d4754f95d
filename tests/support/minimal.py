"""The shortest configuration, and the problems of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError, Problem

MINIMAL = {"name": "tiny", "data": {"source": ["a.txt"]}, "model": {"base": "folder"}}


def problems(content: Mapping[str, Any]) -> dict[str, Problem]:
    """Return the problems of an invalid configuration by field."""
    with pytest.raises(ConfigError) as caught:
        from_mapping(content)
    return {problem.field: problem for problem in caught.value.problems}
