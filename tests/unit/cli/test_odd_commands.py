"""Any value of any option or argument: the command works or reports a useful error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.odd import LONG, QUICK, argument, call, commands
from support.selected import each

ORDINARY = {
    ("init",): ["init.yaml", "--data=file", "--set=data.format=text"],
    ("run",): ["good.yaml", "--dry-run"],
    ("stop",): ["mine"],
    ("resume",): ["mine"],
    ("explain",): ["mine"],
    ("report",): ["mine"],
    ("compare",): ["mine", "other"],
    ("extract",): ["no-such", "topic", "new"],
    ("check",): ["no-such"],
    ("predict",): ["no-such@champion", "rows.csv"],
    ("serve",): ["no-such@champion"],
    ("gc",): ["--dry-run"],
    ("plan",): ["good.yaml", "--formula", "--gpu=h100"],
    ("submit",): ["good.yaml", "--set=output=/mnt"],
    ("trigger",): ["good.yaml", "--set=output=/mnt"],
    ("watch",): ["good.yaml", "--set=output=/mnt"],
    ("schedule", "apply"): ["schedules.yaml"],
    ("schedule", "diff"): ["schedules.yaml"],
    ("schedule", "pause"): ["nightly"],
    ("schedule", "resume"): ["nightly"],
    ("schedule", "delete"): ["nightly"],
    ("validate",): ["good.yaml"],
    ("step",): ["no-such", "good.yaml"],
    ("profile",): ["no-such.yaml"],
    ("ui",): ["--host=203.0.113.1"],
}
"""What each command needs besides the odd value. None of them trains or contacts a server."""
SLOW = {("compile",), ("submit",), ("doctor",)}
"""Each takes seconds because of what it imports or compiles."""
PLACES = [
    (path, item)
    for path, parameters in commands()
    for item in parameters
    if item.takes_value and not (path == ("compile",) and not item.name)
]


def check(folder, path, item, value):
    arguments = list(ORDINARY.get(path, []))
    if item.name:
        arguments.append(f"{item.name}={value}")
    elif arguments:
        arguments[0] = value
    done = call(*path, *arguments, folder=folder)
    assert done.code in (0, 1, 2), done
    assert done.code == 0 or done.err.strip() or done.out.strip()
    assert len(done.err) < 20_000
    assert "Traceback" not in done.out + done.err


def test_every_command_is_known():
    assert {path for path, _ in PLACES} >= ORDINARY.keys()


def test_every_option_and_argument_rejects_an_empty_text(places):
    for path, item in PLACES:
        done = call(*path, f"{item.name}=" if item.name else "", folder=places)
        named = item.name in done.err and "is empty" in done.err
        assert (done.code, named) == (2, True), (path, item, done)


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "option",
    [
        *("design --gpu-count", "design --budget-usd", "plan --nodes", "plan --gpus-per-node"),
        *("init --cores", "init --gpu-memory-gb", "doctor --ranks", "doctor --nodes"),
    ],
)
def test_an_option_rejects_a_number_that_stands_for_nothing(places, option, value):
    command, name = option.split()
    ordinary = [] if command == "doctor" else ["good.yaml"]
    done = call(command, *ordinary, f"{name}={value}", folder=places)
    assert (done.code, name in done.err) == (2, True)


@pytest.mark.slow
@QUICK
@given(where=st.sampled_from([place for place in PLACES if place[0] not in SLOW]), value=argument)
def test_commands_survive_any_option_value(places, where, value):
    check(places, *where, value)


@pytest.mark.slow
@each("value", ["file", "folder", "/dev/full", "x" * 300, "/proc/nothing/x"], ["/dev/full"])
def test_compile_rejects_an_unwritable_path(places, value):
    done = call("compile", "-o", value, folder=places)
    assert done.code == 0 or "--output" in done.err


@pytest.mark.soak
@LONG
@given(where=st.sampled_from(PLACES), value=argument.filter(lambda value: value != "fifo"))
def test_commands_survive_any_option_value_for_long(places, where, value):
    check(places, *where, value)


@pytest.mark.parametrize("value", ["1e400", "nan", "-inf"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("stop", "mine", "--grace"),
        ("gc", "--idle-hours"),
        ("watch", "good.yaml", "--every"),
        ("watch", "good.yaml", "--quiet"),
        ("plan", "good.yaml", "--host-memory-gb"),
    ],
)
def test_nan_is_rejected_by_its_option(places, arguments, value):
    done = call(*arguments[:-1], f"{arguments[-1]}={value}", folder=places)
    assert done.code == 2
    assert arguments[-1] in done.err


@pytest.mark.parametrize("name", ["2024", "1e3", "0x10", "2024-01-01", "on", "null", "1_0"])
def test_run_name_may_look_like_an_option_or_number(places, name):
    done = call("run", "good.yaml", "--dry-run", "--run", name, folder=places)
    if "_" in name:
        assert (done.code, "run = " in done.err) == (2, True)
    else:
        assert (done.code, done.out.split()[1]) == (0, name)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.config.hidden_size=x"],
        ["model.config.num_attention_heads=0"],
        ["model.config.vocab_size=-1"],
        ["model.config.attention_dropout=[]"],
        ["model.config.head_dim=1.5"],
        ["recovery.seconds_between_failures=1e308"],
        ["model.base=~nobody", "model.config={}"],
        ["model.base=package:__main__", "model.config={}"],
        ["model.base=file", "model.config={}"],
        ["output=" + "x" * 5000],
    ],
)
def test_plan_rejects_a_model_without_a_size(places, settings):
    sets = [part for item in settings for part in ("--set", item)]
    done = call("plan", "good.yaml", "--formula", "--gpu=h100", *sets, folder=places)
    assert done.code == 2
    field, _, value = settings[0].partition("=")
    assert field.split(".")[-1] in done.err or value in done.err
    assert "fix: " in done.err


def test_prices_from_an_empty_pipe_do_not_hang(places):
    done = call("plan", "good.yaml", "--formula", "--prices", "fifo", folder=places)
    assert (done.code, "not a regular file" in done.err) == (2, True)


@pytest.mark.slow
def test_plan_rejects_an_unwritable_path(places):
    arguments = ("plan", "good.yaml", "--formula", "--gpu=h100", "--write")
    for value in ("file", "/dev/null/x", "/proc/nothing", "x" * 300):
        done = call(*arguments, value, folder=places)
        assert (done.code, "--write" in done.err) == (2, True)
