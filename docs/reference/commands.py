"""Every command with its arguments and options, from the typer app."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main
from reference.markdown import code, table

from steadytrain.pipelines.cli import app


def page() -> str:
    """A section for each command, in the order of `steadytrain --help`."""
    intro = (
        "# Commands\n\n"
        "Exit status 0 is success, 1 a failure, 2 bad input, 70 an unexpected error. A run that "
        "Ctrl-C stops ends with 130, one that another signal stops with 143.\n"
    )
    return "\n".join([intro, *(_section(name, command) for name, command in commands())])


def commands() -> Iterator[tuple[str, Any]]:
    """Full name and click command of each, groups opened."""
    yield from _leaves("steadytrain", typer.main.get_command(app))


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for inner, found in command.commands.items():
            yield from _leaves(f"{name} {inner}", found)
    else:
        yield name, command


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}\n", f"```text\n{usage}\n```\n", _help(command)]
    records = (item.get_help_record(context) for item in command.get_params(context))
    rows = [(code(record[0]), record[1]) for record in records if record]
    return "\n".join([*parts, table(("Argument or option", "Meaning"), rows)])


def _help(command: Any) -> str:
    """The help text without click's mark for paragraphs that keep their lines."""
    text = inspect.cleandoc(command.help or "")
    return text.replace("\b\n", "\n") + "\n"
