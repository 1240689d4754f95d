"""Perturbations of the embeddings of a micro-batch that raise its loss.

One step along the gradient is the fast gradient method (Goodfellow et al. 2015; on texts Miyato et
al. 2017), several projected ones are projected gradient descent (Madry et al. 2018). Perturbations
start at zero, and a text is a row or one of the documents in a row. So they depend on nothing but
the model and the text: neither on the micro-batch, nor on the row's other documents, nor on the
number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from steadytrain.components.techniques.adversarial_training import AdversarialConfig, Attack
from steadytrain.components.techniques.base import Batch

_SHORTEST: Final = 1e-30
"""Norm of a gradient below which it has no direction."""


class Texts:
    """The texts of a micro-batch, each limited by epsilon: here, one in each row.

    Values are (rows, length, width), and what is returned has their shape or can be expanded to it.
    """

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest absolute value of each text."""
        return values.abs().amax((1, 2), keepdim=True)

    def norm(self, values: torch.Tensor) -> torch.Tensor:
        """Return the l2 norm of all values of each text."""
        result: torch.Tensor = values.norm(dim=(1, 2), keepdim=True)
        return result

    def are_finite(self, values: torch.Tensor) -> torch.Tensor:
        """Return whether all values of each text are finite."""
        return values.isfinite().all((1, 2), keepdim=True)


_ROWS: Final = Texts()


class _Documents(Texts):
    """The documents of packed rows. Padding is one more document, which no loss depends on.

    Args:
        starts: (rows, length), whether a document begins at a token.
    """

    def __init__(self, starts: torch.Tensor) -> None:
        flat = starts.flatten()
        ends = torch.tensor([len(flat)], device=flat.device)
        self.lengths = flat.nonzero().squeeze(1).diff(append=ends)
        self.owners = flat.cumsum(0).sub(1).view_as(starts)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return self._of_each(values.abs().amax(2), "max")

    def norm(self, values: torch.Tensor) -> torch.Tensor:
        return self._of_each(values.square().sum(2), "sum").sqrt()

    def are_finite(self, values: torch.Tensor) -> torch.Tensor:
        return self._of_each(values.isfinite().all(2).float(), "min") > 0

    def _of_each(self, values: torch.Tensor, how: str) -> torch.Tensor:
        """Reduce the values (rows, length) of each document. Return (rows, length, 1)."""
        reduced = torch.segment_reduce(values.flatten(), how, lengths=self.lengths, unsafe=True)
        return reduced[self.owners].unsqueeze(2)


def texts_of(batch: Batch) -> Texts:
    """Return the texts of a micro-batch: its documents, if positions begin again with each."""
    if "position_ids" not in batch:
        return _ROWS
    starts = batch["position_ids"] == 0
    starts[:, 0] = True
    return _Documents(starts)


def unperturbed(model: Any, batch: Batch) -> torch.Tensor:
    """Return the perturbation to start from: zeros, (rows, length, width), float32."""
    ids, width = batch["input_ids"], model.get_input_embeddings().embedding_dim
    return torch.zeros((*ids.shape, width), device=ids.device, requires_grad=True)


@contextlib.contextmanager
def perturbed(model: Any, perturbation: torch.Tensor) -> Iterator[None]:
    """Add a perturbation to the token embeddings of every forward pass within this context."""

    def add(_: object, __: object, found: torch.Tensor) -> torch.Tensor:
        return found + perturbation.to(found.dtype)

    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def ascended(
    perturbation: torch.Tensor, gradient: torch.Tensor, attack: Attack, texts: Texts = _ROWS
) -> torch.Tensor:
    """Return the perturbation after one step, within the ball of radius epsilon.

    Args:
        gradient: of the loss, times any positive factor. A text whose gradient is zero or not
            finite keeps its perturbation.
        texts: each has a ball of its own.

    Returns:
        A leaf that requires a gradient.
    """
    if attack.norm == "linf":
        direction = gradient.sign()
        moved = (perturbation + attack.step_size * direction).clamp(-attack.epsilon, attack.epsilon)
    else:
        # Normalized first by the largest value, because squares of small ones underflow.
        scaled = gradient / texts.largest(gradient).clamp_min(_SHORTEST)
        direction = scaled / texts.norm(scaled).clamp_min(_SHORTEST)
        moved = perturbation + attack.step_size * direction
        moved = moved * (attack.epsilon / texts.norm(moved).clamp_min(attack.epsilon))
    result = torch.where(texts.are_finite(gradient), moved, perturbation)
    return result.requires_grad_()


def search(
    model: Any, batch: Batch, attack: Attack, loss: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the perturbation after all steps.

    Args:
        loss: runs the forward pass. The gradients of weights stay as they are.
    """
    perturbation, texts = unperturbed(model, batch), texts_of(batch)
    for _ in range(attack.step_count):
        with perturbed(model, perturbation):
            (gradient,) = torch.autograd.grad(loss(), perturbation)
        perturbation = ascended(perturbation, gradient, attack, texts)
    return perturbation


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass.

    share: of its loss in the loss of the micro-batch.
    last: whether it is the last one of its micro-batch.
    """

    share: float = 1.0
    last: bool = True


ONE_PASS: Final = (Pass(),)


def adversarial_passes(
    attack: AdversarialConfig, module: Any, batch: Batch, loss: Callable[[], torch.Tensor]
) -> Iterator[Pass]:
    """Yield the passes of a micro-batch, each while its perturbation is in place.

    Each is a forward and backward pass of its own, as those of further micro-batches. So gradients
    accumulate, and ranks exchange them, as they do anyway. All passes of a micro-batch have the
    same dropout, as in Zhu et al. 2020, "FreeLB", section 3.3. The next one is perturbed by the
    gradient that the backward pass of this one has left.

    Args:
        loss: runs the forward pass, for passes that only search.
    """
    dropout = _Dropout(batch["input_ids"].device)

    def repeated() -> torch.Tensor:
        dropout.repeat()
        return loss()

    if attack.ascents:
        with perturbed(module, search(module, batch, attack, repeated).detach()):
            dropout.repeat()
            yield Pass()
        return
    perturbation, texts = unperturbed(module, batch), texts_of(batch)
    for number in range(1, attack.passes + 1):
        dropout.repeat()
        with perturbed(module, perturbation):
            yield Pass(1 / attack.passes, last=number == attack.passes)
        if number < attack.passes:
            assert perturbation.grad is not None, "the model's embeddings are perturbed"
            perturbation = ascended(perturbation, perturbation.grad, attack, texts)


class _Dropout:
    """The state of the random generators that dropout draws from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def repeat(self) -> None:
        """Draw the same dropout again."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
