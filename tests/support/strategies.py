"""Strategies on the ranks of a world: their losses, and the checkpoints that they resume from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from steadytrain.components.memory import states
from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.train.checkpoint import Checkpoint, CheckpointStore
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.reporter import Reporter
from steadytrain.components.train.loop.setup import set_up
from steadytrain.components.train.loop.training import Training

from support.forked import on_ranks
from support.training import Bench, language_rows, losses_of, write_data

STEPS, MIDDLE, GLOBAL_BATCH, MICRO_BATCH = 20, 10, 8, 2
RECIPE = {
    "global_batch_size": GLOBAL_BATCH,
    "max_steps": STEPS,
    "learning_rate": 5e-3,
    "warmup_steps": 0.1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "seed": 3,
    "logging_steps": 1,
    "eval_steps": MIDDLE,
    "save_steps": MIDDLE,
    "save_total_limit": 9,
}


def train(
    folder: Path,
    strategy: str = REPLICATED,
    offload: str = "none",
    *,
    micro_batch: int = MICRO_BATCH,
    resume: Path | None = None,
    device: str = "cpu",
    resumed: Callable[[Training], None] | None = None,
    data: DataRecord | None = None,
    **sections: Any,
) -> dict[int, float]:
    """Train on this rank; return the losses by step on rank 0.

    Args:
        resumed: called with what was restored, before training.
        data: prepared data that the ranks share. None writes a language model's for each rank.
    """
    rank, world = (int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if data is None:
        data = write_data(folder / f"data-{rank}", language_rows(60), language_rows(7, seed=1))
    bench = Bench.make(
        folder,
        data,
        **{
            "training": RECIPE,
            "compute": {"nproc_per_node": world, "device": device},
            **sections,
        },
    )
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    batch = BatchSettings(micro_batch, strategy=strategy, offload=offload)
    parts = set_up(bench.config, data, batch)
    stream = bench.workspace.stream("train") if rank == 0 else None
    store = CheckpointStore(bench.workspace.checkpoints, keep=9)
    training = Training(parts, store, Reporter(stream, 1), StopRequests(None))
    if resume is not None:
        training.resume(Checkpoint.at(resume))
    if resumed is not None:
        resumed(training)
    assert training.run() == "finished"
    if rank == 0:
        training.export(bench.workspace.model)
    parts.accelerator.wait_for_everyone()
    return losses_of(bench.workspace) if rank == 0 else {}


def go_on(folder: Path, checkpoint: Path, sections: dict[str, Any]) -> None:
    """Continue on these ranks with DDP; write what rank 0 restored of compression, and its losses.

    The file `found.json` has the names of the restored tensors, the settings, and the losses.
    """
    restored: dict[str, Any] = {}

    def look(training: Training) -> None:
        strategy = training.parts.strategy
        tensors = [piece.name for piece in strategy.pieces().get("compression", [])]
        restored.update(tensors=tensors, settings=strategy.settings().get("compression"))

    found = train(folder, "ddp", resume=checkpoint, resumed=look, **sections)
    if found:
        (folder / "found.json").write_text(json.dumps({**restored, "losses": found}))


def middle(folder: Path) -> Path:
    """Return the checkpoint at half of the steps."""
    return folder / "runs" / "tiny" / "checkpoints" / f"step-{MIDDLE:08d}"


@dataclass(frozen=True)
class Case:
    """A strategy, and the folder of the single-rank run to compare it with.

    bucket: values in DeepSpeed's largest bucket; a small one makes a small model act like a large
        one.
    resumes: whether it also resumes, from its own checkpoint and from the single rank's.
    """

    name: str
    strategy: str
    single: str
    offload: str = "none"
    sections: dict[str, Any] = field(default_factory=dict)
    bucket: int = states.LARGEST_BUCKET
    resumes: bool = True

    def run(self, folder: Path) -> dict[str, dict[int, float]]:
        """Return the losses by step of each training run, on rank 0.

        "whole" trains from start to end, "resumed" from its checkpoint in the middle, and
        "from_single" from the one of the single rank.
        """
        own = folder / self.name
        found = {"whole": self._train(own / "whole")}
        if self.resumes:
            found["resumed"] = self._train(own / "resumed", middle(own / "whole"))
            found["from_single"] = self._train(own / "from_single", middle(folder / self.single))
        return found

    def losses(self, folder: Path) -> Path:
        """Return the file that rank 0 writes what `run` returned to."""
        return folder / self.name / "losses.json"

    def _train(self, folder: Path, resume: Path | None = None) -> dict[int, float]:
        states.LARGEST_BUCKET = self.bucket
        return train(folder, self.strategy, self.offload, resume=resume, **self.sections)


def on_two_ranks(folder: Path, cases: Sequence[Case], site: Path | str) -> dict[str, Any]:
    """Run the cases on two ranks; return the losses by case, training run and step.

    Args:
        site: folder with installed packages, for the Python path of the ranks.
    """
    on_ranks(2, _run_cases, folder, tuple(cases), str(site))
    return {case.name: json.loads(case.losses(folder).read_text()) for case in cases}


def _run_cases(folder: Path, cases: Sequence[Case], site: str) -> None:
    sys.path.insert(0, site)
    for case in cases:
        found = case.run(folder)
        if os.environ["RANK"] == "0":
            case.losses(folder).write_text(json.dumps(found))
