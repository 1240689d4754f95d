"""Smaller gradients between ranks: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import at_odds, check_unread
from steadytrain.components.techniques.settings import PYTORCH_ONLY, Recipe, Rule, TechniqueConfig

_FIELD: Final = "training.gradient_compression"


class CompressionConfig(TechniqueConfig):
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

    @property
    def weight_copies(self) -> int:
        # PowerSGD keeps an error of the size of the gradients.
        return int(self.kind == "powersgd")

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.on:
            yield _FIELD, f"{_FIELD}.kind", self.kind

    def check(self, recipe: Recipe) -> None:
        if self.kind == "powersgd" and self.start >= recipe.max_steps > 0:
            raise at_odds(
                "training.gradient_compression.start",
                self.start,
                f"training.max_steps is {recipe.max_steps}, so nothing would be compressed",
                "use fewer steps",
            )

    @model_validator(mode="after")
    def _is_read(self) -> CompressionConfig:
        if self.kind != "powersgd":
            fix = f"set {_FIELD}.kind to powersgd"
            check_unread(self, _FIELD, ("rank", "start"), f"with kind {self.kind}", fix)
        return self


RULES: Final = (
    Rule(_FIELD, "another framework", PYTORCH_ONLY),
    Rule(_FIELD, "sharding", "only DDP exchanges gradients through a hook that compresses"),
    Rule(_FIELD, "one rank", "one rank exchanges no gradients"),
    Rule(_FIELD, "fp16", "an overflow would stay in the gradients that it carries over"),
)
