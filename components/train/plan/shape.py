"""A transformer's sizes from its configuration alone: no weights, no torch, no Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.config.plain import shown
from steadytrain.components.shared.errors import BadInput

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "gpt2": {
        "vocab_size": 50_257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    "bert": {
        "vocab_size": 30_522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
    },
}
"""What Transformers takes for a field that a configuration leaves out; a test compares them."""

_ALIASES: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
"""GPT-2's names, and those that its configuration takes as well."""

FAMILIES: Final = tuple(_DEFAULTS)
_LARGEST_COUNT: Final = 10**9


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
    labels: classes of a classification head; 0: a language model's head.
    matrices: of each layer.
    vectors: biases and norms of each layer, in values.
    embeddings: tables and what follows them before the first layer, in values.
    head: what follows the last layer, in values; a tied table counts as an embedding.
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

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return sum(matrix.size for matrix in self.matrices) + self.vectors

    @property
    def parameters(self) -> int:
        return self.embeddings + self.layers * self.layer + self.head

    @property
    def largest(self) -> int:
        """Values of the largest tensor."""
        return max(self.vocabulary * self.hidden, *(matrix.size for matrix in self.matrices))

    def adapted(self, targets: Iterable[str] | None) -> tuple[Matrix, ...]:
        """Matrices of a layer that adapters go to; None: all.

        Args:
            targets: names, or ends of paths, as PEFT takes them.

        Raises:
            BadInput: a target is none of the model's.
        """
        if targets is None:
            return self.matrices
        wanted = tuple(targets)
        for target in wanted:
            if not any(_ends(matrix, target) for matrix in self.matrices):
                raise BadInput(
                    f"model.adapter.targets: {target!r} is no linear layer of a {self.family} "
                    "model's layers",
                    remedy=f"some of {', '.join(matrix.name for matrix in self.matrices)}, or "
                    "their last names; or leave it out for all",
                )
        return tuple(m for m in self.matrices if any(_ends(m, target) for target in wanted))


def _ends(matrix: Matrix, target: str) -> bool:
    return f".{matrix.name}".endswith(f".{target}")


def shape_of(config: Mapping[str, Any], *, labels: int = 0) -> Shape:
    """The shape of a Transformers configuration.

    Args:
        config: as `config.json` has it, `model_type` included.
        labels: classes, for sequence classification; 0: a causal language model.

    Raises:
        BadInput: the formula does not know this kind of model, or a size is none.
    """
    family = str(config.get("model_type", ""))
    if family not in _DEFAULTS:
        raise BadInput(
            f"model_type = {family!r}: the plan's formulas do not know this architecture",
            remedy=f"they know {', '.join(FAMILIES)}; the run itself takes any that "
            "Transformers has",
        )
    given = {_ALIASES.get(name, name): value for name, value in config.items()}
    fields = {**_DEFAULTS[family], **{k: v for k, v in given.items() if v is not None}}
    make = _llama if family in _GATED else _gpt2 if family == "gpt2" else _bert
    return make(_common(family, fields, labels), fields)


_GATED: Final = ("llama", "mistral", "qwen2")


def _common(family: str, fields: Mapping[str, Any], labels: int) -> dict[str, Any]:
    """What each family's configuration names alike."""
    return {
        "family": family,
        "hidden": _count(fields, "hidden_size"),
        "layers": _count(fields, "num_hidden_layers"),
        "heads": _count(fields, "num_attention_heads"),
        "vocabulary": _count(fields, "vocab_size"),
        "positions": _count(fields, "max_position_embeddings"),
        "tied": bool(fields.get("tie_word_embeddings", False)) and not labels,
        "labels": labels,
    }


def _count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size.

    Args:
        default: where it is left out, or 0.

    Raises:
        BadInput: it is none.
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


def _share(fields: Mapping[str, Any], name: str) -> float:
    """A probability of dropout, 0 where it is left out.

    Raises:
        BadInput: it is none.
    """
    value = fields.get(name, 0.0)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadInput(
            f"model.config.{name} = {shown(value)}: not a number from 0 to 1",
            remedy="give one, or leave it out for the architecture's default",
        )
    return float(value)


def _classifier(common: Mapping[str, Any]) -> int:
    """Values of the last matrix: of classes, or of words where they are not the embeddings'."""
    outputs = common["labels"] or (0 if common["tied"] else common["vocabulary"])
    return int(outputs * common["hidden"])


def _llama(common: dict[str, Any], fields: Mapping[str, Any]) -> Shape:
    """Llama and its kin: RMS norms, rotary positions, gated feed-forward, grouped keys."""
    family, hidden, heads = common["family"], common["hidden"], common["heads"]
    inner = _count(fields, "intermediate_size")
    width = _count(fields, "head_dim", max(1, hidden // heads))
    attention = heads * width
    key_value = _count(fields, "num_key_value_heads", heads) * width
    biased = bool(fields.get("attention_bias")) and family == "llama"
    vectors = 2 * hidden
    if biased or family == "qwen2":
        vectors += attention + 2 * key_value
    if biased:
        vectors += hidden
    if fields.get("mlp_bias") and family == "llama":
        vectors += 2 * inner + hidden
    return Shape(
        **common,
        attention=attention,
        key_value=key_value,
        intermediate=inner,
        attention_dropout=_share(fields, "attention_dropout"),
        hidden_dropout=0.0,
        matrices=(
            Matrix("self_attn.q_proj", hidden, attention),
            Matrix("self_attn.k_proj", hidden, key_value),
            Matrix("self_attn.v_proj", hidden, key_value),
            Matrix("self_attn.o_proj", attention, hidden),
            Matrix("mlp.gate_proj", hidden, inner),
            Matrix("mlp.up_proj", hidden, inner),
            Matrix("mlp.down_proj", inner, hidden),
        ),
        vectors=vectors,
        embeddings=common["vocabulary"] * hidden,
        head=hidden + _classifier(common),
    )


def _gpt2(common: dict[str, Any], fields: Mapping[str, Any]) -> Shape:
    hidden = common["hidden"]
    inner = _count(fields, "intermediate_size", 4 * hidden)
    return Shape(
        **common,
        attention=hidden,
        key_value=hidden,
        intermediate=inner,
        attention_dropout=_share(fields, "attn_pdrop"),
        hidden_dropout=_share(fields, "resid_pdrop"),
        matrices=(
            Matrix("attn.c_attn", hidden, 3 * hidden),
            Matrix("attn.c_proj", hidden, hidden),
            Matrix("mlp.c_fc", hidden, inner),
            Matrix("mlp.c_proj", inner, hidden),
        ),
        # Biases of the four, and two norms with a bias each.
        vectors=3 * hidden + hidden + inner + hidden + 4 * hidden,
        embeddings=(common["vocabulary"] + common["positions"]) * hidden,
        head=2 * hidden + _classifier(common),
    )


def _bert(common: dict[str, Any], fields: Mapping[str, Any]) -> Shape:
    hidden, inner = common["hidden"], _count(fields, "intermediate_size")
    types = _count(fields, "type_vocab_size")
    tables = common["vocabulary"] + common["positions"] + types
    # A pooler, and a bias for each class; or a transform with its norm, and one for each token.
    dense = hidden * hidden + hidden
    beside = common["labels"] or 2 * hidden + common["vocabulary"]
    return Shape(
        **common,
        attention=hidden,
        key_value=hidden,
        intermediate=inner,
        attention_dropout=_share(fields, "attention_probs_dropout_prob"),
        hidden_dropout=_share(fields, "hidden_dropout_prob"),
        matrices=(
            Matrix("attention.self.query", hidden, hidden),
            Matrix("attention.self.key", hidden, hidden),
            Matrix("attention.self.value", hidden, hidden),
            Matrix("attention.output.dense", hidden, hidden),
            Matrix("intermediate.dense", hidden, inner),
            Matrix("output.dense", inner, hidden),
        ),
        vectors=4 * hidden + inner + hidden + 4 * hidden,
        embeddings=tables * hidden + 2 * hidden,
        head=dense + beside + _classifier(common),
    )
