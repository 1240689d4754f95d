"""Chats in the layouts of other tools, as the columns and messages that the encoders read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.config.data import Columns

_OWN: Final = ("messages", "prompt", "completion")
_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Roles by their name in ShareGPT. Other names are the same."""


@dataclass(frozen=True)
class Layout:
    """Columns of another tool.

    name: for people.
    columns: by field of data.columns.
    """

    name: str
    columns: Mapping[str, str]


LAYOUTS: Final = (
    Layout("ShareGPT (conversations)", {"messages": "conversations"}),
    Layout(
        "Alpaca (instruction, input, output)",
        {"prompt": "instruction", "completion": "output", "input": "input"},
    ),
)


def layouts_for(columns: Columns) -> tuple[Layout, ...]:
    """Return the layouts to look for: none if the configuration names the columns of chats."""
    return LAYOUTS if all(getattr(columns, name) == name for name in _OWN) else ()


def layout_of(row: Mapping[str, Any], columns: Columns) -> Layout | None:
    """Return the layout of a row that has none of the columns of a chat."""
    if any(row.get(getattr(columns, name)) is not None for name in _OWN):
        return None
    found = (
        layout
        for layout in layouts_for(columns)
        if all(layout.columns[name] in row for name in _OWN if name in layout.columns)
    )
    return next(found, None)


def input_column(columns: Columns) -> str | None:
    """Return the column with more text for the prompt. An Alpaca instruction has one."""
    alpaca = LAYOUTS[1].columns
    return columns.input or (alpaca["input"] if columns.prompt == alpaca["prompt"] else None)


def as_message(turn: Any) -> Any:
    """Return a turn of ShareGPT as a message with role and content; anything else unchanged."""
    if not isinstance(turn, Mapping) or "from" not in turn or {"role", "content"} & turn.keys():
        return turn
    role, said = turn["from"], turn.get("value")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if role == "function_call" and isinstance(said, str):
        calls = said if said.lstrip().startswith("[") else f"[{said}]"
        return {"role": "assistant", "content": None, "tool_calls": calls, **others}
    known = _ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": known, "content": said, **others}
