"""Read the messages of a conversation: check them, and write each in one form.

`LAYOUTS` are the columns and messages of other tools.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any, Final

from steadytrain.components.shared.config.data_sections import Columns
from steadytrain.components.tasks.encoding.fields import STRICT_JSON, Defect, text_of

Message = dict[str, Any]
"""A turn: `role`, `content` (may be None with calls), and if they are not empty, REASONING[0],
`tool_calls`, `tool_call_id` and `name`. One that could be learned and is not has `train`, which is
False."""

ROLES: Final = ("system", "user", "assistant", "tool")
_SYSTEM: Final = ("system", "developer")
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of the key with what the assistant thinks before it speaks. Messages here have the
first."""
_NUMBERS: Final = ("weight", "loss_weight", "loss_scale")
_FLAGS: Final = ("loss", "loss_mask", "trainable", "learn")
_LEARNED: Final = {
    **dict.fromkeys(_NUMBERS, "0 or 1"),
    **dict.fromkeys(("train", *_FLAGS), "true or false"),
}
"""Keys that say whether a turn is learned, and their values."""
_UNCLEAR: Final = ("mask", "masked", "ignore")
"""Keys that may say so, and in some tools mean the opposite."""
_MESSAGE: Final = {
    *("role", "content", "tool_calls", "function_call", "tool_call_id", "name"),
    *_LEARNED,
    *REASONING,
}
_PART: Final = {"type", "text"}
_FUNCTION: Final = {"name", "arguments"}


def chat_of(value: Any) -> tuple[list[Message], list[Any]]:
    """Return the messages and the tools of a conversation, or of its JSON.

    It is a list of messages, or a mapping that has `messages` and `tools`.
    """
    chat = json.loads(value) if isinstance(value, str) else value
    return (chat["messages"], chat["tools"]) if isinstance(chat, Mapping) else (chat, [])


def written(chat: Any) -> str:
    """Return canonical JSON.

    Raises:
        Defect: it has a value that JSON does not have.
    """
    try:
        return json.dumps(chat, ensure_ascii=False, separators=(",", ":"), default=_refused)
    except RecursionError as error:
        raise Defect("wrong_type", "a chat is nested too deeply") from error


def _refused(value: Any) -> Any:
    raise (
        value
        if isinstance(value, Defect)
        else Defect("wrong_type", f"a chat has {value!r:.80}, which JSON does not have")
    )


def text_of_messages(messages: Sequence[Message]) -> str:
    """Return the text of all messages but the system's."""
    asked = (message for message in messages if message["role"] not in _SYSTEM)
    return "\n".join(text for message in asked for text in texts_of(message))


def opening(messages: Sequence[Message]) -> str | None:
    """Return what the others say before the first answer; None if nobody asks anything.

    Conversations that go on in different ways share it. System messages and a greeting by the
    assistant are left out: many chats have the same.
    """
    asked = dropwhile(lambda message: message["role"] in (*_SYSTEM, "assistant"), messages)
    return (
        text_of_messages([*takewhile(lambda message: message["role"] != "assistant", asked)])
        or None
    )


def texts_of(message: Message) -> Iterator[str]:
    """Yield the texts of a message: thoughts, content, and calls."""
    if REASONING[0] in message:
        yield message[REASONING[0]]
    if message["content"] is not None:
        yield message["content"]
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield from _leaves(call["function"]["arguments"])


def learned_in(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the messages that the model learns."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("train", True)
    ]


def only_last_turn(messages: Sequence[Message]) -> list[Message]:
    """Mark what the assistant says before the last question that it answers as not learned."""
    roles = [message["role"] for message in messages]
    answer = max((index for index, role in enumerate(roles) if role == "assistant"), default=0)
    asked = max((index for index in range(answer) if roles[index] == "user"), default=0)
    return [*as_context(messages[:asked]), *messages[asked:]]


def as_context(messages: Sequence[Message]) -> list[Message]:
    """Mark what the assistant says as not learned."""
    return [
        {**message, "train": False} if message["role"] == "assistant" else message
        for message in messages
    ]


def check_learned(messages: Sequence[Message], prefix: str = "") -> None:
    """Check that the model learns something of messages.

    Raises:
        Defect: the assistant says nothing, or nothing that is learned.
    """
    if not learned_in(messages):
        silent = all(message["role"] != "assistant" for message in messages)
        what = "the assistant says nothing" if silent else "weight or train leaves nothing to learn"
        raise Defect("bad_messages", prefix + what)


def scored_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of the messages that the model learns.

    Thoughts before the last user message do not count, since most templates do not print them.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    for index in learned_in(messages):
        message = messages[index]
        if index < max(users, default=0):
            message = {key: value for key, value in message.items() if key != REASONING[0]}
        yield from texts_of(message)


def _leaves(value: Any) -> Iterator[str]:
    """Yield keys and values as any style of calls prints them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def messages_of(
    value: Any, column: str, unread: Counter[str], *, whole: bool = False
) -> list[Message]:
    """Return the messages in a column, a list or its JSON.

    Args:
        unread: counts the messages with each key that has a value and that nothing reads.
        whole: as for `message_of`.

    Raises:
        Defect: there are none, or one cannot be used.
    """
    turns = _list_of(value, column, "bad_messages")
    if not turns:
        raise Defect("empty_field", f"{column} is empty")
    turns = [as_message(turn) for turn in turns]
    messages = [message_of(turn, whole=whole) for turn in turns]
    for turn in turns:
        unread.update(dict.fromkeys(_unread(turn), 1))
    return messages


def _unread(turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a message, its parts and its calls that nothing reads."""
    yield from _others(turn, _MESSAGE)
    if isinstance(turn.get("content"), list):
        for part in turn["content"]:
            if isinstance(part, Mapping):
                yield from _others(part, _PART, "content.")
    for call in _calls_in(turn):
        # A template gets the other keys of a call, such as its id.
        yield from _others(call.get("function", {}), _FUNCTION, "tool_calls.function.")


def _others(item: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    for key, value in item.items():
        if key not in known and value not in (None, "", [], {}):
            yield f"{prefix}{key}"


def tools_of(value: Any, column: str) -> list[Any]:
    """Return the tools in a column, a list of JSON schemas or its JSON. Null is none.

    Raises:
        Defect: it is something else.
    """
    result = [] if value is None or value == "" else _list_of(value, column, "wrong_type")
    for tool in result:
        if not _name_of(tool):
            raise Defect("wrong_type", f"{column} has {tool!r:.80}, not a schema with a name")
    return result


def tool_names(tools: Sequence[Any]) -> list[str]:
    """Return the names of tools that `tools_of` returned."""
    return [_name_of(tool) for tool in tools]


def _name_of(tool: Any) -> str:
    """Return the name in a schema, or "" if there is none."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else ""


def _list_of(value: Any, column: str, reason: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = STRICT_JSON.decode(value)
        except (ValueError, RecursionError) as error:
            raise Defect(reason, f"{column} is text that is not JSON") from error
    if value is None:
        raise Defect("missing_field", f"{column} is absent or null")
    if not isinstance(value, list):
        raise Defect("wrong_type", f"{column} is {type(value).__name__}, not a list")
    return value


def messages_in(
    row: Mapping[str, Any], column: str, role: str, unread: Counter[str], *, whole: bool = False
) -> list[Message]:
    """Return a column's messages; text is one message of a role.

    Args:
        unread, whole: as for `messages_of`.

    Raises:
        Defect: it has no usable ones.
    """
    value = row.get(column)
    if isinstance(value, list):
        return messages_of(value, column, unread, whole=whole)
    return [{"role": role, "content": text_of(row, column)}]


def message_of(item: Any, *, whole: bool = False) -> Message:
    """Return a message in the form of this module.

    Args:
        whole: whether not only the assistant's messages can be learned.

    Raises:
        Defect: it has no usable role and content.
    """
    if not isinstance(item, Mapping) or not item.keys() & {"content", "tool_calls"}:
        raise Defect("bad_messages", "a message is not a mapping with role and content")
    role, calls = item.get("role"), _calls_of(item)
    if role not in (*ROLES, *_SYSTEM):
        raise Defect("bad_messages", f"role {str(role)[:40]!r} is not one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content_of(item, calls)}
    more = {
        REASONING[0]: _thoughts_of(item),
        "tool_calls": calls,
        **{key: item.get(key) for key in ("tool_call_id", "name")},
    }
    message |= {key: value for key, value in more.items() if value}
    if role != "assistant" and message.keys() & {REASONING[0], "tool_calls"}:
        raise Defect("bad_messages", f"only the assistant has calls and thoughts, not the {role}")
    if role == "assistant" and not "".join(texts_of(message)).strip():
        raise Defect("bad_messages", "the assistant says nothing")
    learned, could = _learned(item), whole or role == "assistant"
    if learned and not could:
        raise Defect("bad_messages", f"weight or train asks to learn a turn of the {role}")
    if learned is False and could:
        message["train"] = False
    return message


def _learned(item: Mapping[str, Any]) -> bool | None:
    """Return whether a message says that it is learned or not; None if it says neither."""
    for key in _UNCLEAR:
        if item.get(key) is not None:
            raise Defect(
                "bad_messages",
                f"{key} is {item[key]!r:.40}: write train as true or false to say what is learned",
            )
    given = {key: item[key] for key in _LEARNED if item.get(key) is not None}
    for key, value in given.items():
        # 0 and 1 are flags, too, but of `train`.
        kinds = bool if key == "train" else int | float
        of_kind = isinstance(value, kinds) and not (key in _NUMBERS and isinstance(value, bool))
        if not of_kind or value not in (0, 1):
            raise Defect("bad_messages", f"{key} is {value!r:.40}, not {_LEARNED[key]}")
    if len({bool(value) for value in given.values()}) > 1:
        both = " and ".join(f"{key} is {json.dumps(value)}" for key, value in given.items())
        raise Defect("bad_messages", both)
    return bool(given.popitem()[1]) if given else None


def _thoughts_of(item: Mapping[str, Any]) -> str:
    """Return what the assistant thinks before it speaks, or ""."""
    given = {key: item[key] for key in REASONING if item.get(key)}
    for key, value in given.items():
        if not isinstance(value, str):
            raise Defect("wrong_type", f"{key} is {type(value).__name__}, not text")
    thoughts = {*given.values()}
    if len(thoughts) > 1:
        raise Defect("bad_messages", f"{', '.join(REASONING)} differ in one message")
    return thoughts.pop() if thoughts else ""


def _content_of(item: Mapping[str, Any], calls: Sequence[Any]) -> str | None:
    """Return the text of a content, which may be a list of parts."""
    content = item.get("content")
    if isinstance(content, list):
        return "".join(map(_part_of, content))
    if isinstance(content, str) or (content is None and calls):
        return content
    raise Defect("wrong_type", f"content is {type(content).__name__}, not text")


def _part_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise Defect("wrong_type", f"content has a part of type {str(kind)[:40]!r}, not text")
    return text


def _calls_of(item: Mapping[str, Any]) -> list[Any]:
    """Return the calls of a message, each as Transformers passes it to a chat template."""
    if item.get("function_call"):
        raise Defect("bad_messages", "function_call is not read: write it as tool_calls")
    return [_call_of(call) for call in _calls_in(item)]


def _calls_in(item: Mapping[str, Any]) -> list[Any]:
    given = item.get("tool_calls")
    return _list_of(given, "tool_calls", "wrong_type") if given else []


def _call_of(call: Any) -> Any:
    name = _name_of(call)
    if not name:
        raise Defect("wrong_type", f"tool_calls has {call!r:.80}, not a call with a name")
    inner = call.get("function", call)
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = STRICT_JSON.decode(arguments)
        except (ValueError, RecursionError) as error:
            raise Defect("wrong_type", f"the arguments of {name[:80]} are not JSON") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Defect("wrong_type", f"the arguments of {name[:80]} are no JSON object")
    outer = {key: value for key, value in call.items() if key not in _FUNCTION}
    return {"type": "function", **outer, "function": {"name": name, "arguments": arguments}}


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
    result = (
        layout
        for layout in layouts_for(columns)
        if all(layout.columns[name] in row for name in _OWN if name in layout.columns)
    )
    return next(result, None)


def input_column(columns: Columns) -> str | None:
    """Return the column with more text for the prompt. An Alpaca instruction has one."""
    alpaca = LAYOUTS[1].columns
    return columns.input or (alpaca["input"] if columns.prompt == alpaca["prompt"] else None)


def as_message(turn: Any) -> Any:
    """Return a turn of ShareGPT as a message with role and content; anything else unchanged."""
    if not isinstance(turn, Mapping) or "from" not in turn or {"role", "content"} & turn.keys():
        return turn
    role, content = turn["from"], turn.get("value")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if role == "function_call" and isinstance(content, str):
        calls = content if content.lstrip().startswith("[") else f"[{content}]"
        return {"role": "assistant", "content": None, "tool_calls": calls, **others}
    known = _ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": known, "content": content, **others}
