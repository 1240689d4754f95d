"""What the settings of all techniques share, and the rules that they bring.

Settings are checked where torch and numpy are missing, so the `__init__.py` of a technique imports
neither.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from steadytrain.components.shared.effects import Section, at_odds, check_unread

PYTORCH_ONLY: Final = "only the loop of pytorch reads it"
"""Why a technique excludes another framework."""
SMALLER_MICRO_BATCH: Final = "smaller micro-batch"
"""What the OOM fallback of that name needs."""

FLATTEST: Final = 1e6
"""The highest temperature of shares: with it, a data set of 1e12 rows is drawn 1.00003 times as
often as one of a single row."""
SMALLEST_SHARE: Final = 1e-9
"""The share below which no run draws a data set."""


def check_shares(field: str, weights: Mapping[str, float]) -> None:
    """Reject a weight of which no run would draw a row.

    Args:
        field: the weights' full name.

    Raises:
        ValueError: as `at_odds`.
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        if weight < SMALLEST_SHARE * total:
            raise at_odds(
                field,
                weights,
                f"the share of {name!r} is {weight / total:.2g}, of which no row would be drawn",
                f"give it at least {SMALLEST_SHARE:g} of the sum, or leave the part out",
            )


@dataclass(frozen=True)
class Rule:
    """A setting that does not support a feature.

    setting: a field, followed by its value unless that is true: "training.fp16",
        "training.optim lamb".
    feature: another such setting, or a key of `FEATURES` in `shared/config/compatibility.py`.
    """

    setting: str
    feature: str
    why: str


def technique_rules() -> Iterator[Rule]:
    """Yield the RULES of each technique, which is each package next to this file."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.ispkg:
            yield from getattr(import_module(f"{package}.{module.name}"), "RULES", ())


class Recipe(Protocol):
    """The fields of `training` that a technique may depend on."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def max_steps(self) -> int: ...

    @property
    def micro_batch_size(self) -> int | None: ...


class TechniqueConfig(Section):
    """A section of `training` that turns a technique on."""

    @property
    def on(self) -> bool:
        """Whether it is used. A section whose validators read it has a definition of its own."""
        return self != type(self)()

    @property
    def weight_copies(self) -> int:
        """Number of tensors that it keeps for each trained weight, of its size."""
        return 0

    def features(self) -> Iterator[tuple[str, str, str]]:
        """Yield what it asks for, in the words of rules: the name, the field and its value."""
        yield from ()

    def check(self, recipe: Recipe) -> None:
        """Raise `at_odds` if it cannot work with the rest of `training`."""

    def _check_off(self, name: str, switch: str) -> None:
        """Reject fields that nothing would read."""
        if not self.on:
            address, others = f"training.{name}", sorted(self.model_fields_set - {switch})
            field = f"{address}.{switch}"
            check_unread(self, address, others, f"without {field}", f"set {field}")


class ObjectiveConfig(TechniqueConfig):
    """A technique that changes the loss, so a task lists it in `Task.objectives`."""
