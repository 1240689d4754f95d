"""The cost of a fault, compared with Transformers' Trainer: out of memory, kills, a rank's death.

Both get the same model, rows, steps and faults. Each runs as a separate program, one after another
in each round. Run with `pytest -m bench tests/bench/test_recovery_cost.py -s` on an idle machine.
Set the size with STEADYTRAIN_BENCH_STEPS and STEADYTRAIN_BENCH_ROUNDS.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.attempt import AttemptFolder, Beat

from support.disturbances import Shortage
from support.times import told_spans
from support.training import Bench, events_of, packed_row, write_data

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
STEPS = int(os.environ.get("STEADYTRAIN_BENCH_STEPS", "120"))
ROUNDS = int(os.environ.get("STEADYTRAIN_BENCH_ROUNDS", "3"))
BATCH, LENGTH, SEED = 8, 160, 42
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "vocab_size": 16_000,
}
PEER = Path(__file__).parents[1] / "support" / "peer.py"
SUPERVISE = """
import sys
from steadytrain.components.shared.config import load
from steadytrain.components.train.step import run
assert run(load(sys.argv[1])).succeeded
"""


@dataclass
class Contender:
    """A training run as a program, seen from outside.

    start: starts the program; called again for a restart.
    told: returns the number of steps reported so far.
    pid: returns the PID of the process that trains.
    restarted: whether to restart the program when it exits with an error.
    """

    start: Callable[[], subprocess.Popen[bytes]]
    told: Callable[[], int]
    pid: Callable[[], int]
    restarted: bool = False
    seconds: float = 0.0
    faults: list[int] = field(default_factory=list)

    def run(self, faults: Mapping[int, Callable[[int], None]]) -> float:
        """Return the wall-clock seconds of the run.

        Inject each fault into the training process once its step has been reported. If the fault
        also ends the program and `restarted` is set, start it again at once.
        """
        left, began = dict(sorted(faults.items())), time.monotonic()
        program = self.start()
        try:
            while (status := program.poll()) != 0:
                if status is not None:
                    assert self.restarted, f"it ended with {status}"
                    program = self.start()
                step = next(iter(left), None)
                if step is not None and self.told() >= step:
                    left.pop(step)(self.pid())
                time.sleep(0.02)
            assert not left, "it ended before its faults"
            return time.monotonic() - began
        finally:
            program.kill()
            program.wait()


def ours(folder: Path, name: str, rows: np.ndarray, **training: object) -> tuple[Bench, Contender]:
    generator = np.random.default_rng(0)
    packed = [packed_row([LENGTH], generator) | {"input_ids": row.tolist()} for row in rows]
    data = write_data(folder / "data", packed, [], sequence_length=LENGTH)
    bench = Bench.make(
        folder / "output",
        data,
        run=name,
        model={"config": MODEL},
        training={
            "max_steps": STEPS,
            "global_batch_size": BATCH,
            "micro_batch_size": BATCH,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "seed": SEED,
            **training,
        },
        compute={"device": "cpu", "threads_per_rank": 1},
    )
    workspace = bench.workspace
    workspace.create()
    workspace.config.write_text(bench.config.to_yaml())
    bench.data.save(workspace.record("preprocess"))
    cursor, steps = Cursor(workspace.events), [0]

    def told() -> int:
        steps[0] = max([steps[0], *(e.step for e in cursor.new() if isinstance(e, TrainingStep))])
        return steps[0]

    def pid() -> int:
        last = max(workspace.attempts.iterdir())
        beat = Beat.read(AttemptFolder(last).heartbeat(0))
        assert beat
        return beat.pid

    line = [sys.executable, "-c", SUPERVISE, str(workspace.config)]
    log = (folder / f"{name}.log").open("wb")
    return bench, Contender(lambda: subprocess.Popen(line, stdout=log, stderr=log), told, pid)


def trainer(folder: Path, name: str, rows: np.ndarray, **arguments: object) -> Contender:
    place = folder / name
    place.mkdir(parents=True)
    np.save(place / "rows.npy", rows)
    arguments = {"per_device_train_batch_size": BATCH, "learning_rate": 1e-3, **arguments}
    (place / "peer.json").write_text(
        json.dumps({"model": MODEL, "seed": SEED, "arguments": arguments})
    )
    log, programs = (folder / f"{name}.log").open("wb"), []

    def start() -> subprocess.Popen[bytes]:
        programs.append(subprocess.Popen([sys.executable, str(PEER), str(place)], stderr=log))
        return programs[-1]

    def told() -> int:
        return max((step for step, *_ in peer_lines(place)), default=0)

    return Contender(start, told, lambda: programs[-1].pid, restarted=True)


def peer_lines(place: Path) -> list[list[float]]:
    with contextlib.suppress(FileNotFoundError):
        whole = (place / "told").read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]
    return []


def rows_in_order() -> tuple[np.ndarray, np.ndarray]:
    """Return the rows as stored, and in the order that steadytrain trains on them."""
    rows = np.random.default_rng(1).integers(2, 64, size=(STEPS * BATCH, LENGTH))
    return rows, rows[RowOrder(len(rows), SEED).take(0, len(rows))]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def table(title: str, found: Mapping[str, Sequence[float]], unit: str = "s") -> dict[str, float]:
    """Print medians and ranges; return the medians."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"\n{title}, median of {len(next(iter(found.values())))} rounds (range):")
    for name, values in found.items():
        told = f"{medians[name]:.2f} {unit} ({min(values):.2f} to {max(values):.2f})"
        print(f"  {name:<44} {told}")
    return medians


class Later:
    """Measures a process's memory at one step, and limits it from a later step on."""

    def __init__(self) -> None:
        self.shortage = Shortage()

    def faults(self) -> dict[int, Callable[[int], None]]:
        measure = partial(self.shortage.measure, seconds=3)
        return {STEPS // 3: measure, STEPS * 3 // 4: self.shortage.keep}


def test_cost_of_an_oom_at_three_quarters(tmp_path: Path) -> None:
    """Limit the address space of both from outside; Trainer recovers with auto_find_batch_size."""
    rows, ordered = rows_in_order()
    saving = {"save_steps": max(1, STEPS // 40)}
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, plain = ours(folder, "undisturbed", rows, **saving)
        undisturbed = plain.run({})
        bench, contender = ours(folder, "short", rows, **saving)
        short = contender.run(Later().faults())
        (decision,) = events_of(bench.workspace, DecisionMade)
        assert (decision.action, decision.batch.micro_batch_size) == ("repeat_step", BATCH // 2)
        steps = [event.step for event in events_of(bench.workspace, TrainingStep)]
        assert steps == list(range(1, STEPS + 1)), "no step was trained twice"
        finding = {"auto_find_batch_size": True, "save_strategy": "no"}
        theirs = trainer(folder, "peer-undisturbed", ordered, **finding).run({})
        their_short = trainer(folder, "peer-short", ordered, **finding).run(Later().faults())
        sizes = [int(size) for *_, size in peer_lines(folder / "peer-short")]
        last = max(index for index in range(1, len(sizes)) if sizes[index] != sizes[index - 1])
        assert sum(sizes[last:]) >= len(rows)
        note("steadytrain: undisturbed", undisturbed)
        note("auto_find_batch_size: undisturbed", theirs)
        note("steadytrain: wall / undisturbed", short / undisturbed)
        note("auto_find_batch_size: wall / undisturbed", their_short / theirs)
    table(f"out of memory at 75 % of {STEPS} steps", found, "")


def test_cost_of_three_kills(tmp_path: Path) -> None:
    """Restart Trainer immediately after each kill, as a shell loop would; it resumes."""
    rows, ordered = rows_in_order()
    every = max(2, STEPS // 12)
    kills = {quarter * STEPS // 4 // every * every + every // 2: kill for quarter in (1, 2, 3)}
    found: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        walls = {}
        for name, faults in (("undisturbed", {}), ("killed", kills)):
            bench, contender = ours(folder, name, rows, save_steps=every)
            walls[f"steadytrain {name}"] = contender.run(faults)
            assert max(event.step for event in events_of(bench.workspace, TrainingStep)) == STEPS
            peer = trainer(folder, f"peer-{name}", ordered, save_strategy="steps", save_steps=every)
            walls[f"Trainer {name}"] = peer.run(faults)
            assert peer.told() == STEPS
        for name in ("steadytrain", "Trainer"):
            wasted = walls[f"{name} killed"] - walls[f"{name} undisturbed"]
            found.setdefault(f"{name}: undisturbed", []).append(walls[f"{name} undisturbed"])
            found.setdefault(f"{name}: wasted by three kills", []).append(wasted)
        waited = sum(span.seconds for span in told_spans(bench.workspace) if span.kind == "waiting")
        found.setdefault("steadytrain: of that, waits between attempts", []).append(waited)
    medians = table(f"three SIGKILLs in {STEPS} steps, saved every {every}", found)
    ratio = (
        medians["steadytrain: wasted by three kills"] / medians["Trainer: wasted by three kills"]
    )
    print(f"  wasted, ours over Trainer's: {ratio:.2f}")


def parts_of_a_restart(folder: Path, rows: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yield the phases between a rank's death and the first new step, from the recorded times."""
    bench, contender = ours(folder, "killed", rows, save_steps=5)
    killed: list[float] = []

    def note(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        killed.append(time.time())

    rank: dict[str, float] = {}

    def look() -> int:
        """Record when the rank of the second attempt sent its first heartbeat."""
        path = AttemptFolder(bench.workspace.attempts / "0002").heartbeat(0)
        if not rank and Beat.read(path):
            rank.update(lives=path.stat().st_mtime)
        return told()

    told, contender.told = contender.told, look
    contender.run({STEPS // 2 + 2: note, STEPS: lambda _: None})
    workspace = bench.workspace
    ended = events_of(workspace, AttemptEnded)[0].time
    begun = events_of(workspace, AttemptStarted)[1].time
    ready = events_of(workspace, TrainingStarted)[1].time
    first = next(event.time for event in events_of(workspace, TrainingStep) if event.attempt == 2)
    moments = {
        "found, and the group taken down": (killed[0], ended),
        "decided, and waited (recovery.backoff_seconds)": (ended, begun),
        "agent and rank, until it gives a sign of life": (begun, rank["lives"]),
        "rank: model, checkpoint": (rank["lives"], ready),
        "first step": (ready, first),
        "in all": (killed[0], first),
    }
    for name, (start, end) in moments.items():
        yield name, end - start


def test_time_from_a_ranks_death_to_the_next_step(tmp_path: Path) -> None:
    rows, _ = rows_in_order()
    found: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, seconds in parts_of_a_restart(folder, rows):
            found.setdefault(name, []).append(seconds)
        assert all(value > 0 for values in found.values() for value in values)
    table("from the death of the rank to the first new step", found)
