"""What is learned besides the targets of the data, such as from a teacher.

An objective that is off is not part of a run's identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Section, at_odds, complete_address


class ObjectiveConfig(Section):
    """An objective that one of its fields turns on."""

    @property
    def on(self) -> bool:
        """Whether it is used."""
        raise NotImplementedError

    def _check_off(self, name: str, switch: str) -> None:
        """Reject fields that nothing would read."""
        for field in sorted(self.model_fields_set - {switch}):
            value = getattr(self, field)
            if not self.on and value != type(self).model_fields[field].default:
                raise at_odds(
                    f"training.{name}.{field}",
                    value,
                    f"without training.{name}.{switch}, nothing reads it",
                    f"set training.{name}.{switch}, or leave it out",
                )


class DistillationConfig(ObjectiveConfig):
    """Learning from a teacher's probabilities (Hinton et al. 2015, "Distilling the Knowledge")."""

    teacher: str | None = Field(
        None,
        min_length=1,
        description="Model to learn from: an address as for model.base. It has the same tokens or "
        "labels, and each rank has it complete. None turns distillation off.",
    )
    temperature: float = Field(
        2.0,
        gt=0,
        description="Divides the logits of teacher and student before they are compared.",
    )
    weight: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the teacher in the loss. The rest is the loss on the data's targets.",
    )
    divergence: Literal["forward", "reverse"] = Field(
        "forward",
        description="forward: the student covers all that the teacher finds likely; reverse: it "
        "prefers what the teacher finds most likely.",
    )

    @property
    def on(self) -> bool:
        return self.teacher is not None

    @field_validator("teacher")
    @classmethod
    def _names_something(cls, address: str | None) -> str | None:
        return None if address is None else complete_address(address)

    @model_validator(mode="after")
    def _is_read(self) -> DistillationConfig:
        self._check_off("distillation", "teacher")
        return self


OBJECTIVES: Final[Mapping[str, type[ObjectiveConfig]]] = {"distillation": DistillationConfig}
"""By field of `training`."""


def objectives_off(training: Mapping[str, Any]) -> Iterator[str]:
    """Yield the objectives of a dumped TrainingConfig that are not used."""
    for name, kind in OBJECTIVES.items():
        if name in training and not kind.model_validate(training[name]).on:
            yield name
