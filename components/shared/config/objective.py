"""What the objectives of a run share: their fields turn them on."""

from __future__ import annotations

from steadytrain.components.shared.config.base import Section, at_odds


class ObjectiveConfig(Section):
    """An objective that its fields turn on."""

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
