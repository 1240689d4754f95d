"""Randomly sampled combinations of techniques that the compatibility table permits."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file

from steadytrain.components import techniques
from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.config.compatibility import SMALLER_MICRO_BATCH, obstacles
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import load_task
from steadytrain.components.tasks.checks import check_task

from support import strategies
from support.forked import on_ranks
from support.task_data import TASKS, data_of, model_of, write_reference
from support.training import PART_LABELS, data_sections
from support.whole_runs import RECIPE

STEPS: Final = 12
_RECIPE: Final = {
    **strategies.RECIPE,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "eval_steps": 3,
    "save_steps": 1,
    "save_total_limit": STEPS,
    # The best weights may be older than the checkpoint that a run continues from in a new folder.
    "load_best_model_at_end": False,
}
_PLAIN: Final[dict[str, dict[str, Any]]] = {
    "multi_task": {"multi_task": {"sampling": "temperature"}},
    "preference": {"dpo": {"beta": 0.5}},
    "unpaired_preference": {"kto": {"beta": 0.5}},
    "text_embedding": {"batch_contrastive": {"rows": strategies.MICRO_BATCH}},
}
"""What a task needs in `training`."""
REFERENCED: Final = [task for task in TASKS if task != "text_embedding"]
"""Tasks that something compares with a reference model."""
_KILLED: Final = (STEPS - 8, STEPS - 1)
"""First and last step of a kill: `strategies.train` keeps nine checkpoints."""
_STRATEGIES: Final = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def variants(reference: str) -> dict[str, dict[str, Any]]:
    """Return the fields of `training` that turn a technique on, by technique and variant.

    Args:
        reference: address of a teacher, which also scores the rows for a curriculum.
    """
    teacher = {"teacher": reference, "weight": 0.7}
    plateau = {"factor": 0.5, "patience": 0, "threshold": 0.1}
    changes = {"deletion": 0.2, "swap": 0.2, "character_noise": 0.1}
    return {
        "ema": {"averaging": {"kind": "ema", "export": "averaged"}},
        "swa": {"averaging": {"kind": "swa", "export": "averaged"}},
        "label smoothing": {"label_smoothing_factor": 0.1},
        "contrastive": {"contrastive": {"weight": 0.5}},
        "in-batch contrastive": {"batch_contrastive": {"rows": strategies.MICRO_BATCH}},
        "teacher": {"distillation": teacher},
        "stored answers": {"distillation": {**teacher, "top_k": 2}},
        "hidden states": {"distillation": {**teacher, "hidden": {"weight": 0.5}}},
        "learned loss weights": {"multi_task": {"loss_weighting": "uncertainty"}},
        "mixup": {"mixup": {"alpha": 0.4}},
        "augmentation": {"augmentation": changes},
        "r-drop": {"r_drop": {"weight": 1.0}},
        "focal loss": {"focal_loss": {"gamma": 2.0}},
        "class weights": {"class_weights": {"kind": "balanced"}},
        "balanced order": {"order": "balanced"},
        "fgm": {"adversarial": {"kind": "fgm"}},
        "pgd": {"adversarial": {"kind": "pgd", "steps": 2}},
        "freelb": {"adversarial": {"kind": "freelb", "steps": 2}},
        "by length": {"curriculum": {"by": "length", "over": 0.8}},
        "by loss": {"curriculum": {"by": "loss", "model": reference}},
        "by sequence length": {"curriculum": {"by": "sequence_length", "over": 0.8}},
        "layer decay": {"layer_decay": 0.7},
        "frozen": {"param_groups": [{"match": "embed_tokens|word_embed", "frozen": True}]},
        "unfreezing": {"param_groups": [{"match": r"layers?\.0\.", "unfreeze_at": 5}]},
        "bf16": {"gradient_compression": {"kind": "bf16"}},
        "powersgd": {"gradient_compression": {"kind": "powersgd", "rank": 1, "start": 2}},
        "masking": {"masking": {"probability": 0.3}},
        "spans": {"denoising": {"noise_density": 0.3}},
        "monitor": {"monitor": {"noise_scale": True, "layers": True, "every_steps": 2}},
        "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": plateau},
        "dropout": {},  # the field of `model` that each model has
    }


def _axes(reference: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the fields of `training`, by axis and technique."""
    every = variants(reference)

    def either(none: str, *names: str) -> dict[str, dict[str, Any]]:
        return {none: {}} | {name: every[name] for name in names}

    return {
        "optimizer": {
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
        | {"plateau": every["plateau"]},
        "averaging": either("not averaged", "ema", "swa"),
        "objective": either(
            "plain",
            "label smoothing",
            "contrastive",
            "in-batch contrastive",
            "teacher",
            "stored answers",
            "hidden states",
            "learned loss weights",
        ),
        "regularization": either(
            "no regularization",
            "mixup",
            "augmentation",
            "r-drop",
            "focal loss",
            "class weights",
            "balanced order",
            "fgm",
            "pgd",
            "freelb",
        ),
        "curriculum": either("no curriculum", "by length", "by loss", "by sequence length"),
        "groups": either("one group", "layer decay", "frozen", "unfreezing"),
        "compression": either("not compressed", "bf16", "powersgd"),
    }


@dataclass(frozen=True)
class Combination:
    """A permitted combination, and the step after which its run is killed.

    chosen: the name of its technique on each axis.
    """

    task: str
    chosen: tuple[str, ...]
    strategy: str
    config: RunConfig
    killed_at: int

    @property
    def drops(self) -> bool:
        """Whether it has dropout, which depends on the rank and the size of the micro-batch."""
        return bool(self.config.model.dropout.places)

    @property
    def shares(self) -> bool:
        """Whether two ranks learn what one does: no dropout, and complete gradients."""
        return not (self.drops or self.config.training.gradient_compression.on)

    @property
    def halves(self) -> bool:
        """Whether it may halve its micro-batch, and then learns the same."""
        return not (self.drops or any(obstacles(self.config, SMALLER_MICRO_BATCH)))

    @property
    def rounding(self) -> float:
        """How much losses may differ for another micro-batch, relative to their size."""
        # Muon orthogonalizes in bf16, which enlarges the rounding of a sum in another order.
        return 1e-4 if self.config.training.optim == "muon" else 1e-5

    def __str__(self) -> str:
        names = " + ".join((self.task, *self.chosen, self.strategy))
        return f"{names}, killed at {self.killed_at}"


def sample(seed: int, count: int, folder: Path, among: Sequence[str] = TASKS) -> list[Combination]:
    """Return permitted combinations, the same for the same seed. Each task is equally likely.

    Args:
        folder: for reference models.
        among: the tasks.
    """
    generator = random.Random(seed)
    wanted = [task for task in among if task in REFERENCED]
    references = {task: write_reference(task, folder / task) for task in wanted}
    tasks = [generator.choice(among) for _ in range(count)]
    return [_draw(generator, task, references.get(task, "none")) for task in tasks]


def _draw(generator: random.Random, task: str, reference: str) -> Combination:
    axes = _axes(reference)
    while True:
        chosen = tuple(generator.choice(sorted(values)) for values in axes.values())
        strategy = generator.choice(_STRATEGIES)
        training = _RECIPE | _PLAIN.get(task, {})
        for values, name in zip(axes.values(), chosen, strict=True):
            training |= values[name]
        config = _permitted(task, reference, training, strategy)
        if config is not None:
            return Combination(task, chosen, strategy, config, generator.randint(*_KILLED))


def joined(task: str, reference: str, names: Collection[str]) -> RunConfig | None:
    """Return the configuration of a task with variants of techniques; None if it is rejected."""
    every = variants(reference)
    training: dict[str, Any] = dict(_PLAIN.get(task, {}))
    for name in names:
        # Two techniques may have fields of one section.
        for section, value in every[name].items():
            both = isinstance(value, dict) and isinstance(training.get(section), dict)
            training[section] = training[section] | value if both else value
    shared = "gradient_compression" in training
    return _permitted(
        task,
        reference,
        # The best weights may be older than the kill.
        {**RECIPE, "load_best_model_at_end": False, **training},
        "ddp" if shared else "auto",
        ranks=1 + shared,
        dropout="dropout" in names,
    )


def techniques_of(config: RunConfig) -> set[str]:
    """Return the folders of `components/techniques` whose settings a configuration sets."""
    package = f"{techniques.__name__}."
    sections = (config.data, config.model, config.training)
    values = [getattr(section, name) for section in sections for name in section.model_fields_set]
    items = [one for value in values for one in (value if isinstance(value, list) else [value])]
    modules = [type(item).__module__ for item in items]
    return {
        module.removeprefix(package).partition(".")[0]
        for module in modules
        if module.startswith(package)
    }


def _permitted(
    task: str,
    reference: str,
    training: dict[str, Any],
    strategy: str,
    *,
    ranks: int = 2,
    dropout: bool = False,
) -> RunConfig | None:
    """Return the configuration; None if the compatibility table, or the task, rejects it."""
    model: dict[str, Any] = (
        {"base": reference} if load_task(task).reference else {"config": model_of(task)}
    )
    if dropout or "r_drop" in training:
        # It compares two passes that differ by their dropout.
        model["dropout"] = {"attention": 0.2}
    content = {
        "name": "tiny",
        **data_sections(task, PART_LABELS),
        "model": model,
        "training": training,
        "compute": {"strategy": strategy, "nproc_per_node": ranks, "device": "cpu"},
    }
    try:
        config = from_mapping(content)
        check_task(config)
    except ConfigError:
        return None
    return config


def train_alone(folder: Path, combination: Combination) -> dict[str, dict[int, float]]:
    """Train on this rank: from start to end, from the kill on, and with a halved micro-batch."""
    sections = sections_of(combination.config)
    sections["training"].pop("gradient_compression", None)
    sections["data"] = data_of(combination.task, folder / "data")
    found = {
        "whole": strategies.train(folder / "whole", **sections),
        "resumed": strategies.train(
            folder / "resumed", **sections, resume=_killed(folder, combination)
        ),
    }
    if combination.halves:
        found["halved"] = strategies.train(folder / "halved", **sections, micro_batch=1)
    return found


def train_on_two(folder: Path, combinations: list[Combination]) -> list[dict[str, Any]]:
    """Train each on two ranks from start to end, and from the kill on; return losses on rank 0."""
    for number, combination in enumerate(combinations):
        data_of(combination.task, folder / str(number) / "data").save(
            folder / str(number) / "data.json"
        )
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


def sections_of(config: RunConfig) -> dict[str, Any]:
    """Return what a configuration sets of the model and the training."""
    content = config.model_dump(mode="json", exclude_unset=True)
    return {name: content[name] for name in ("model", "training")}


def _killed(folder: Path, combination: Combination) -> Path:
    step = f"step-{combination.killed_at:08d}"
    return folder / "whole" / "runs" / "tiny" / "checkpoints" / step


def _train_each(folder: Path, combinations: tuple[Combination, ...]) -> None:
    for number, combination in enumerate(combinations):
        try:
            found = _train_shared(folder / str(number), combination)
        except Exception as error:
            error.add_note(str(combination))
            raise
        if os.environ["RANK"] == "0":
            (folder / str(number) / "losses.json").write_text(json.dumps(found))


def _train_shared(folder: Path, combination: Combination) -> dict[str, dict[int, float]]:
    sections = {**sections_of(combination.config), "data": DataRecord.load(folder / "data.json")}
    strategy = combination.strategy
    return {
        "whole": strategies.train(folder / "whole", strategy, **sections),
        "resumed": strategies.train(
            folder / "resumed", strategy, **sections, resume=_killed(folder, combination)
        ),
    }
