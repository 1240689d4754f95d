"""The product as users run it: the command, the full DAG, small real data."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.pause import Pause

COMPILED = f"torchinductor_{getpass.getuser()}"
"""The folder in TMPDIR where torch keeps compiled code for all processes of a user."""
_TRAIN = """
import json, sys
from steadytrain.components.shared.config import load
from steadytrain.pipelines.steps import run_step
config = load(sys.argv[1], json.loads(sys.argv[2]))
for step in ("preprocess", "train"):
    run_step(step, config)
"""
"""Prepare data and train, without the later steps."""
TINY_MODEL = (
    "model.vocab_size=600",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=4",
)
TINY_RUN = (
    # With more, the threads of concurrent tests wait for each other.
    "compute.threads_per_rank=1",
    "training.max_steps=6",
    "training.global_batch_size=4",
    "training.eval_steps=3",
    "training.save_steps=3",
    "training.logging_steps=1",
    "evaluation.max_examples=12",
    "evaluation.bootstrap_samples=200",
    # Six steps teach a model next to nothing.
    "gate.beat_baseline=false",
    "gate.min_units=2",
)
TINY_LM = (
    "data.source=[package:json,package:email,package:logging,package:http]",
    "data.test_share=0.25",
    "data.validation_share=0.15",
    "data.sequence_length=64",
    *TINY_MODEL,
    *TINY_RUN,
)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    output: Path

    @property
    def runs(self) -> list[Path]:
        return sorted((self.output / "runs").glob("*"))


@dataclass(frozen=True)
class Command:
    """`steadytrain` in its own folder."""

    output: Path

    def __call__(self, *arguments: object, sets: tuple[str, ...] = (), **environment: str) -> Done:
        done = subprocess.run(
            self.line(*arguments, sets=sets),
            capture_output=True,
            text=True,
            cwd=self.output.parent,
            env=self.environment(**environment),
            timeout=800,
        )
        return Done(done.returncode, done.stdout, done.stderr, self.output)

    def run(self, source: object, *sets: str, **environment: str) -> Done:
        return self("run", source, "--output", self.output, sets=sets, **environment)

    def train(self, source: object, *sets: str, **environment: str) -> Done:
        """Prepare data and train in one process, for a test that reads no later step's record."""
        overrides = json.dumps([*sets, f"output={self.output}"])
        done = subprocess.run(
            [sys.executable, "-c", _TRAIN, str(source), overrides],
            capture_output=True,
            text=True,
            cwd=self.output.parent,
            env=self.environment(**environment),
            timeout=800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Done(done.returncode, done.stdout, done.stderr, self.output)

    def start(self, source: object, *sets: str, **environment: str) -> subprocess.Popen[str]:
        """Start a run, and do not wait for it."""
        return self.begin("run", source, sets=sets, **environment)

    def pause(self, step: int, *, stoppable: bool = False) -> Pause:
        """Pause a run, which gets the variables in `everywhere`, at a checkpoint."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        return Pause(self.output.parent / "pause", step, stoppable=stoppable)

    def begin(
        self, *arguments: object, sets: tuple[str, ...], **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command that writes runs, and do not wait for it."""
        return subprocess.Popen(
            self.line(*arguments, "--output", self.output, sets=sets),
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.output.parent,
        )

    def line(self, *arguments: object, sets: tuple[str, ...] = ()) -> list[str]:
        options = [text for item in sets for text in ("--set", item)]
        program = [sys.executable, "-m", "steadytrain.pipelines.cli"]
        return [*program, *map(str, arguments), *options]

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def finish(program: subprocess.Popen[str], seconds: float = 600) -> str:
    """Wait for a program that was started, and return its output; fail if it fails."""
    out, err = program.communicate(timeout=seconds)
    assert program.returncode == 0, out + err
    return out


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    """Wait until the condition holds; fail if it doesn't within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def paused_rank(pause: Pause, program: subprocess.Popen[str]) -> psutil.Process:
    """Wait until a rank of a program is paused, and return it."""

    def rank() -> int | None:
        assert program.poll() is None, program.communicate()
        return pause.pid()

    wait_for(rank)
    return psutil.Process(pause.pid())


def kill_paused(pause: Pause, program: subprocess.Popen[str], then: int | None = None) -> None:
    """Send SIGKILL to a program's rank once it is paused; pause the next one at a later step."""
    killed = paused_rank(pause, program)
    killed.kill()

    def dead() -> bool:
        try:
            return killed.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(dead)
    pause.set(then)
