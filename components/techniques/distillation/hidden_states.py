"""The loss of a student's hidden states against its teacher's.

By cosine: Sanh et al. 2019, "DistilBERT, a distilled version of BERT". By mean squared error, and
with a learned projection where the widths differ: Jiao et al. 2020, "TinyBERT", equation 8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.nn import functional

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.model_source import resolve_model
from steadytrain.components.techniques.auxiliary import Auxiliary, attach_auxiliary

_NAME: Final = "hidden_states"


def state_loss(
    student: torch.Tensor, teacher: torch.Tensor, kind: Literal["cosine", "mse"]
) -> torch.Tensor:
    """Return the loss of each token, (tokens), float32.

    Args:
        student, teacher: (tokens, width).
    """
    own, other = student.float(), teacher.float()
    if kind == "cosine":
        return 1 - functional.cosine_similarity(own, other, dim=1)
    return (own - other).square().mean(1)


class HiddenStates(Auxiliary):
    """A part of the student that compares its states within its forward pass.

    Outside `comparing`, it does nothing.

    Args:
        pairs: the compared layers, of the student and of the teacher, in order.
        widths: of the student's and the teacher's states. If they differ, one projection without
            bias, shared by all layers, maps the student's to the teacher's.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        widths: tuple[int, int],
        kind: Literal["cosine", "mse"],
    ) -> None:
        super().__init__()
        own, other = widths
        self.pairs, self.kind = tuple(pairs), kind
        self.projection = None if own == other else torch.nn.Linear(own, other, bias=False)
        self.expected: tuple[Sequence[torch.Tensor], torch.Tensor] | None = None

    def forward(
        self,
        states: Sequence[torch.Tensor],
        teacher: Sequence[torch.Tensor],
        shares: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss, summed over layers and tokens, float32.

        Args:
            states: of the student, (rows, length, width): of the embeddings and of each layer.
            teacher: of each compared layer.
            shares: (rows, length), float32, by which the loss of each token is multiplied. Tokens
                with 0 are not compared.
        """
        kept = shares > 0
        shares = shares[kept]
        loss = torch.zeros((), device=shares.device)
        with torch.autocast(shares.device.type, enabled=False):
            for (layer, _), other in zip(self.pairs, teacher, strict=True):
                own = states[layer][kept]
                if self.projection is not None:
                    own = self.projection(own.to(self.projection.weight.dtype))
                loss = loss + (state_loss(own, other[kept], self.kind) * shares).sum()
        return loss

    def answer(self, model: torch.nn.Module, inputs: object, output: Any) -> Any:
        """Replace the returned states by their loss and the last one."""
        del model, inputs
        if self.expected is not None:
            states = output.hidden_states
            output.hidden_states = (self(states, *self.expected), states[-1])
        return output


@dataclass(frozen=True)
class Comparison:
    """A loss to add: the student's part that computes it, and the teacher's states.

    states: (rows, length, width) of each compared layer.
    """

    part: HiddenStates
    states: Sequence[torch.Tensor]
    weight: float

    def loss(self, output: Any) -> torch.Tensor:
        """Return the weighted loss from what the student returned within `comparing`."""
        found: torch.Tensor = output.hidden_states[0]
        return self.weight * found


@contextlib.contextmanager
def comparing(comparison: Comparison | None, shares: torch.Tensor) -> Iterator[None]:
    """Within this context, the student's `hidden_states` are the summed loss and the last state.

    It must be called with `output_hidden_states=True`. None changes nothing.

    Args:
        shares: as in `HiddenStates.forward`.
    """
    if comparison is None:
        yield
        return
    comparison.part.expected = (comparison.states, shares)
    try:
        yield
    finally:
        comparison.part.expected = None


def attach_comparison(student: Any, config: RunConfig) -> None:
    """Add `HiddenStates` to a student.

    Raises:
        BadInput: the teacher's layers do not fit the student's.
    """
    from transformers import AutoConfig

    settings = config.training.distillation
    with foreign(
        f"training.distillation.teacher = {settings.teacher!r}: its config.json cannot be read",
        "use a model that Transformers has built in",
    ):
        folder = resolve_model(str(settings.teacher), config)
        teacher = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    sizes = (student.config.num_hidden_layers, teacher.num_hidden_layers)
    pairs = settings.hidden.pairs(*sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        part = HiddenStates(
            pairs,
            (student.config.hidden_size, teacher.hidden_size),
            settings.hidden.loss,
        )
    attach_auxiliary(student, _NAME, part)


def comparing_part(student: torch.nn.Module) -> HiddenStates | None:
    """Return what `attach_comparison` added; None if it added nothing."""
    return next((part for part in student.modules() if isinstance(part, HiddenStates)), None)
