"""Attacks on the embeddings of a text: to train with, and to evaluate with."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import Section, at_odds, check_unread
from steadytrain.components.techniques.settings import ObjectiveConfig

_STEP: Final = 0.3
"""Size of a step if none is set, as a share of epsilon."""


class Attack(Section):
    """A search for the small perturbation of a text's embeddings that raises its loss most."""

    kind: str
    epsilon: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Largest norm of the perturbation of a text, or in a packed row of a document. "
        "The embeddings of a token of BERT have an l2 norm of about 1.4.",
    )
    alpha: float | None = Field(
        None, gt=0, le=1e6, description="Norm of one step. None means 0.3 of epsilon. Not for fgm."
    )
    steps: int | None = Field(
        None, ge=1, description="Steps of the search. None means 3. Not for fgm, which has one."
    )
    norm: Literal["l2", "linf"] = Field(
        "l2",
        description="l2: of all values of a text together; linf: of each value, with steps by the "
        "sign of the gradient.",
    )

    @property
    def on(self) -> bool:
        """Whether there is an attack."""
        return self.kind != "none"

    @property
    def step_size(self) -> float:
        """The norm of one step."""
        if self.kind == "fgm":
            return self.epsilon
        return _STEP * self.epsilon if self.alpha is None else self.alpha

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return 1 if self.kind == "fgm" else self.steps or 3

    def _check_read(self, field: str) -> None:
        """Reject fields that nothing would read."""
        unread = {"none": ("epsilon", "alpha", "steps", "norm"), "fgm": ("alpha", "steps")}
        why, fix = f"with {field}.kind {self.kind}", f"set {field}.kind"
        check_unread(self, field, unread.get(self.kind, ()), why, fix)


class AdversarialConfig(Attack, ObjectiveConfig):
    """Training on embeddings that are perturbed to raise the loss."""

    kind: Literal["none", "fgm", "pgd", "freelb"] = Field(
        "none",
        description="none; fgm: the mean of the loss with and without one step (Miyato et al. "
        "2017); pgd: the loss at the end of several steps (Madry et al. 2018); freelb: the mean of "
        "the losses on the way (Zhu et al. 2020).",
    )

    @property
    def passes(self) -> int:
        """Forward and backward passes of each micro-batch that the weights learn from."""
        return {"fgm": 2, "freelb": self.step_count}.get(self.kind, 1)

    @property
    def ascents(self) -> int:
        """Further passes that only search."""
        return self.step_count if self.kind == "pgd" else 0

    @model_validator(mode="after")
    def _is_read(self) -> AdversarialConfig:
        self._check_read("training.adversarial")
        if self.kind == "freelb" and self.step_count < 2:
            raise at_odds(
                "training.adversarial.steps",
                self.steps,
                "the first pass of freelb has no perturbation yet",
                "use at least 2",
            )
        return self


class AttackConfig(Attack):
    """Attack that the accuracy of the trained classifier is measured under."""

    kind: Literal["none", "fgm", "pgd"] = Field(
        "none",
        description="none; fgm: one step; pgd: several steps, as freelb and pgd search for them "
        "in training.",
    )

    @model_validator(mode="after")
    def _is_read(self) -> AttackConfig:
        self._check_read("evaluation.attack")
        return self
