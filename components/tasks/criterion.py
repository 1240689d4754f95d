"""The loss of logits on the targets of the data: cross-entropy and its regularized variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch.nn import functional

from steadytrain.components.shared.chunks import comparison_rows
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.tasks.base import Batch, Part
from steadytrain.components.tasks.scoring.table import class_counts
from steadytrain.components.techniques.focal_loss.factor import focal_factor
from steadytrain.components.techniques.r_drop.passes import diverging
from steadytrain.components.techniques.rare_classes.weights import class_weights


@dataclass(frozen=True)
class Mixed:
    """The second target of rows that are mixtures of two examples.

    targets: (rows), int64.
    shares: (rows), float32, of the first target in the loss. The rest is the second one's.
    """

    targets: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True)
class Criterion:
    """How logits are compared with the targets.

    smoothing: share of each target that is spread over all classes.
    gamma: power of 1 - probability that multiplies the loss of a target (focal loss).
    weights: (classes), float32, by which the loss of a target of that class is multiplied; None
        for 1.
    r_drop: weight of the divergence of two passes. If it is positive, the rows are pairs: rows 2n
        and 2n + 1 are the two passes of one example.
    """

    smoothing: float = 0.0
    gamma: float = 0.0
    weights: torch.Tensor | None = None
    r_drop: float = 0.0

    @classmethod
    def of(cls, training: TrainingConfig, weights: torch.Tensor | None = None) -> Criterion:
        """Return the configured one."""
        return cls(
            training.label_smoothing_factor,
            training.focal_loss.gamma,
            weights,
            training.r_drop.weight,
        )

    @property
    def plain(self) -> bool:
        """Whether it is cross-entropy with smoothing."""
        return not (self.gamma or self.r_drop) and self.weights is None

    def __call__(
        self, logits: torch.Tensor, targets: torch.Tensor, mixed: Mixed | None = None
    ) -> torch.Tensor:
        """Return the loss, summed over the examples, in nats.

        Args:
            logits: (rows, classes), float32.
            targets: (rows), int64.
            mixed: what else the rows are; None if each has one target.
        """
        if self.plain and mixed is None:
            return functional.cross_entropy(
                logits, targets, reduction="sum", label_smoothing=self.smoothing
            )
        losses = self._on_targets(logits, targets)
        if mixed is not None:
            others = self._on_targets(logits, mixed.targets)
            losses = mixed.shares * losses + (1 - mixed.shares) * others
        result = losses.sum()
        if not self.r_drop:
            return result
        first, second = (logits[start::2].log_softmax(1) for start in (0, 1))
        return self.of_both_passes(result, diverging(first, second).sum())

    def of_both_passes(self, losses: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
        """Return the loss of examples that pass the model twice.

        Args:
            losses: of both passes together.
            divergence: of one from the other and back.
        """
        # The paper adds up both passes. Their mean keeps the scale of a loss with one.
        return (losses + self.r_drop * divergence / 2) / 2

    def _on_targets(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row."""
        losses = functional.cross_entropy(
            logits, targets, reduction="none", label_smoothing=self.smoothing
        )
        return self.scaled(losses, logits, targets)

    def scaled(
        self, losses: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of each row, multiplied by what its probability and its class weigh.

        Args:
            losses: (rows).
        """
        if self.gamma:
            losses = losses * focal_factor(logits, targets, self.gamma)
        if self.weights is not None:
            losses = losses * self.weights.to(losses.device)[targets]
        return losses

    def turn_into_gradient(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Replace logits by the gradient of their loss, a block at a time. Return the summed loss.

        Args:
            logits: (rows, classes), overwritten.
            targets: (rows), int64.
        """
        loss = torch.zeros((), device=logits.device)
        # An even number, so that no pair is torn apart.
        size = comparison_rows(logits.shape[1]) // 2 * 2
        for start in range(0, logits.shape[0], size):
            rows = slice(start, start + size)
            with torch.enable_grad():
                block = logits[rows].detach().float().requires_grad_()
                result = self(block, targets[rows])
            (gradient,) = torch.autograd.grad(result, block)
            loss += result.detach()
            logits[rows] = gradient.to(logits.dtype)
        return loss


def class_sums(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return what `TrainingTask.validate` does for logits of classes.

    Args:
        logits: (rows, classes), float32.
        targets: (rows), int64.
    """
    predicted = logits.argmax(-1)
    right = targets[predicted == targets]
    sums = {
        "loss": functional.cross_entropy(logits, targets, reduction="sum").item(),
        "weight": len(targets),
        "correct": len(right),
    }
    # Each class's hits, and how often it is true or predicted, for F1.
    for name, result in (("hits", right), ("seen", torch.cat([targets, predicted]))):
        counts = torch.bincount(result, minlength=logits.shape[-1]).tolist()
        sums |= {f"{name}_{index}": count for index, count in enumerate(counts)}
    return sums


class ClassTraining(Part):
    """Training of a model that predicts one class of each row: its criterion and its validation.

    A subclass adds `logits`, and `targets` to its micro-batches: (rows,), int64.
    """

    metric = "loss"
    greater_is_better = False

    @cached_property
    def criterion(self) -> Criterion:
        training, counts = self.config.training, partial(class_counts, self.data)
        labels, parts = self.data.labels, self.class_parts
        return Criterion.of(training, class_weights(training.class_weights, labels, counts, parts))

    @property
    def class_parts(self) -> Sequence[int]:
        """The part of the data that each class belongs to; empty if there is only one."""
        return ()

    def logits(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the outputs of a micro-batch: (rows, classes), float32."""
        raise NotImplementedError

    def weight(self, batch: Batch) -> int:
        return len(batch["targets"])

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        return class_sums(self.logits(model, batch), batch["targets"])

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return class_metrics(sums)


def class_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the validation metrics of the sums of `class_sums`."""
    rows = max(sums["weight"], 1)
    # As on the test side, a class that is neither true nor predicted does not count.
    scores = [
        2 * sums[f"hits_{name.removeprefix('seen_')}"] / seen
        for name, seen in sums.items()
        if name.startswith("seen_") and seen
    ]
    return {
        "loss": sums["loss"] / rows,
        "accuracy": sums["correct"] / rows,
        "macro_f1": sum(scores) / max(len(scores), 1),
    }
