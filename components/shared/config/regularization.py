"""Regularization: dropout passes, hard examples, rare classes, mixtures and changes of texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.config.base import ObjectiveConfig, at_odds


class RDropConfig(ObjectiveConfig):
    """Making two forward passes with different dropout agree (Liang et al. 2021, R-Drop)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the symmetric divergence of the two passes: the paper's alpha. The "
        "paper uses 1 to 5. 0 turns it off.",
    )

    @property
    def on(self) -> bool:
        return self.weight > 0


class FocalLossConfig(ObjectiveConfig):
    """Counting targets less that the model already predicts well (Lin et al. 2017)."""

    gamma: float = Field(
        0.0,
        ge=0,
        description="The loss of each target is multiplied by (1 - probability) to this power. The "
        "paper uses 2. 0 turns it off.",
    )

    @property
    def on(self) -> bool:
        return self.gamma > 0


class ClassWeightsConfig(ObjectiveConfig):
    """Counting the examples of some classes more than those of others."""

    kind: Literal["none", "balanced", "given"] = Field(
        "none",
        description="none; balanced: in inverse proportion to the number of training examples of "
        "the class, 1 on average, as in scikit-learn; or given: the weights in `given`.",
    )
    given: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Weight of each label. Only for given."
    )

    @property
    def on(self) -> bool:
        return self.kind != "none"

    @model_validator(mode="after")
    def _is_read(self) -> ClassWeightsConfig:
        if (self.kind == "given") != bool(self.given):
            raise at_odds(
                "training.class_weights.given",
                self.given,
                f"training.class_weights.kind is {self.kind}",
                "give the weight of each label together with kind given, or leave both out",
            )
        return self


class MixupConfig(ObjectiveConfig):
    """Mixing the token embeddings and labels of two texts (Guo et al. 2019, wordMixup)."""

    alpha: float = Field(
        0.0,
        ge=0,
        description="The share of each text in its mixture is drawn from Beta(alpha, alpha): 1 "
        "draws all shares equally often, a smaller value keeps most mixtures close to one text. 0 "
        "turns it off.",
    )

    @property
    def on(self) -> bool:
        return self.alpha > 0

    def check_partners(self, global_batch_size: int) -> None:
        """Reject global batches without a second text."""
        if self.on and global_batch_size < 2:
            raise at_odds(
                "training.mixup.alpha",
                self.alpha,
                "it mixes the texts of a global batch, and training.global_batch_size is "
                f"{global_batch_size}",
                "raise training.global_batch_size to at least 2, or leave it out",
            )


class AugmentationConfig(ObjectiveConfig):
    """Random changes of training texts (Wei and Zou 2019, EDA). Validation texts never change."""

    deletion: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Random deletion: share of the words that are left out. EDA uses 0.05 to 0.1. "
        "0 turns it off.",
    )
    swap: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Random swap: exchanges of two random words, as a share of the words. EDA uses "
        "0.05 to 0.1. 0 turns it off.",
    )
    character_noise: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the characters that get a typing error: left out, replaced, or "
        "swapped with the next one (Belinkov and Bisk 2018). 0 turns it off.",
    )
    probability: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Probability that a text is changed when it is drawn, by one of the operations "
        "above that are on, at random. 0.8 corresponds to EDA's four changed copies of each text.",
    )

    @property
    def operations(self) -> dict[str, float]:
        """The operations that are on, each with its share."""
        shares = self.model_dump(exclude={"probability"})
        return {name: share for name, share in shares.items() if share > 0}

    @property
    def on(self) -> bool:
        return bool(self.operations)

    @model_validator(mode="after")
    def _is_read(self) -> AugmentationConfig:
        if not self.on and self.probability != type(self).model_fields["probability"].default:
            raise at_odds(
                "training.augmentation.probability",
                self.probability,
                "no operation is on, so nothing reads it",
                "set deletion, swap or character_noise, or leave it out",
            )
        return self
