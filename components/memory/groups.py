"""A model's layers, and how each parameter is trained.

The latter is `training.param_groups` and `training.layer_decay`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import regex
import torch

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques.parameter_groups import ParamGroupConfig

_WITHOUT_DECAY: Final = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|log_variances"
)
_NAMED: Final = 3
"""Names of parameters in an error."""
_SEARCH_SECONDS: Final = 1
_UNCHANGED: Final = ParamGroupConfig(match=".")


@dataclass(frozen=True)
class Treatment:
    """How a parameter is trained.

    decays: whether `training.weight_decay` applies to it: it is no bias, no norm and no
        learned loss weight.
    unfreeze_at: as in `ParamGroupConfig`; 0 if it is trained from the first step.
    """

    decays: bool
    weight_decay: float
    lr_scale: float
    unfreeze_at: float


def treatments(model: torch.nn.Module, training: TrainingConfig) -> dict[str, Treatment]:
    """Return how each parameter that has gradients is trained, by its name.

    The `lr_scale` of its group is multiplied with the factor of its layer.

    Raises:
        BadInput: an entry of `training.param_groups` selects nothing, all parameters are frozen, or
            the model has no list of layers for `training.layer_decay`.
    """
    groups, decay = training.param_groups, training.layer_decay
    _check_used(model, groups)
    scales = {} if decay is None else layer_scales(model, decay)
    norms = set(_of_norms(model))
    result = {}
    for name, item in model.named_parameters():
        if not item.requires_grad:
            continue
        group = _group_of(name, groups) or _UNCHANGED
        decays = not (item in norms or _WITHOUT_DECAY.search(name.lower()))
        usual = training.weight_decay if decays else 0.0
        result[name] = Treatment(
            decays,
            usual if group.weight_decay is None else group.weight_decay,
            group.lr_scale * scales.get(name, 1.0),
            group.unfreeze_at or 0.0,
        )
    frozen = set(frozen_names(model, training))
    if groups and not any(
        item.unfreeze_at == 0 for name, item in result.items() if name not in frozen
    ):
        raise BadInput(
            "training.param_groups: every parameter is frozen at the first step",
            remedy="leave some parameters trained",
        )
    return result


@dataclass(frozen=True)
class Group:
    """Parameters that are trained alike.

    parameters: how many values they have.
    unfreeze_at: None if they are never trained.
    """

    parameters: int
    lr_scale: float
    weight_decay: float
    unfreeze_at: float | None


def grouped(model: torch.nn.Module, training: TrainingConfig) -> list[Group]:
    """Return the groups of a model, frozen ones last; nothing if all parameters are trained alike.

    Raises:
        BadInput: as for `treatments`.
    """
    if not training.param_groups and training.layer_decay is None:
        return []
    frozen = set(frozen_names(model, training))
    counter: Counter[tuple[float, float, float | None]] = Counter()
    sizes = {name: item.numel() for name, item in model.named_parameters()}
    for name, item in treatments(model, training).items():
        if name not in frozen:
            counter[item.lr_scale, item.weight_decay, item.unfreeze_at] += sizes[name]
    groups = [Group(count, *key) for key, count in counter.items()]
    values = sum(sizes[name] for name in frozen)
    return [*groups, *([Group(values, 0.0, 0.0, None)] if frozen else [])]


def frozen_names(model: torch.nn.Module, training: TrainingConfig) -> list[str]:
    """Return the parameters that `training.param_groups` never trains."""
    groups = training.param_groups
    if not any(group.frozen for group in groups):
        return []
    chosen = {name: _group_of(name, groups) for name, _ in model.named_parameters()}
    return [name for name, group in chosen.items() if group is not None and group.frozen]


def still_layers(model: torch.nn.Module, training: TrainingConfig) -> int:
    """Return how many layers, from the first one, never need a backward pass.

    They are frozen, and so is all that the model lists before them.
    """
    frozen = set(frozen_names(model, training))
    if not frozen:
        return 0
    try:
        layers = layers_of(model)
    except ValueError:
        return 0
    named = dict(model.named_parameters())
    trained = {item for name, item in named.items() if name not in frozen}
    below = _before(named.values(), layers)
    if trained.intersection(below):
        return 0
    learning = (bool(trained.intersection(layer.parameters())) for layer in layers)
    return next((index for index, learns in enumerate(learning) if learns), len(layers))


def _before(
    parameters: Iterable[torch.Tensor], layers: Sequence[torch.nn.Module]
) -> Iterator[torch.Tensor]:
    """Yield the parameters that a model lists before its layers."""
    within = {item for layer in layers for item in layer.parameters()}
    return takewhile(lambda item: item not in within, parameters)


def layer_scales(model: torch.nn.Module, decay: float) -> Mapping[str, float]:
    """Return the factor on the learning rate of each parameter (Bao et al. 2022, BEiT).

    1 for what follows the layers, `decay` for the last layer, and its power for each layer below
    it; embeddings are below the first one.

    Raises:
        BadInput: the model has no list of layers.
    """
    try:
        layers = layers_of(model)
    except ValueError:
        raise BadInput(
            f"training.layer_decay = {decay}: {type(model).__name__} has no list of layers",
            remedy="leave it out, and give factors in training.param_groups",
        ) from None
    depth_of = {item: depth for depth, layer in enumerate(layers, 1) for item in layer.parameters()}
    depth, top, scales = 0, len(layers) + 1, {}
    for name, item in model.named_parameters():
        # Modules that a model lists before its layers run before them.
        depth = depth_of.get(item, top if depth else 0)
        scales[name] = decay ** (top - depth)
    return scales


def _group_of(name: str, groups: Sequence[ParamGroupConfig]) -> ParamGroupConfig | None:
    """Return the first entry that matches a name; None if none does."""
    return next((group for group in groups if _matches(group.match, name)), None)


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern is found in a name.

    Raises:
        BadInput: it takes too long, as some patterns do that repeat what repeats.
    """
    try:
        return regex.search(pattern, name, timeout=_SEARCH_SECONDS) is not None
    except TimeoutError:
        raise BadInput(
            f"training.param_groups: the pattern {pattern!r} takes more than "
            f"{_SEARCH_SECONDS} s to search the name {name}",
            remedy="do not repeat what contains a repetition, such as (a+)+",
        ) from None


def _check_used(model: torch.nn.Module, groups: Sequence[ParamGroupConfig]) -> None:
    """Reject an entry that selects no parameter."""
    if not groups:
        return
    trained = {name: item.requires_grad for name, item in model.named_parameters()}
    chosen = {name: _group_of(name, groups) for name in trained}
    for index, group in enumerate(groups):
        names = [name for name in trained if trained[name] or group.frozen]
        if any(chosen[name] is group for name in names):
            continue
        earlier = any(_matches(group.match, name) for name in names)
        what = "only what earlier entries match" if earlier else "no parameter"
        raise BadInput(
            f"training.param_groups.{index}.match = {group.match!r}: it matches {what}",
            remedy="correct the pattern, or remove the entry; the trained parameters are "
            f"{_listed(names)}",
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED:,} more"


def _of_norms(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    for layer in model.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            yield from layer.parameters()


def layers_of(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return a transformer's layers: the list of modules with the most parameters.

    Raises:
        ValueError: it has no list of modules.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    ]
    if not lists:
        raise ValueError("its layers are in no list of modules")
    return max(lists, key=lambda layers: sum(count(layer) for layer in layers))


def count(module: torch.nn.Module) -> int:
    """Count the parameters, each one once."""
    return sum(parameter.numel() for parameter in module.parameters())
