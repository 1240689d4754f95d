"""What a model learns from a teacher: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeInt, model_validator

from steadytrain.components.shared.effects import (
    Address,
    IfSet,
    Section,
    Use,
    at_odds,
    check_unread,
)
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques.curriculum import CUT
from steadytrain.components.techniques.settings import ObjectiveConfig, Rule

STORED: Final = "training.distillation.top_k"
"""What rules call learning from stored answers."""


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
    layers: Annotated[
        Literal["last", "all"] | list[tuple[NonNegativeInt, NonNegativeInt]], Use.MEMORY
    ] = Field(
        "last",
        description="Compared layers. last: the last ones; all: each layer of the student with the "
        "teacher's at the same share of its depth; or pairs of a student's and a teacher's layer, "
        "such as [[1, 2], [3, 6]]. 0 means the embeddings.",
    )

    @property
    def on(self) -> bool:
        return self.weight > 0

    def pairs(self, student: int, teacher: int) -> list[tuple[int, int]]:
        """Return the compared layers, of the student and of the teacher; 0 means the embeddings.

        Args:
            student, teacher: their numbers of layers.

        Raises:
            BadInput: a layer does not exist, or the depths do not fit together.
        """
        field, layers = "training.distillation.hidden.layers", self.layers
        if layers == "last":
            return [(student, teacher)]
        if layers == "all":
            if teacher % student:
                raise BadInput(
                    f"{field} = {layers!r}: the teacher's {teacher} layers are no multiple of the "
                    f"student's {student}",
                    remedy="use last, or name the layers, such as [[1, 2], [3, 4]]",
                )
            return [(layer, layer * teacher // student) for layer in range(1, student + 1)]
        for own, other in layers:
            for who, layer, count in (("student", own, student), ("teacher", other, teacher)):
                if layer > count:
                    raise BadInput(
                        f"{field} = {[list(pair) for pair in layers]}: the {who} has no layer "
                        f"{layer}, only {count}",
                        remedy=f"name layers from 0 (the embeddings) to {count}",
                    )
        return sorted(layers)

    @model_validator(mode="after")
    def _is_read(self) -> HiddenConfig:
        if not self.on:
            address = "training.distillation.hidden"
            switch = f"{address}.weight"
            check_unread(self, address, ("loss", "layers"), f"without {switch}", f"set {switch}")
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

    teacher: Annotated[Address | None, Use.MEMORY] = Field(
        None,
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
    top_k: Annotated[int | None, IfSet(), Use.MEMORY] = Field(
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

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.stored:
            yield STORED, STORED, str(self.top_k)
        if self.hidden.on:
            field = "training.distillation.hidden"
            yield field, f"{field}.weight", f"{self.hidden.weight:g}"

    @property
    def stored(self) -> bool:
        """Whether the student learns from stored answers."""
        return self.on and self.top_k is not None

    @model_validator(mode="after")
    def _is_read(self) -> DistillationConfig:
        self._check_off("distillation", "teacher")
        return self


_REPLACES: Final = "with a teacher, the loss on the targets is plain cross-entropy"
RULES: Final = (
    *(
        Rule(f"training.{name}", "training.distillation", _REPLACES)
        for name in ("r_drop", "focal_loss", "class_weights", "mixup")
    ),
    Rule(STORED, "training.distillation.hidden", "hidden states are too large to store"),
    Rule(STORED, "training.adversarial", "the teacher answered the texts without perturbation"),
    Rule(STORED, "data.task denoising", "each epoch hides other tokens, which need other answers"),
    Rule(STORED, "training.augmentation", "the teacher answered the texts as they are"),
    Rule(STORED, CUT, "the teacher answered documents of full length"),
)
