"""A transformer's sizes from its configuration alone: no weights, no torch, no Transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from steadytrain.components.shared.config.document import shown
from steadytrain.components.shared.errors import BadInput


@dataclass(frozen=True)
class Traits:
    """What determines how much a layer keeps for the backward pass.

    norm: "layer": PyTorch's own. "rms": computed in 32 bits, the result in the input's type.
        "rms32": the result in 32 bits too.
    readers: number of matrices that read the stream, in attention and in the feed-forward.
    inside: of the feed-forward. "gated": an activation times another product. "tanh": GELU from
        several operators. "plain": one operator. "experts": gated, by some of many experts.
    placed: norms before each half, after it, or both.
    heads_normed: whether queries and keys have norms; per head, or all at once.
    packed: whether one matrix computes queries, keys and values, of which rotary positions make
        copies.
    embedding_norm: whether there is a norm before the first layer.
    attention_dropped: whether hidden dropout also follows attention.
    """

    norm: Literal["layer", "rms", "rms32"]
    readers: Sequence[int]
    inside: Literal["gated", "tanh", "plain", "experts"]
    placed: Literal["before", "after", "both"] = "before"
    heads_normed: Literal["no", "each", "all"] = "no"
    packed: bool = False
    embedding_norm: bool = False
    attention_dropped: bool = True


@dataclass(frozen=True)
class Family:
    """An architecture; `families.yaml` explains the fields.

    kind: what is outside its layers.
    """

    kind: Literal["decoder", "bert", "roberta", "distilbert", "modernbert"]
    defaults: Mapping[str, Any]
    matrices: Mapping[str, Sequence[str]]
    norms: Sequence[int]
    traits: Traits
    aliases: Mapping[str, str]
    biases: Mapping[str, str | bool]
    only: Mapping[str, Sequence[Any]]

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration with the usual field names and with defaults."""
        given = {self.aliases.get(name, name): value for name, value in config.items()}
        return {**self.defaults, **{name: v for name, v in given.items() if v is not None}}


@functools.cache
def families() -> Mapping[str, Family]:
    """Return the families by Transformers' model_type."""
    path = resources.files("steadytrain.components.memory") / "families.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))["families"]
    return {name: _family(fields) for name, fields in content.items()}


def has_formula(config: Mapping[str, Any]) -> bool:
    """Return whether a formula covers a configuration."""
    family = families().get(str(config.get("model_type", "")))
    return family is not None and all(
        config.get(field) in values for field, values in family.only.items()
    )


_OPTIONAL: Final = ("aliases", "biases", "only")


def _family(fields: Mapping[str, Any]) -> Family:
    optional: dict[str, Any] = {name: {} for name in _OPTIONAL}
    return Family(**{**optional, **fields, "traits": Traits(**fields["traits"])})


if TYPE_CHECKING:
    from steadytrain.components.memory.setting import Setting

FAMILIES: Final = tuple(families())
_LARGEST_COUNT: Final = 10**9


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer for a micro-batch.

    entry: its input, the only thing kept if the rest is recomputed.
    attention, feed_forward: what their halves keep.
    attention_backward, feed_forward_backward: the most that intermediate gradients need.
    """

    entry: int
    attention: int
    feed_forward: int
    attention_backward: int
    feed_forward_backward: int

    @property
    def kept(self) -> int:
        return self.attention + self.feed_forward


@dataclass(frozen=True)
class Activations:
    """Bytes of a traced model for a micro-batch.

    entry: what the embeddings keep in addition to the first layer's input.
    exit: what the last norm keeps, and the gradient of the head's input.
    loss: what a plain loss needs in addition, including the head's gradient; 0 for a fused one.
    """

    layer: LayerMemory
    entry: int
    exit: int
    loss: int


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weight; `name` is its path within one of the transformer's layers."""

    name: str
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    family: Transformers' model_type.
    attention, key_value: width of all query heads, and of all key (or value) heads.
    positions: longest sequence.
    labels: classes of a classification head; 0 for a language model's head.
    matrices: of each layer.
    vectors: biases and norms of each layer, in values.
    embeddings: tables and what follows them before the first layer, in values.
    head: what follows the last layer, in values; a tied table counts as an embedding.
    traits: of a formula's family; None if traced.
    experts: sizes of each layer's tensors that hold the weights of all its experts.
    chosen: experts per token.
    used: values of `experts` that a token uses.
    fused: whether the head computes the loss; otherwise the logits of a complete micro-batch exist.
    documents: whether attention can be computed per document; otherwise it needs a mask.
    sdpa: whether attention is PyTorch's fused one if nobody chooses another, as in all families.
    frozen: parameters that `training.param_groups` never trains, of `parameters`.
    still: layers, from the first one, that have no backward pass: they are frozen, and so is all
        before them.
    traced: activations of an architecture that has no formula.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    attention: int
    key_value: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    labels: int
    attention_dropout: float
    hidden_dropout: float
    matrices: tuple[Matrix, ...]
    vectors: int
    embeddings: int
    head: int
    traits: Traits | None = None
    experts: tuple[int, ...] = ()
    chosen: int = 0
    used: int = 0
    fused: bool = True
    documents: bool = True
    sdpa: bool = True
    frozen: int = 0
    still: int = 0
    traced: Callable[[Setting], Activations] | None = field(default=None, compare=False)

    @property
    def layer(self) -> int:
        """The parameters of a layer."""
        return sum(matrix.size for matrix in self.matrices) + sum(self.experts) + self.vectors

    @property
    def parameters(self) -> int:
        return self.embeddings + self.layers * self.layer + self.head

    def adapted(self, targets: Iterable[str] | None) -> tuple[Matrix, ...]:
        """Return the matrices of a layer that get adapters; None means all.

        Args:
            targets: names or path endings, as in PEFT.

        Raises:
            BadInput: a target doesn't exist in the model.
        """
        if targets is None:
            return self.matrices
        wanted = tuple(targets)
        for target in wanted:
            if not any(_ends(matrix, target) for matrix in self.matrices):
                raise BadInput(
                    f"model.adapter.targets: {target!r} is not a linear layer of a "
                    f"{self.family} model's layers",
                    remedy=f"some of {', '.join(matrix.name for matrix in self.matrices)}, or "
                    "the last part of their names; or leave it out for all",
                )
        return tuple(m for m in self.matrices if any(_ends(m, target) for target in wanted))


def _ends(matrix: Matrix, target: str) -> bool:
    return f".{matrix.name}".endswith(f".{target}")


def shape_of(config: Mapping[str, Any], *, labels: int = 0) -> Shape:
    """Return the shape of a Transformers configuration.

    Args:
        config: as in `config.json`, including `model_type`.
        labels: classes, for sequence classification; 0 for a causal language model.

    Raises:
        BadInput: no formula covers this kind of model, or a size is invalid.
    """
    family = str(config.get("model_type", ""))
    if not has_formula(config):
        raise BadInput(
            f"model_type = {family!r}: the plan has no formulas for this architecture",
            remedy=f"it has them for the standard {', '.join(FAMILIES)}; with torch installed, "
            "the plan traces any architecture that Transformers has, and a run can "
            "train it",
        )
    known = families()[family]
    fields = known.fields(config)
    if labels == 0 and known.kind in _ENCODERS:
        raise BadInput(
            f"model_type = {family!r}: Transformers has no causal language model for it",
            remedy="set data.task=sequence_classification, or use another model",
        )
    return Shape(**_sizes(known, fields, family, labels))


_ENCODERS: Final = ("distilbert", "modernbert")


def _count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a size.

    Args:
        default: used if the field is missing, None or 0.

    Raises:
        BadInput: it is not a valid size.
    """
    value = fields.get(name)
    if not value and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST_COUNT:
        raise BadInput(
            f"model.config.{name} = {shown(value)}: not a whole number from 1 to "
            f"{_LARGEST_COUNT:,}",
            remedy="give one, or leave it out for the architecture's default",
        )
    return value


def _share(fields: Mapping[str, Any], *names: str) -> float:
    """Return a dropout probability, from the first name that exists; 0 if none does.

    Raises:
        BadInput: it is not a probability.
    """
    name = next((name for name in names if name in fields), names[0])
    value = fields.get(name, 0.0)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadInput(
            f"model.config.{name} = {shown(value)}: not a number from 0 to 1",
            remedy="give one, or leave it out for the architecture's default",
        )
    return float(value)


def _sizes(family: Family, fields: Mapping[str, Any], name: str, labels: int) -> dict[str, Any]:
    """Return the fields of a shape."""
    hidden, heads = _count(fields, "hidden_size"), _count(fields, "num_attention_heads")
    inner, width = _inner(family, fields, hidden), _count(fields, "head_dim", hidden // heads or 1)
    attention, vocabulary = heads * width, _count(fields, "vocab_size")
    key_value = _count(fields, "num_key_value_heads", heads) * width
    widths = {
        "hidden": hidden,
        "attention": attention,
        "key_value": key_value,
        "packed": attention + 2 * key_value,
        "inner": inner,
        "inner_twice": 2 * inner,
    }
    matrices = tuple(
        Matrix(path, widths[inputs], widths[outputs])
        for path, (inputs, outputs) in family.matrices.items()
    )
    vectors = family.norms[0] * hidden + _biases(family, fields, matrices)
    if family.traits.heads_normed == "each":
        vectors += 2 * width
    elif family.traits.heads_normed == "all":
        vectors += attention + key_value
    experts: tuple[int, ...] = ()
    used = 0
    if family.traits.inside == "experts":
        count, each = _count(fields, "num_local_experts"), 3 * hidden * inner
        vectors += count * hidden
        experts = (count * each * 2 // 3, count * each // 3)
        used = _count(fields, "num_experts_per_tok") * each
    tied = bool(fields.get("tie_word_embeddings", False)) and not labels
    positions, layers = _positions(family, fields), _count(fields, "num_hidden_layers")
    outside = _Outside(hidden, vocabulary, labels, tied, layers)
    embeddings, head = outside.of(family, fields)
    return {
        "family": name,
        "traits": family.traits,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "attention": attention,
        "key_value": key_value,
        "intermediate": inner,
        "vocabulary": vocabulary,
        "positions": positions,
        "tied": tied,
        "labels": labels,
        "attention_dropout": _share(
            fields, "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"
        ),
        "hidden_dropout": _share(fields, "resid_pdrop", "hidden_dropout_prob", "dropout"),
        "matrices": matrices,
        "vectors": vectors,
        "embeddings": embeddings,
        "head": head,
        "experts": experts,
        "chosen": _count(fields, "num_experts_per_tok") if experts else 0,
        "used": used,
        "documents": labels == 0 and family.kind == "decoder",
    }


def _inner(family: Family, fields: Mapping[str, Any], hidden: int) -> int:
    if family.traits.inside == "tanh":
        return _count(fields, "intermediate_size", 4 * hidden)
    name = "moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"
    return _count(fields, name)


def _positions(family: Family, fields: Mapping[str, Any]) -> int:
    """Return the longest sequence. RoBERTa's positions start after the padding index."""
    positions = _count(fields, "max_position_embeddings")
    if family.kind != "roberta":
        return positions
    padding = fields.get("pad_token_id", 1)
    return max(1, positions - padding - 1) if isinstance(padding, int) else positions


def _biases(family: Family, fields: Mapping[str, Any], matrices: Iterable[Matrix]) -> int:
    return sum(
        matrix.outputs
        for matrix in matrices
        for path, switch in family.biases.items()
        if f"{matrix.name}.".startswith(f"{path}.") and (switch is True or fields.get(str(switch)))
    )


@dataclass(frozen=True)
class _Outside:
    """The sizes outside the layers."""

    hidden: int
    vocabulary: int
    labels: int
    tied: bool
    layers: int

    def of(self, family: Family, fields: Mapping[str, Any]) -> tuple[int, int]:
        """Return the values before the first layer and after the last one."""
        hidden, words = self.hidden, self.vocabulary * self.hidden
        # For the classes, or for the vocabulary if the head is not tied.
        last = (self.labels or (0 if self.tied else self.vocabulary)) * hidden
        norms = family.norms[1] * hidden
        if family.kind == "decoder":
            learned = "n_positions" in family.aliases
            places = _count(fields, "max_position_embeddings") * hidden if learned else 0
            return words + places, norms + last
        dense = hidden * hidden
        if family.kind == "modernbert":
            # The first layer has one norm less.
            return words + hidden, norms - hidden + dense + hidden + last + self.labels
        tables = _count(fields, "max_position_embeddings") * hidden + 2 * hidden
        if family.kind != "distilbert":
            tables += _count(fields, "type_vocab_size") * hidden
        # A pooler or dense layer with a bias per class; or a transform with its norm and a bias per
        # token.
        head = self.labels or 2 * hidden + self.vocabulary
        return words + tables, dense + hidden + head + last
