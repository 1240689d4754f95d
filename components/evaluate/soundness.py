"""Check a checkpoint or an exported model: its files, its tensors, and the loss that it gives."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.evaluate.scoring import judged_records, score_candidate
from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.digest import beside_weights, weights_digest
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.records import DataRecord, EvaluationRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.train.checkpoint import Checkpoint, CheckpointDamaged
from steadytrain.components.train.checkpoint.checkpoint import is_of_a_step
from steadytrain.components.train.checkpoint.manifest import COMMIT

_LOSS_CLOSE: Final = 1e-4
"""Difference of two losses, relative to them. Another batch size or processor rounds otherwise."""
_HALF_CLOSE: Final = 1e-2
"""The same with 16-bit precision."""
_DOES_NOT_LOAD: Final = (
    *(SteadytrainError, ArithmeticError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""What libraries raise for a damaged configuration, tokenizer or file of weights."""
_SAFETENSORS, _INDEX = "*.safetensors", "*.safetensors.index.json"


@dataclass
class Soundness:
    """What was checked, and what is wrong.

    passed: one sentence for each check that found nothing.
    skipped: why a check was not possible.
    problems: each names a file, a tensor, or the loss.
    """

    subject: str
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, found: list[str], passed: str) -> None:
        """Add problems or, without any, a check that has passed."""
        self.problems += found
        self.passed += [] if found else [passed]


def check(address: str) -> Soundness:
    """Check a checkpoint or the folder of a model.

    Raises:
        BadInput: it is neither, or a checkpoint whose folder has another name; or files of it were
            removed meanwhile.
        StorageError: storage failed.
    """
    if is_of_a_step(address.rstrip("/").rpartition("/")[2]):
        return check_checkpoint(Checkpoint.at(address.rstrip("/")))
    folder = Path(address)
    if (folder / COMMIT).is_file() or any(folder.glob("*-manifest.json")):
        raise BadInput(
            f"{folder}: is a checkpoint, but not in a folder with the name of its step",
            remedy="name the folder as it was in the run, for example step-00000100",
        )
    try:
        below = (*folder.glob("*"), *folder.glob("*/*"))
        step = next((path for path in below if is_of_a_step(path.name)), None)
        if step is not None:
            raise BadInput(
                f"{folder}: has checkpoints below it, and is none itself",
                remedy=f"name one, such as {step}, or the run's folder model",
            )
        return check_model(folder)
    except FileNotFoundError as error:
        raise BadInput(
            f"{folder}: {error.filename} was removed while it was checked",
            remedy="check it again when nothing else writes there",
        ) from error


def check_checkpoint(checkpoint: Checkpoint) -> Soundness:
    """Check the files of a checkpoint, its tensors, and the validation loss of its step."""
    result = Soundness(str(checkpoint))
    try:
        damage = checkpoint.damage()
    except CheckpointDamaged as error:
        result.problems.append(error.message)
        return result
    files = checkpoint.manifest.files
    result.note(
        [f"{name}: {what}" for name, what in damage.items()],
        f"{len(files)} files have the sizes and digests that were written",
    )
    result.note(
        list(_torn(checkpoint, damage)),
        f"the slices of {len(checkpoint.manifest.tensors)} tensors are complete",
    )
    result.note(list(_not_finite(checkpoint, damage)), "all values are finite")
    if not result.problems:
        _compare_validation(checkpoint, result)
    return result


def _torn(checkpoint: Checkpoint, damage: Mapping[str, str]) -> Iterator[str]:
    for tensor in checkpoint.manifest.tensors:
        held = sum(math.prod(item.shape) for item in tensor.slices)
        if held != math.prod(tensor.shape):
            yield f"{tensor.name}: has {held} of {math.prod(tensor.shape)} elements"
        yield from (
            f"{tensor.name}: part of it is in {item.file}, which is damaged"
            for item in tensor.slices
            if item.file in damage
        )


def _not_finite(checkpoint: Checkpoint, damage: Mapping[str, str]) -> Iterator[str]:
    tensors = checkpoint.manifest.tensors
    broken = {item.name for item in tensors if any(piece.file in damage for piece in item.slices)}
    for part in dict.fromkeys(item.name.partition("/")[0] for item in tensors):
        if any(name.startswith(f"{part}/") for name in broken):
            continue
        try:
            content = checkpoint.tensors(part)
        except CheckpointDamaged as error:
            yield error.message
            continue
        yield from (f"{part}/{problem}" for problem in _without_finite_values(content))


def _without_finite_values(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, values in tensors.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            yield f"{name}: {count} of {values.numel()} values are NaN or infinite"


def _compare_validation(checkpoint: Checkpoint, found: Soundness) -> None:
    """Load a checkpoint into a new model, and compare its validation loss with the run's."""
    run = _run_around(checkpoint.address)
    if run is None:
        found.skipped.append("loss: the checkpoint is not in the folder of a run")
        return
    config, workspace = run
    step = checkpoint.step
    losses = [
        event.metrics["loss"]
        for event in read_events(workspace.events)
        if isinstance(event, Validated) and event.step == step and "loss" in event.metrics
    ]
    if not losses:
        found.skipped.append(f"loss: step {step} was not validated in this run")
        return
    if config.model.framework != "pytorch" or config.training.components:
        found.skipped.append("loss: another framework, or a package's component, holds the weights")
        return
    try:
        loss = _validation_loss(config, workspace, checkpoint)
    except CheckpointDamaged as error:
        found.problems.append(error.message)
        return
    _compare(found, "validation loss", loss, losses[-1], config)


def _validation_loss(config: RunConfig, workspace: Workspace, checkpoint: Checkpoint) -> float:
    from steadytrain.components.train.loop.setup import set_up
    from steadytrain.components.train.loop.validation import evaluated_weights, validate

    content = config.model_dump()
    content["compute"] |= {"strategy": "auto", "nodes": 1, "nproc_per_node": 1, "offload": "none"}
    content["training"]["gradient_compression"] = {}
    content["recovery"]["min_nodes"] = None
    local_config = RunConfig.model_validate(content)
    micro = local_config.training.micro_batch or 1
    data = DataRecord.load(workspace.record("preprocess"))
    parts = set_up(local_config, data, BatchSettings(micro, strategy=REPLICATED))
    parts.strategy.restore(checkpoint, checkpoint.state())
    with evaluated_weights(parts.strategy, local_config.training):
        return float(validate(parts)["loss"])


def _compare(found: Soundness, what: str, loss: float, recorded: float, config: RunConfig) -> None:
    half = config.training.bf16 or config.training.fp16
    close = _HALF_CLOSE if half else _LOSS_CLOSE
    same = math.isclose(loss, recorded, rel_tol=close, abs_tol=close)
    text = f"the reloaded model's {what} is {loss:.6g}, and the run recorded {recorded:.6g}"
    found.note([] if same else [text], text)


def check_model(folder: Path) -> Soundness:
    """Check the files of an exported model, its tensors, and its loss on the run's test side."""
    result = Soundness(str(folder))
    if list(folder.rglob(_INDEX)):
        result.note(list(_of_index(folder)), "no shard is missing")
    if list(folder.rglob(_SAFETENSORS)):
        passed = "all files of weights can be read, and values are finite"
        result.note(list(_of_files(folder)), passed)
    run = _run_around(str(folder / "model"))
    record = None if run is None else run[1].record("train")
    if run is None or record is None or not record.is_file():
        if not list(folder.rglob(_SAFETENSORS)):
            raise BadInput(
                f"{folder}: has no weights in the safetensors format, and no run around it",
                remedy="give a checkpoint, the folder model of a run, or a Transformers model",
            )
        result.skipped.append("digests and loss: the model is not in the folder of a run")
        if not result.problems:
            _load_alone(folder, result)
        return result
    config, workspace = run
    trained = TrainRecord.load(record)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob(_SAFETENSORS))
    same = weights_digest(folder) == trained.weights_digest
    changed = f"{' or '.join(files) or folder.name}: differs from what the train step wrote"
    result.note([] if same else [changed], "the weights have the digest that the train step wrote")
    now = beside_weights(folder)
    others = [
        f"{name}: {'differs from what the train step wrote' if name in now else 'is missing'}"
        for name, digest in trained.files.items()
        if now.get(name) != digest
    ]
    if trained.files:
        result.note(others, f"{len(trained.files)} other files have the digests of the train step")
    if not result.problems:
        _compare_test(config, workspace, folder, result)
    return result


def _load_alone(folder: Path, found: Soundness) -> None:
    """Load a model with the class that its configuration names, and none of the model's code."""
    import transformers

    config = folder / "config.json"
    try:
        content = json.loads(config.read_bytes()) if config.is_file() else {}
        named = str(next(iter(content.get("architectures") or [""])))
    except (ValueError, TypeError, AttributeError):
        found.problems.append(f"{config.name}: is not the configuration of a model")
        return
    auto = getattr(transformers, named, None)
    if auto is None or not hasattr(auto, "from_pretrained"):
        found.skipped.append("loading: config.json names no class of Transformers")
        return
    try:
        _, info = auto.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except _DOES_NOT_LOAD as error:
        found.problems.append(f"{folder.name}: does not load ({error})")
        return
    lacking = sorted(info["missing_keys"])
    found.note([f"{name}: is missing" for name in lacking], f"the model loads as {named}")


def _of_index(folder: Path) -> Iterator[str]:
    """Yield the shards that an index names and that are missing."""
    for index in folder.rglob(_INDEX):
        try:
            shards = Counter(map(str, json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield f"{index.relative_to(folder)}: is not an index of shards"
            continue
        for name, tensors in shards.items():
            if not (index.parent / name).is_file():
                yield f"{name}: is missing; it has {tensors} tensors"


def _of_files(folder: Path) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.rglob(_SAFETENSORS)):
        name = path.relative_to(folder).as_posix()
        try:
            with safe_open(path, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118  not a mapping
                    tensor = {key: content.get_tensor(key)}
                    yield from (f"{name}: {item}" for item in _without_finite_values(tensor))
        except (SafetensorError, OSError) as error:
            yield f"{name}: cannot be read ({error})"


def _compare_test(config: RunConfig, workspace: Workspace, folder: Path, found: Soundness) -> None:
    """Load a model as the evaluate step does, and compare its loss on the test side."""
    data = DataRecord.load(workspace.record("preprocess"))
    task = OpenTask(config, data)
    if not workspace.record("evaluate").is_file():
        try:
            task.packager.load_exported(folder)
        except _DOES_NOT_LOAD as error:
            found.problems.append(f"{folder.name}: does not load ({error})")
            return
        found.passed.append("the model loads")
        found.skipped.append("loss: the run has no evaluation")
        return
    recorded = EvaluationRecord.load(workspace.record("evaluate")).metrics.get("loss")
    records = judged_records(config, data)
    try:
        scores, _ = score_candidate(config, task, folder, records, lambda _: None)
    except _DOES_NOT_LOAD as error:
        found.problems.append(f"{folder.name}: does not load, or cannot be scored ({error})")
        return
    found.passed.append("the model loads")
    if recorded is None:
        found.skipped.append("loss: the run's evaluation has none")
        return
    loss = point_values(Scores.of(scores))["loss"]
    _compare(found, "test loss", loss, recorded.value, config)


def _run_around(address: str) -> tuple[RunConfig, Workspace] | None:
    """Return the run whose folder has a checkpoint or a model, two levels up; None without one."""
    folder = Path(address).absolute().parent.parent
    if not (folder / "config.yaml").is_file() or "://" in address:
        return None
    config = load(folder / "config.yaml")
    content = {"output": str(folder.parent.parent), "run": folder.name}
    moved = config.model_copy(update=content)
    return moved, Workspace.of(moved)
