"""Writing the hidden spans of a text: the settings."""

from __future__ import annotations

from pydantic import Field

from steadytrain.components.techniques.settings import ObjectiveConfig


class DenoisingConfig(ObjectiveConfig):
    """Writing hidden spans of a text (Raffel et al. 2020, T5; Tay et al. 2022, UL2)."""

    noise_density: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Share of a text's tokens that are hidden. T5 uses 0.15. Only data.task "
        "denoising reads it.",
    )
    mean_noise_span_length: float = Field(
        3.0,
        ge=1,
        description="Mean number of tokens in a hidden span. T5 uses 3. Only data.task denoising "
        "reads it.",
    )

    @property
    def targets(self) -> float:
        """Share of the tokens of a sequence that are targets.

        Each span adds two sentinels to the text, and what follows the second one is a target.
        """
        spans = self.noise_density / self.mean_noise_span_length
        return (self.noise_density + spans) / (1 + 2 * spans)
