"""Architectures that the plan has a formula for: data, from `families.yaml`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal

import yaml


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
    place = resources.files("steadytrain.components.memory") / "families.yaml"
    content = yaml.safe_load(place.read_text(encoding="utf-8"))["families"]
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
