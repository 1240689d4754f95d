"""How a model is trained, as far as it affects memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.config.optimizers import DEFAULT
from steadytrain.components.shared.config.strategies import Offload, StrategySpec, strategy_spec

Precision = Literal["fp32", "bf16", "fp16"]
FP32: Final = 4
"""Bytes per value."""
FOUR_BITS: Final = 4 + 0.127
"""Bits of a 4-bit weight, including its doubly quantized constants (Dettmers et al. 2023, "QLoRA",
section 3)."""


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model that each rank runs next to the one that trains (`techniques.py`), in bytes.

    forward: for each token, during its forward pass.
    kept: for each token, from then until the loss.
    compared: for comparing a block of logits.
    flops: of a token's forward pass.
    matched: for each token, for comparing hidden states, until backward.
    projection: values that the student learns only for that comparison.
    """

    weights: int
    forward: int
    kept: int
    compared: int
    flops: float
    matched: int = 0
    projection: int = 0

    def alone(self, tokens: int) -> int:
        """Return its bytes on a device without the model that trains, for a batch of tokens."""
        return self.weights + tokens * (self.forward + self.kept) + self.compared


@dataclass(frozen=True)
class Setting:
    """One rank's part of a training run.

    length: tokens of a sequence.
    micro_batch: sequences per forward pass.
    recompute: whether backward recomputes a layer's activations.
    masked: whether attention gets a mask, as padding requires; packed documents don't need one.
    accumulates: whether gradients accumulate over more than one micro-batch.
    strategy: resolved: never "auto".
    cuda: whether on a GPU, whose kernels keep less.
    weight_copies: tensors in 32 bits that training components keep for each trained weight.
    frozen_model: the teacher or the reference; None without one.
    contrasts: whether the loss compares the token states of each document.
    returns_states: whether the model returns the states of all layers, which the loss needs.
    copies: how often a forward pass has each sequence: twice with R-Drop.
    differentiates: whether a language model's loss is differentiated block by block, as
        R-Drop's, the focal loss, and that of stored answers are.
    passes: forward and backward passes of each micro-batch: several in adversarial training.
    ascents: further ones that give no gradients of weights.
    answers: bytes of a teacher's stored answers, for this step and the next one.
    targets: share of the tokens that have a target, as far as the task decides that.
    """

    length: int
    micro_batch: int = 1
    precision: Precision = "fp32"
    recompute: bool = False
    masked: bool = False
    accumulates: bool = False
    strategy: str = "single"
    ranks: int = 1
    offload: Offload = "none"
    adapter: AdapterConfig = AdapterConfig()  # noqa: RUF009  immutable
    optim: str = DEFAULT
    cuda: bool = True
    weight_copies: int = 0
    frozen_model: FrozenModel | None = None
    contrasts: bool = False
    returns_states: bool = False
    copies: int = 1
    differentiates: bool = False
    passes: int = 1
    ascents: int = 0
    answers: int = 0
    targets: float = 1.0

    @property
    def tokens(self) -> int:
        """The tokens of a forward pass."""
        return self.micro_batch * self.copies * self.length

    @property
    def target_tokens(self) -> int:
        """The tokens of a forward pass that have a target: on average, and at least one."""
        return max(1, round(self.tokens * self.targets))

    @property
    def perturbs(self) -> bool:
        """Whether embeddings are perturbed."""
        return self.passes > 1 or self.ascents > 0

    @property
    def half(self) -> bool:
        """Whether matrix products are in 16 bits."""
        return self.precision != "fp32"

    @property
    def width(self) -> int:
        """Bytes of a value that a matrix product returns."""
        return 2 if self.half else 4

    @property
    def sharing(self) -> StrategySpec:
        """What the strategy's package says about it."""
        return strategy_spec(self.strategy)

    @property
    def shards_weights(self) -> bool:
        return "weights" in self.sharing.shards

    @property
    def shards_gradients(self) -> bool:
        return "gradients" in self.sharing.shards

    @property
    def shards_optimizer(self) -> bool:
        return "optimizer" in self.sharing.shards

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered from ranks or the host for computing."""
        return self.shards_weights and (self.ranks > 1 or self.offload == "all")

    @property
    def exchanges(self) -> bool:
        """Whether each rank has all gradients, in buckets that the ranks exchange."""
        return not self.sharing.shards and self.sharing.max_ranks != 1

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients exist in forward: accumulated, or in buckets of DDP and ZeRO-3."""
        return self.accumulates or self.exchanges or self.by_buckets

    @property
    def adds_gradients(self) -> bool:
        """Whether a weight's new gradient is added to what exists, and freed at once.

        FSDP keeps a layer's new gradients until it has shared them.
        """
        return self.keeps_gradients and (self.deepspeed or not self.shards_gradients)

    @property
    def deepspeed(self) -> bool:
        return self.sharing.library == "deepspeed"

    @property
    def by_buckets(self) -> bool:
        """Whether weights are gathered by buckets, as ZeRO-3 does, and not by layers."""
        return self.deepspeed and self.shards_weights

    @property
    def quantizes_head(self) -> bool:
        """Whether a frozen head uses fewer bits than it was loaded with."""
        return self.adapter.freezes and self.adapter.frozen_head != "as_loaded"

    @property
    def casts_weights(self) -> bool:
        """Whether autocast makes 16-bit copies of 32-bit weights."""
        return self.half and not self.sharing.shards and not self.adapter.freezes
