"""The commands of the README's section on clusters are ones that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from steadytrain.components.shared.attached import MOUNT_PATH, NAME, SECRETS
from steadytrain.pipelines.cli import app

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "README.md").read_text().split("## On a cluster\n")[1].split("\n## ")[0]
COMMANDS = [shlex.split(line) for line in SECTION.split("```")[1].strip().splitlines()]


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if line[0] == "steadytrain"], ids=" ".join
)
def test_each_command_and_option_is_one_of_ours(command):
    """Click parses it, and gives nothing back that it does not know."""
    group = typer.main.get_command(app)
    name, rest = command[1], command[2:]
    while True:
        found = group.commands[name]
        if not hasattr(found, "commands"):
            break
        group, name, rest = found, rest[0], rest[1:]
    context = found.make_context(name, rest)
    assert not context.args


def test_the_overlays_are_there():
    named = re.findall(r"overlays/([a-z-]+)", SECTION)
    assert set(named) == {path.name for path in (ROOT / "manifests" / "overlays").iterdir()}


def test_the_secret_is_the_one_that_steps_are_given():
    (script,) = (line[1] for line in COMMANDS if line[0] == "sh")
    written = (ROOT / script).read_text()
    assert f"secret generic {NAME} " in written
    named = set(re.findall(r"(MLFLOW_[A-Z_]+)=", written))
    assert named - set(SECRETS) == {"MLFLOW_FLASK_SERVER_SECRET_KEY"}
    named = set(re.findall(r"`((?:MLFLOW|HF|KF|STEADYTRAIN)_[A-Z_]+)`", SECTION))
    assert named == {key for key in SECRETS if not key.startswith("AWS_")}
    assert f"output={MOUNT_PATH}" in SECTION
