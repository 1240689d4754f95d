"""The order in which `steadytrain --help` shows the commands: as a user needs them."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperGroup

LESSONS: Final = {
    "Begin": (
        "init",
        "validate",
        "plan",
        "run",
        "show-data",
        "profile",
        "tune",
        "ablate",
        "cross-validate",
    ),
    "Follow and continue": (
        "list",
        "top",
        "ui",
        "explain",
        "report",
        "compare",
        "lineage",
        "extract",
        "stop",
        "resume",
        "gc",
    ),
    "On a cluster": ("doctor", "submit", "schedule", "trigger", "watch", "compile"),
    "Look up": ("presets", "schema", "step"),
}


class Lessons(TyperGroup):
    """A group that lists its commands under headings."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the lessons."""
        known = super().list_commands(ctx)
        ordered = [name for names in LESSONS.values() for name in names]
        return sorted(known, key=ordered.index)

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write one list of commands for each heading."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in LESSONS.items():
            found = [(name, self.commands[name]) for name in names if name in self.commands]
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, command.get_short_help_str(width)) for name, command in found],
                    col_max=max(map(len, self.commands)),
                )
