"""The names of jobs, and the names that Kubernetes derives from them."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.train.attempt import AttemptSpec
from steadytrain.components.train.launch.naming import (
    FOLDER,
    attempt_labels,
    is_of,
    job_name,
    run_labels,
)

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
RUNS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True)
ATTEMPTS = st.integers(1, 99_999)


@given(RUNS, ATTEMPTS, st.integers(0, 9_999))
def test_derived_names_are_valid_host_names(run, attempt, node):
    name = job_name(run, attempt)
    for made in (name, f"{name}-node-0", f"{name}-node-0-{node}-abcde"):
        assert LABEL.fullmatch(made), made


@given(RUNS, ATTEMPTS, RUNS, ATTEMPTS)
def test_attempts_have_distinct_names(run, attempt, other, later):
    same = job_name(run, attempt) == job_name(other, later)
    assert same == ((run, attempt) == (other, later))


def test_name_contains_run_and_attempt():
    assert job_name("stdlib-lm-0a1b2c3d", 3) == "stdlib-lm-0a1b2c3d-a3"


def test_label_starts_with_a_letter():
    assert re.fullmatch(r"run-7b-[0-9a-f]{8}-a1", job_name("7b", 1))
    assert job_name("7b", 1) != job_name("run-7b", 1)


@given(RUNS, ATTEMPTS)
def test_labels_are_valid_and_lead_to_the_run(run, attempt):
    spec = AttemptSpec(
        attempt=attempt,
        run_id=run,
        config="",
        data="",
        batch=BatchSettings(1),
        gradient_accumulation_steps=1,
        generation=7,
    )
    labels = attempt_labels(spec)
    assert all(VALUE.fullmatch(value) for value in labels.values())
    assert labels["steadytrain.io/attempt"] == str(attempt)
    assert labels["steadytrain.io/generation"] == "7"
    assert run_labels(run).items() <= labels.items()


def test_equal_run_names_elsewhere_give_other_job_names():
    def job(folder):
        return {"metadata": {"annotations": {FOLDER: folder}}}

    attempts = Path("/data/runs/tiny/attempts")
    assert is_of(job("/data/runs/tiny/attempts/0001"), attempts)
    assert not is_of(job("/other/runs/tiny/attempts/0001"), attempts)
    assert not is_of({"metadata": {}}, attempts)
