"""A choice that the user could have made: a field, its value, and one sentence why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from steadytrain.components.shared.config import RunConfig


@dataclass(frozen=True)
class Decision:
    """A field of the configuration.

    value: None where it stays open.
    yours: whether the user has set it.
    """

    field: str
    value: Any
    reason: str
    yours: bool = False

    @property
    def text(self) -> str:
        """The value, as people write it."""
        value = self.value
        if value is None:
            return "(open)"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return ",".join(map(str, value))
        return power(value) if isinstance(value, float) else str(value)


def set_by_user(config: RunConfig, field: str) -> Decision:
    """The user's own value, which is repeated, not judged."""
    value = reduce(getattr, field.split("."), config)
    return Decision(field, value, "set by you", yours=True)


def differs(config: RunConfig, field: str) -> bool:
    """Whether a field is not as by default.

    A run gets its configuration with all defaults written out: of a value that is the default
    nobody can say any more who meant it.
    """
    section, _, name = field.rpartition(".")
    holder: Any = reduce(getattr, section.split("."), config)
    return bool(getattr(holder, name) != type(holder).model_fields[name].default)


def power(value: float) -> str:
    """As people write it: 2e-4 below a hundredth."""
    if not 0 < value < 0.01:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
