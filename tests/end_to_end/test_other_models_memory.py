"""Out of memory while another model works on the training rows, before the first step."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoModelForCausalLM

from steadytrain.components.report.explain import explain
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import render
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    BatchSplit,
    DecisionMade,
)

from support.forked import ForkedLauncher, train
from support.scoring import save
from support.selected import each
from support.training import Bench, events_of, language_rows, losses_of, write_data

LENGTH = 384
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
OTHER = {**SMALL, "hidden_size": 32, "num_hidden_layers": 1}
WIDE = 12_288
"""The widest values of the layer, three for each token, take up to 57 MB for a row. The memory that
a process needs besides varies by up to 128 MB, which the C library sets aside for threads."""
WIDEST = 98_304
"""A value of a row takes more than the 64 MB that the C library has set aside for a thread."""
SPARE = {"scoring": 900_000_000, "answering": 430_000_000}
"""Bytes for a pass: less than a batch needs, and more than half of it does."""
ROWS = {"scoring": (21, 11), "answering": (10, 5)}
"""Rows of a batch, and of its larger half."""
FIELDS = {"scoring": "training.curriculum.model", "answering": "training.distillation.teacher"}
WORK = {"scoring": "scoring the training rows", "answering": "storing the teacher's answers"}
both = pytest.mark.parametrize("kind", ["scoring", "answering"])


def start(folder, name, kind, *, ranks=1, micro=4, count=24, inner=WIDE, **environment):
    """Train a run on data of its own; return the run and its outcome."""
    fields = {**OTHER, "intermediate_size": inner}
    model = save(folder / f"wide-{inner}", AutoModelForCausalLM, fields)
    rows = language_rows(count)
    for row in rows:
        times = LENGTH // len(row["input_ids"])
        for column in ("input_ids", "targets", "lengths"):
            row[column] = row[column] * times
    # Of its own, because the answers lie beside the data.
    task = "support.faults:LittleMemory"
    data = write_data(folder / name / "data", rows, [], task=task, sequence_length=LENGTH)
    added = {"curriculum": {"by": "loss", "model": model}}
    if kind == "answering":
        added = {"distillation": {"teacher": model, "top_k": 4}}
    bench = Bench.make(
        folder / name / "output",
        data,
        run=name,
        model={"config": SMALL},
        training={
            "max_steps": 3,
            "global_batch_size": 8,
            "logging_steps": 1,
            "micro_batch_size": micro,
            **added,
        },
        compute={"device": "cpu", "nproc_per_node": ranks, "threads_per_rank": 1},
        recovery={"backoff_seconds": 0},
    )
    launcher = ForkedLauncher(ranks, **{"SPARE": str(10**12), **environment})
    return bench, train(bench, launcher=launcher)


@pytest.fixture
def run(tmp_path):
    return functools.partial(start, tmp_path)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Return a function that trains a run of a kind with too little memory for a batch."""

    @functools.cache
    def started(kind):
        return start(tmp_path_factory.mktemp("short"), "short", kind, SPARE=str(SPARE[kind]))

    return started


def found_in(bench):
    """Return what the other model said about each row: its losses, or its answers."""
    answers = Path(bench.data.folder).parent.glob("data.teacher-*/*.arrow")
    files = sorted([*bench.workspace.losses.glob("*.arrow"), *answers])
    assert files
    tables = [pa.ipc.open_file(str(file)).read_all() for file in files]
    return pa.concat_tables(tables)


def numbers(table):
    """Return the floating-point numbers of a table, in order."""
    columns = [column.combine_chunks() for column in table.columns]
    flat = [item.flatten() if pa.types.is_list(item.type) else item for item in columns]
    return np.concatenate([item.to_numpy() for item in flat if pa.types.is_floating(item.type)])


@both
def test_a_batch_that_does_not_fit_is_split_and_the_training_stays(run, short, kind):
    whole, outcome = run("whole", kind)
    assert outcome.succeeded
    assert events_of(whole.workspace, BatchSplit) == []
    short, outcome = short(kind)
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    (started,) = events_of(short.workspace, AttemptStarted)
    assert started.batch.micro_batch_size == 4
    assert events_of(short.workspace, DecisionMade) == []
    (split,) = events_of(short.workspace, BatchSplit)
    batch, half = ROWS[kind]
    assert (split.work, split.rows, split.instead_of) == (WORK[kind], half, batch)
    assert numbers(found_in(short)) == pytest.approx(numbers(found_in(whole)), rel=1e-5)
    assert losses_of(short.workspace) == pytest.approx(losses_of(whole.workspace), rel=1e-5)
    assert split.message in explain(short.workspace)
    assert f"{half} at a time instead of {batch}" in render(gather(short.workspace))


def test_one_of_two_ranks_splits_and_both_train_on(run):
    """Each rank has one whole batch to score."""
    whole, _ = run("whole", "scoring", ranks=2, count=42)
    environment = {"SPARE": str(SPARE["scoring"]), "SHORT_RANKS": "1"}
    short, outcome = run("short", "scoring", ranks=2, count=42, **environment)
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    (split,) = events_of(short.workspace, BatchSplit)
    assert (split.rank, split.rows) == (1, 11)
    assert numbers(found_in(short)) == pytest.approx(numbers(found_in(whole)), rel=1e-5)
    assert losses_of(short.workspace) == pytest.approx(losses_of(whole.workspace), rel=1e-5)


# tests/end_to_end/test_curricula.py kills a pass that scores.
@each("kind", ["scoring", "answering"], few=["answering"])
def test_a_killed_pass_continues_with_the_same_bits_and_so_does_another_micro_batch(
    run, short, kind
):
    whole, _ = short(kind)
    killed, outcome = run("killed", kind, micro=2, SPARE=str(SPARE[kind]), KILL_AT="4")
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    assert events_of(killed.workspace, AttemptEnded)[0].failure_class == "host_oom"
    assert found_in(killed).equals(found_in(whole))


@both
def test_a_row_that_does_not_fit_alone_ends_the_run_with_the_field(run, kind):
    bench, outcome = run("tiny", kind, inner=WIDEST, SPARE="0")
    assert (outcome.outcome, outcome.attempts) == ("failed", 1)
    assert outcome.failure.message.startswith(f"{FIELDS[kind]} = ")
    assert re.search(r"one row of \d+ tokens does not fit in memory", outcome.failure.message)
    assert "use a smaller model there" in outcome.failure.remedy
    (decision,) = events_of(bench.workspace, DecisionMade)
    assert (decision.action, decision.fallback, decision.batch) == ("stop", "", None)
