"""Compression of the gradients that ranks exchange."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.config.base import Section, at_odds


class CompressionConfig(Section):
    """Smaller gradients between ranks, for slow networks. It changes what is learned a little."""

    kind: Literal["none", "bf16", "powersgd"] = Field(
        "none",
        description="none; bf16: exchange gradients in bfloat16; powersgd: as products of two thin "
        "matrices, with error feedback. Only for compute.strategy ddp.",
    )
    rank: int = Field(
        4, ge=1, description="Rank of the products. A higher one is more exact. Only for powersgd."
    )
    start: int = Field(
        1000,
        ge=2,
        description="Optimizer steps that exchange complete gradients first. Only for powersgd.",
    )

    @property
    def on(self) -> bool:
        """Whether gradients are compressed."""
        return self.kind != "none"

    @model_validator(mode="after")
    def _is_read(self) -> CompressionConfig:
        for name in ("rank", "start"):
            value = getattr(self, name)
            if self.kind != "powersgd" and value != type(self).model_fields[name].default:
                raise at_odds(
                    f"training.gradient_compression.{name}",
                    value,
                    f"with kind {self.kind}, nothing reads it",
                    "set training.gradient_compression.kind to powersgd, or leave it out",
                )
        return self
