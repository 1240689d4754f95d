"""Dropout by its place in the model, and what each family of models calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from steadytrain.components.shared.effects import Section
from steadytrain.components.shared.errors import ConfigError, Problem

Names = Mapping[str, tuple[str, ...]]
"""The fields of Transformers' configuration, by place."""

_BERT: Final[Names] = {
    "hidden": ("hidden_dropout_prob",),
    "attention": ("attention_probs_dropout_prob",),
    "classifier": ("classifier_dropout",),
}
_LLAMA: Final[Names] = {"attention": ("attention_dropout",)}
_NEOX: Final[Names] = {"hidden": ("hidden_dropout",), "attention": ("attention_dropout",)}
FAMILIES: Final[Mapping[str, Names]] = {
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), _BERT),
    "albert": {**_BERT, "classifier": ("classifier_dropout_prob",)},
    "deberta-v2": {**_BERT, "classifier": ("cls_dropout",)},
    "distilbert": {
        "hidden": ("dropout",),
        "attention": ("attention_dropout",),
        "classifier": ("seq_classif_dropout",),
    },
    "modernbert": {
        "hidden": ("embedding_dropout", "mlp_dropout"),
        "attention": ("attention_dropout",),
        "classifier": ("classifier_dropout",),
    },
    "gpt2": {"hidden": ("embd_pdrop", "resid_pdrop"), "attention": ("attn_pdrop",)},
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), _NEOX),
    "opt": {"hidden": ("dropout",), "attention": ("attention_dropout",)},
    "phi3": {"hidden": ("resid_pdrop",), "attention": ("attention_dropout",)},
    **dict.fromkeys(
        ("gemma", "gemma2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3"), _LLAMA
    ),
}
"""The fields of each family, by `model_type`."""


class DropoutConfig(Section):
    """Dropout of the model, by place. None leaves it as the model's own configuration has it."""

    hidden: float | None = Field(
        None, ge=0, lt=1, description="Dropout of embeddings and of the layers' outputs."
    )
    attention: float | None = Field(
        None, ge=0, lt=1, description="Dropout of the attention probabilities."
    )
    classifier: float | None = Field(
        None, ge=0, lt=1, description="Dropout before the classification head."
    )

    @property
    def places(self) -> dict[str, float]:
        """The places that are set."""
        return self.model_dump(exclude_none=True)


def dropout_problem(dropout: DropoutConfig, family: str) -> Problem | None:
    """Return what is wrong with a dropout; None if the family has it.

    Args:
        family: `model_type`.
    """
    names = FAMILIES.get(family, {})
    for where, value in dropout.places.items():
        if where not in names:
            known = [f"model.dropout.{each} ({', '.join(names[each])})" for each in names]
            return Problem(
                f"model.dropout.{where}",
                str(value),
                f"a {family} model has no such dropout"
                if known
                else f"the dropout fields of {family} are unknown",
                f"it has {' and '.join(known)}"
                if known
                else "leave it out, or set the family's own field in the model's configuration",
            )
    return None


def dropout_fields(dropout: DropoutConfig, family: str) -> dict[str, Any]:
    """Return the fields of Transformers' configuration that set a dropout.

    Raises:
        ConfigError: the family has no dropout in one of these places.
    """
    if problem := dropout_problem(dropout, family):
        raise ConfigError([problem])
    names = FAMILIES.get(family, {})
    return {field: value for where, value in dropout.places.items() for field in names[where]}
