"""What is learned besides the targets of the data, such as from a teacher.

An objective that is off is not part of a run's identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from steadytrain.components.shared.config.adversarial import AdversarialConfig
from steadytrain.components.shared.config.base import (
    ObjectiveConfig,
    Section,
    at_odds,
    complete_address,
)
from steadytrain.components.shared.config.effects import IfSet
from steadytrain.components.shared.config.multi_task import MultiTaskConfig
from steadytrain.components.shared.config.regularization import (
    AugmentationConfig,
    ClassWeightsConfig,
    FocalLossConfig,
    MixupConfig,
    RDropConfig,
)


class HiddenConfig(Section):
    """Learning from a teacher's hidden states (Sanh et al. 2019; Jiao et al. 2020)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="Weight of this loss, which is added to the distillation loss. 0 turns it off.",
    )
    loss: Literal["cosine", "mse"] = Field(
        "cosine",
        description="cosine: 1 minus the cosine similarity of two states (DistilBERT); mse: their "
        "mean squared difference (TinyBERT).",
    )
    layers: Literal["last", "all"] | list[tuple[NonNegativeInt, NonNegativeInt]] = Field(
        "last",
        description="Compared layers. last: the last ones; all: each layer of the student with the "
        "teacher's at the same share of its depth; or pairs of a student's and a teacher's layer, "
        "such as [[1, 2], [3, 6]]. 0 means the embeddings.",
    )

    @property
    def on(self) -> bool:
        return self.weight > 0

    @model_validator(mode="after")
    def _is_read(self) -> HiddenConfig:
        for field in ("loss", "layers"):
            value = getattr(self, field)
            if not self.on and value != type(self).model_fields[field].default:
                raise at_odds(
                    f"training.distillation.hidden.{field}",
                    value,
                    "without training.distillation.hidden.weight, nothing reads it",
                    "set training.distillation.hidden.weight, or leave it out",
                )
        if not self.layers:
            raise at_odds(
                "training.distillation.hidden.layers",
                self.layers,
                "it names no layer",
                "name at least one, or use last or all",
            )
        return self


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
        ge=0.01,
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
    top_k: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        description="Learn from stored answers: before the first step, the teacher answers each "
        "training row once, and for each target its most likely tokens or labels are stored, as "
        "many as this. Training then runs without it. None asks the teacher at each step.",
    )
    hidden: HiddenConfig = HiddenConfig()

    @property
    def on(self) -> bool:
        return self.teacher is not None

    @property
    def stored(self) -> bool:
        """Whether the student learns from stored answers."""
        return self.on and self.top_k is not None

    @field_validator("teacher")
    @classmethod
    def _names_something(cls, address: str | None) -> str | None:
        return None if address is None else complete_address(address)

    @model_validator(mode="after")
    def _is_read(self) -> DistillationConfig:
        self._check_off("distillation", "teacher")
        return self


class ContrastiveConfig(ObjectiveConfig):
    """Pushing the token states of a document apart (Su et al. 2022, SimCTG)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the contrastive loss, which is added to the loss on the targets. "
        "The paper uses 1. 0 turns it off.",
    )
    margin: float = Field(
        0.5,
        gt=0,
        le=2,
        description="Distance (1 minus cosine similarity) above which two states of a document "
        "cost nothing.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="Width over which the loss bends at the margin (softplus instead of the "
        "hinge). 0 means the hinge of the paper.",
    )

    @property
    def on(self) -> bool:
        return self.weight > 0

    @model_validator(mode="after")
    def _is_read(self) -> ContrastiveConfig:
        self._check_off("contrastive", "weight")
        return self


class BatchContrastiveConfig(ObjectiveConfig):
    """Pulling together the texts of a micro-batch that belong together, and the others apart.

    Those of one class (Khosla et al. 2020), or of one pair (Henderson et al. 2017).
    """

    rows: int | None = Field(
        None,
        ge=2,
        description="Texts that are compared with each other: the micro-batch of every rank, in "
        "place of training.micro_batch_size. None turns the loss off.",
    )
    weight: float = Field(
        0.5,
        gt=0,
        description="Weight of this loss, which is added to the loss on the labels. "
        "text_embedding has no other loss, and no weight.",
    )
    temperature: float = Field(
        0.1,
        gt=0,
        description="Divides the cosine similarities. A lower one counts the most similar texts "
        "that do not belong together more. SimCSE uses 0.05.",
    )

    @property
    def on(self) -> bool:
        return self.rows is not None

    @model_validator(mode="after")
    def _is_read(self) -> BatchContrastiveConfig:
        self._check_off("batch_contrastive", "rows")
        return self


class DpoConfig(ObjectiveConfig):
    """Learning which of two answers is preferred (Rafailov et al. 2023, DPO)."""

    beta: float = Field(
        0.1,
        gt=0,
        description="Strength of the tie to the reference model, which is model.base: a lower one "
        "lets the model move further away from it. Only data.task preference reads it.",
    )

    @property
    def on(self) -> bool:
        return self != DpoConfig()


class KtoConfig(ObjectiveConfig):
    """Learning from answers that are good or bad (Ethayarajh et al. 2024, KTO)."""

    beta: float = Field(
        0.1,
        gt=0,
        description="Strength of the tie to the reference model, which is model.base: a lower one "
        "lets the model move further away from it. Only data.task unpaired_preference reads it.",
    )
    desirable_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the loss of good answers. With fewer good answers than bad ones, "
        "raise it until both sides weigh about the same. Only data.task unpaired_preference reads "
        "it.",
    )
    undesirable_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the loss of bad answers. Only data.task unpaired_preference reads "
        "it.",
    )

    @property
    def on(self) -> bool:
        return self != KtoConfig()

    @model_validator(mode="after")
    def _learns_something(self) -> KtoConfig:
        if not self.desirable_weight and not self.undesirable_weight:
            raise at_odds(
                "training.kto.undesirable_weight",
                0.0,
                "training.kto.desirable_weight is 0 too, so nothing is learned",
                "raise one of them",
            )
        return self


class MaskingConfig(ObjectiveConfig):
    """Predicting hidden tokens (Devlin et al. 2019, BERT)."""

    probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Probability that a token is predicted. Of those, 80 % are hidden, 10 % become "
        "another token, and 10 % stay. Only data.task masked_lm reads it.",
    )

    @property
    def on(self) -> bool:
        return self != MaskingConfig()


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
    def on(self) -> bool:
        return self != DenoisingConfig()

    @property
    def targets(self) -> float:
        """Share of the tokens of a sequence that are targets.

        Each span adds two sentinels to the text, and what follows the second one is a target.
        """
        spans = self.noise_density / self.mean_noise_span_length
        return (self.noise_density + spans) / (1 + 2 * spans)


OBJECTIVES: Final[Mapping[str, type[ObjectiveConfig]]] = {
    "distillation": DistillationConfig,
    "contrastive": ContrastiveConfig,
    "batch_contrastive": BatchContrastiveConfig,
    "r_drop": RDropConfig,
    "focal_loss": FocalLossConfig,
    "class_weights": ClassWeightsConfig,
    "adversarial": AdversarialConfig,
    "mixup": MixupConfig,
    "augmentation": AugmentationConfig,
    "dpo": DpoConfig,
    "kto": KtoConfig,
    "masking": MaskingConfig,
    "multi_task": MultiTaskConfig,
    "denoising": DenoisingConfig,
}
"""By field of `training`."""
