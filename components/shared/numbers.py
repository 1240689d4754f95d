"""What counts as a number in a configuration."""

from __future__ import annotations

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number. In Python, true and false are integers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)
