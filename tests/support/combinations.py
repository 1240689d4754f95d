"""Randomly sampled combinations of techniques that the compatibility table permits."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tasks.checks import check_task

from support import strategies
from support.forked import on_ranks
from support.scoring import save
from support.training import LLAMA

STEPS: Final = 12
_RECIPE: Final = {
    **strategies.RECIPE,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "eval_steps": 3,
    "save_steps": 1,
    "save_total_limit": STEPS,
}
_GRADER: Final = "GRADER"
"""Stands for the address of a reference model."""
_AXES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "optim": {
        name: {"optim": name}
        for name in (
            "adamw_torch",
            "adam",
            "sgd",
            "adafactor",
            "lamb",
            "lars",
            "lion",
            "muon",
            "schedule_free_adamw",
        )
    },
    "schedule": {
        name: {"lr_scheduler_type": name}
        for name in (
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "step_decay",
            "inverse_sqrt",
            "warmup_stable_decay",
            "constant",
            "constant_with_warmup",
        )
    }
    | {
        "reduce_lr_on_plateau": {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "threshold": 0.1},
        }
    },
    "averaging": {
        kind: {"averaging": {"kind": kind}} if kind != "none" else {}
        for kind in ("none", "ema", "swa")
    },
    "objective": {
        "plain": {},
        "label smoothing": {"label_smoothing_factor": 0.1},
        "contrastive": {"contrastive": {"weight": 0.5}},
        "several data sets": {"multi_task": {"sampling": "temperature"}},
        "learned loss weights": {"multi_task": {"loss_weighting": "uncertainty"}},
    },
    # A classifier's. The rest is of a language model.
    "regularization": {
        "none": {},
        "mixup": {"mixup": {"alpha": 0.4}},
        "augmentation": {
            "augmentation": {"deletion": 0.2, "swap": 0.2, "character_noise": 0.1},
        },
    },
    "compression": {
        "none": {},
        "bf16": {"gradient_compression": {"kind": "bf16"}},
        "powersgd": {"gradient_compression": {"kind": "powersgd", "rank": 1, "start": 2}},
    },
    "curriculum": {
        "none": {},
        "loss": {"curriculum": {"by": "loss", "model": _GRADER}},
        "sequence_length": {"curriculum": {"by": "sequence_length", "over": 0.8}},
    },
    "groups": {
        "none": {},
        "layer decay": {"layer_decay": 0.7},
        "frozen": {"param_groups": [{"match": "embed_tokens", "frozen": True}]},
        "unfreezing": {"param_groups": [{"match": r"layers\.0\.", "unfreeze_at": 5}]},
    },
}
_KILLED: Final = (STEPS - 8, STEPS - 1)
"""First and last step of a kill: `strategies.train` keeps nine checkpoints."""
_STRATEGIES: Final = ("ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Combination:
    """A permitted combination, and the step after which its run is killed."""

    chosen: tuple[str, ...]
    strategy: str
    training: dict[str, Any]
    killed_at: int

    @property
    def compressed(self) -> bool:
        """Whether two ranks exchange less than complete gradients, so they learn a bit else."""
        return "gradient_compression" in self.training

    @property
    def classifies(self) -> bool:
        """Whether it trains a classifier."""
        return _classifies(self.training)

    def __str__(self) -> str:
        return f"{' + '.join((*self.chosen, self.strategy))}, killed at {self.killed_at}"


def sample(seed: int, count: int, folder: Path) -> list[Combination]:
    """Return permitted combinations, the same for the same seed.

    Args:
        folder: for a reference model.
    """
    generator, found = random.Random(seed), []
    grader = save(folder / "grader", AutoModelForCausalLM, LLAMA)
    while len(found) < count:
        chosen = tuple(generator.choice(sorted(values)) for values in _AXES.values())
        strategy = generator.choice(_STRATEGIES)
        parts = zip(_AXES.values(), chosen, strict=True)
        training = _RECIPE | {k: v for values, name in parts for k, v in values[name].items()}
        if training.get("curriculum", {}).get("model"):
            training["curriculum"] = {**training["curriculum"], "model": grader}
        if permitted(training, strategy):
            found.append(Combination(chosen, strategy, training, generator.randint(*_KILLED)))
    return found


def permitted(training: dict[str, Any], strategy: str) -> bool:
    """Return whether the compatibility table, and the task, permit a combination."""
    several = "multi_task" in training
    if several and _classifies(training):
        return False
    task = "sequence_classification" if _classifies(training) else "causal_lm"
    content: dict[str, Any] = {
        "name": "tiny",
        "data": {"source": ["x"], "task": task},
        "model": {"config": LLAMA},
    }
    if several:
        parts = {name: {"source": ["x"]} for name in ("mood", "topic")}
        content["data"] = {"task": "multi_task", "parts": parts}
        content["gate"] = {"max_slice_regression": 0.02}
    compute = {"strategy": strategy, "nproc_per_node": 2, "device": "cpu"}
    try:
        check_task(from_mapping({**content, "training": training, "compute": compute}))
    except ConfigError:
        return False
    return True


def _classifies(training: dict[str, Any]) -> bool:
    return "mixup" in training or "augmentation" in training


def train_alone(folder: Path, combination: Combination) -> dict[str, dict[int, float]]:
    """Train on this rank: from start to end, from the kill on, and with a halved micro-batch."""
    alone = {k: v for k, v in combination.training.items() if k != "gradient_compression"}
    sections: dict[str, Any] = {"training": alone, "classifies": combination.classifies}
    whole = strategies.train(folder / "whole", **sections)
    return {
        "whole": whole,
        "resumed": strategies.train(
            folder / "resumed", **sections, resume=_killed(folder, combination)
        ),
        "halved": strategies.train(folder / "halved", **sections, micro_batch=1),
    }


def train_on_two(folder: Path, combinations: list[Combination]) -> list[dict[str, Any]]:
    """Train each on two ranks from start to end, and from the kill on; return losses on rank 0."""
    on_ranks(2, _train_each, folder, tuple(combinations))
    return [
        json.loads((folder / str(number) / "losses.json").read_text())
        for number in range(len(combinations))
    ]


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two runs exported the same bits."""
    found, expected = (
        load_file(folder / "runs/tiny/model/model.safetensors") for folder in (one, other)
    )
    return found.keys() == expected.keys() and all(
        found[name].equal(expected[name]) for name in found
    )


def _killed(folder: Path, combination: Combination) -> Path:
    step = f"step-{combination.killed_at:08d}"
    return folder / "whole" / "runs" / "tiny" / "checkpoints" / step


def _train_each(folder: Path, combinations: tuple[Combination, ...]) -> None:
    for number, combination in enumerate(combinations):
        own = folder / str(number)
        sections: dict[str, Any] = {
            "training": combination.training,
            "classifies": combination.classifies,
        }
        found = {"whole": strategies.train(own / "whole", combination.strategy, **sections)}
        start = _killed(own, combination)
        found["resumed"] = strategies.train(
            own / "resumed", combination.strategy, **sections, resume=start
        )
        if os.environ["RANK"] == "0":
            (own / "losses.json").write_text(json.dumps(found))
