"""Strategies on the ranks of this world: their losses, and the checkpoints that they resume from.

Run `python strategies.py FOLDER CASES` on each rank. CASES is a file with a JSON list of cases. For
each case, rank 0 writes the losses of every step to FOLDER/<name>/losses.json: of a full run
("whole"), of a run that resumed from its own checkpoint ("resumed"), and of a run that resumed from
a single rank's checkpoint ("from_single").
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from steadytrain.components.memory import buckets
from steadytrain.components.shared.batch import REPLICATED, BatchSettings
from steadytrain.components.train.checkpoint import Checkpoint, CheckpointStore
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.reporter import Reporter
from steadytrain.components.train.loop.setup import set_up
from steadytrain.components.train.loop.training import Training

from support.training import (
    TEST_ENVIRONMENT,
    Bench,
    language_rows,
    losses_of,
    rank_command,
    write_data,
)

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
    resume: Path | None = None,
    device: str = "cpu",
    **sections: Any,
) -> dict[int, float]:
    """Train on this rank; return the losses by step on rank 0."""
    rank, world = (int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1")))
    data = write_data(folder / f"data-{rank}", language_rows(60), language_rows(7, seed=1))
    bench = Bench.make(
        folder,
        data,
        **{"training": RECIPE, **sections},
        compute={"nproc_per_node": world, "device": device},
    )
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    batch = BatchSettings(MICRO_BATCH, strategy=strategy, offload=offload)
    parts = set_up(bench.config, data, batch)
    stream = bench.workspace.stream("train") if rank == 0 else None
    store = CheckpointStore(bench.workspace.checkpoints, keep=9)
    training = Training(parts, store, Reporter(stream, 1), StopRequests(None))
    if resume is not None:
        training.resume(Checkpoint.at(resume))
    assert training.run() == "finished"
    if rank == 0:
        training.export(bench.workspace.model)
    parts.accelerator.wait_for_everyone()
    return losses_of(bench.workspace) if rank == 0 else {}


def middle(folder: Path) -> Path:
    """Return the checkpoint at half of the steps."""
    return folder / "runs" / "tiny" / "checkpoints" / f"step-{MIDDLE:08d}"


@dataclass(frozen=True)
class Case:
    """A strategy, and the folder of the single-rank run to compare it with.

    bucket: values in DeepSpeed's largest bucket; a small one makes a small model act like a large
        one.
    """

    name: str
    strategy: str
    single: str
    offload: str = "none"
    sections: dict[str, Any] = field(default_factory=dict)
    bucket: int = buckets.LARGEST_BUCKET

    def run(self, folder: Path) -> dict[str, dict[int, float]]:
        """Return the losses by step of each training run, on rank 0."""
        own = folder / self.name
        found = {"whole": self._train(own / "whole")}
        found["resumed"] = self._train(own / "resumed", middle(own / "whole"))
        found["from_single"] = self._train(own / "from_single", middle(folder / self.single))
        return found

    def _train(self, folder: Path, resume: Path | None = None) -> dict[int, float]:
        buckets.LARGEST_BUCKET = self.bucket
        return train(folder, self.strategy, self.offload, resume=resume, **self.sections)


def main(folder: Path, cases: Path) -> None:
    for content in json.loads(cases.read_text()):
        case = Case(**content)
        found = case.run(folder)
        if os.environ.get("RANK", "0") == "0":
            (folder / case.name / "losses.json").write_text(json.dumps(found))


def on_two_ranks(folder: Path, cases: Sequence[Case], site: Path | str) -> dict[str, Any]:
    """Run the cases on two ranks; return what they wrote to losses.json, by case.

    Args:
        site: folder with installed packages, for the Python path of the ranks.
    """
    file = folder / "cases.json"
    file.write_text(json.dumps([asdict(case) for case in cases]))
    done = subprocess.run(
        rank_command(2, __file__, str(folder), str(file)),
        env={**os.environ, **TEST_ENVIRONMENT, "PYTHONPATH": f"{Path(__file__).parents[1]}:{site}"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {
        case.name: json.loads((folder / case.name / "losses.json").read_text()) for case in cases
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
