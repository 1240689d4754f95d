"""A choice that the user could have made: a field, its value, and the reason in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from steadytrain.components.shared.config import RunConfig


@dataclass(frozen=True)
class Decision:
    """A choice for one field of the configuration.

    value: None if it is still open.
    yours: whether the user set it.
    """

    field: str
    value: Any
    reason: str
    yours: bool = False

    @property
    def text(self) -> str:
        """The value as people write it."""
        value = self.value
        if value is None:
            return "(open)"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return ",".join(map(str, value))
        return power(value) if isinstance(value, float) else str(value)


def set_by_user(config: RunConfig, field: str) -> Decision:
    """Return the user's own value unchanged, without evaluating it."""
    value = reduce(getattr, field.split("."), config)
    return Decision(field, value, "set by you", yours=True)


def differs(config: RunConfig, field: str) -> bool:
    """Return whether a field differs from its default.

    A run receives its configuration with all defaults filled in. If a value equals the default,
    nobody can tell whether the user set it.
    """
    section, _, name = field.rpartition(".")
    holder: Any = reduce(getattr, section.split("."), config)
    return bool(getattr(holder, name) != type(holder).model_fields[name].default)


def power(value: float) -> str:
    """Return a number as people write it, with an exponent below 0.01: 2e-4."""
    if not 0 < value < 0.01:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
