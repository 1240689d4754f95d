"""Transformers' Trainer as a program: `python peer.py FOLDER`, configured by FOLDER/peer.json.

For each step, it appends a line to FOLDER/told: the step, its time, its loss.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Tells(TrainerCallback):
    """Writes down each step, like our events."""

    def __init__(self, path: Path) -> None:
        self.handle = path.open("a", buffering=1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            line = [state.global_step, time.time(), logs["loss"], state.train_batch_size]
            self.handle.write(json.dumps(line) + "\n")


def main(folder: Path) -> None:
    given = json.loads((folder / "peer.json").read_text())
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    set_seed(given["seed"])
    # The rows are already in the order that our loop uses.
    Trainer(
        model=AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**given["model"]), dtype=torch.float32
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Tells(folder / "told")],
        args=TrainingArguments(
            str(folder / "trainer"),
            **given["arguments"],
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
    ).train(resume_from_checkpoint=any(folder.glob("trainer/checkpoint-*")) or None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
