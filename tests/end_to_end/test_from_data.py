"""From data to a registered model: `init` and `run DATA` need no configuration of the user's."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load

from support.command import TINY_MODEL, TINY_RUN

SETS = (
    *TINY_MODEL,
    *TINY_RUN,
    "model.config.max_position_embeddings=64",
    "data.sequence_length=64",
    "data.validation_share=0.15",
    "data.test_share=0.25",
)


@pytest.mark.long
def test_written_configuration_and_data_give_one_run(steadytrain):
    folder = steadytrain.output.parent
    lines = (f"line {n} says {n * n} and {n * 31 % 977}\n" for n in range(1500))
    (folder / "notes.txt").write_text("".join(lines))
    place = ("--data", "notes.txt", "--output", steadytrain.output, "--yes")
    written = steadytrain("init", "my.yaml", *place, sets=SETS)
    assert written.code == 0, written.err
    done = steadytrain("run", "my.yaml")
    assert done.code == 0, done.out + done.err
    (run,) = done.runs
    assert run.name == load(folder / "my.yaml").run_id
    assert "notes version 1" in done.out

    again = steadytrain.run("notes.txt", *SETS)
    assert again.code == 0, again.out + again.err
    assert again.runs == [run]
    assert "train: reused" in again.out
