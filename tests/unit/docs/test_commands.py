"""Every command of the documentation is one that there is; those that are cheap are run."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from steadytrain.components.shared.config import load, preset_names
from steadytrain.components.shared.environment import REGISTRY_VARIABLE
from steadytrain.components.sizing.hardware import find_gpu
from steadytrain.pipelines.cli import app

from support.odd import COMMAND
from support.snippets import PAGES, README, ROOT, blocks, commands

LINES = dict(commands())
OURS = {
    where: shlex.split(line)[1:] for where, line in LINES.items() if line.startswith("steadytrain ")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REGISTRY = "registry.example.com/team"
MAKEFILE = (ROOT / "Makefile").read_text()


def parsed(words):
    """Click's context of a command, options and all."""
    group = COMMAND
    name, *rest = words
    while hasattr(group.commands[name], "commands"):
        group, (name, *rest) = group.commands[name], rest
    return group.commands[name].make_context(name, list(rest))


@pytest.mark.parametrize("where", OURS)
def test_documented_commands_and_options_exist(where):
    """Click parses it, and gives nothing back that it does not know."""
    context = parsed(OURS[where])
    assert not context.args
    if gpu := context.params.get("gpu"):
        assert find_gpu(gpu)


@pytest.mark.parametrize("where", [key for key, words in OURS.items() if "--set" in words])
def test_documented_overrides_are_valid(where):
    params = parsed(OURS[where]).params
    of_table = any(word.startswith("data.target=") for word in OURS[where])
    other = "tabular" if of_table else "chat"
    preset = params["source"] if params.get("source") in preset_names() else other
    load(preset, params["overrides"])


def check_make(words):
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
    for word in words:
        name, assigns, value = word.partition("=")
        if assigns:
            assert re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE)
            if name == "SET":
                load("causal-lm", value.split())
        else:
            assert word in targets


def check_pip(words):
    assert words[0] == "install"
    name, _, extras = words[1].partition("[")
    assert name == PROJECT["name"]
    assert not extras or extras.rstrip("]") in PROJECT["optional-dependencies"]


def check_paths(words):
    """A shell script, or tests that pytest is to run."""
    path = next(word for word in words if "/" in word)
    assert (ROOT / path).is_file()
    if "-m" in words:
        assert f"pytest.mark.{words[words.index('-m') + 1]}" in (ROOT / path).read_text()


def check_kubectl(words):
    """Manifests of ours are there; those of Kubeflow have versions that tests know.

    Trainer's is one that current Kueue versions resume, which is 2.2 or newer.
    """
    if "-k" in words:
        place = words[words.index("-k") + 1]
        if "github.com" in place:
            checked = re.search(r"^TRAINER_APIS = (.+)", MAKEFILE, re.MULTILINE)[1].split()
            resumed = [f"?ref=v{one}" for one in checked if one >= "2.2"]
            assert place.endswith(("?ref=2.17.0", *resumed))
        else:
            assert (ROOT / place / "kustomization.yaml").is_file()
    else:
        assert words[0] == "wait" or "port-forward" in words


def check_kind(words):
    images = [word for word in words if word.startswith("steadytrain/")]
    assert all(image.endswith(f":{version('steadytrain')}") for image in images)
    assert words[0] in ("create", "load")


def check_docker(words):
    assert words[0] == "push"
    assert re.fullmatch(rf"{REGISTRY}/steadytrain/(step|train):{version('steadytrain')}", words[1])


def check_export(words):
    name, _, value = words[0].partition("=")
    assert (name, value) == (REGISTRY_VARIABLE, REGISTRY)


OTHERS = {
    "docker": check_docker,
    "export": check_export,
    "make": check_make,
    "pip": check_pip,
    "sh": check_paths,
    "pytest": check_paths,
    "kubectl": check_kubectl,
    "kind": check_kind,
}


@pytest.mark.parametrize("where", [key for key in LINES if key not in OURS])
def test_documented_shell_commands_name_existing_paths(where):
    program, *words = shlex.split(LINES[where])
    OTHERS[program](words)


def is_cheap(words):
    """Whether it asks no server and does no work."""
    if words[0] == "plan":
        return not {"--cluster", "--calibrate"} & set(words)
    return words[0] in ("presets", "schema", "validate", "compile", "list") or (
        "--dry-run" in words and words[0] not in ("schedule", "adjust")
    )


CHEAP = sorted({shlex.join(words) for words in OURS.values() if is_cheap(words)})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader would be who has done what stands before the command."""
    (config,) = (block.text for block in blocks("yaml") if block.page == README)
    (tmp_path / "my.yaml").write_text(config)
    (record,) = (block.text for block in blocks("json") if block.page == README)
    (tmp_path / "tickets.jsonl").write_text(record)
    (prices,) = (block.text for block in blocks("yaml") if "usd_per_hour" in block.text)
    (tmp_path / "prices.yaml").write_text(prices)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", CHEAP)
def test_cheap_commands_run(folder, command):
    words = shlex.split(command)
    # The dry run of a plan imports torch for each; what it prints is the same.
    quick = ["--formula"] if words[0] == "plan" and "--formula" not in words else []
    done = CliRunner().invoke(app, [*words, *quick], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output


INLINE = {
    text for page in PAGES for text in re.findall(r"`steadytrain ([a-z][^`]*)`", page.read_text())
}
"""Commands within sentences, which may be parts of whole ones."""


@pytest.mark.parametrize("text", sorted(INLINE))
def test_inline_commands_and_options_exist(text):
    name, *rest = text.split()
    found = COMMAND.commands[name]
    if hasattr(found, "commands"):
        found = found.commands[rest[0]]
    options = {option for item in found.params for option in item.opts}
    assert {word for word in rest if word.startswith("--")} <= options
