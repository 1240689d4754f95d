"""Print a conversation with a chat template, and find what the assistant says in the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.messages import REASONING, Message, tool_names

DEFAULT_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""For tokenizers without a template. A turn ends with the end-of-text token."""

TEMPLATES: Final = {
    "chatml": (
        "{% for message in messages %}"
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""Templates by the name that `data.chat_template` may have."""

_OWN_CHARACTERS: Final = 4096
"""Characters that a template may add to each message."""
_MARK: Final = re.compile("\ue000([0-9]+)\ue001")
_THOUGHTS: Final = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Printed:
    """A conversation as text.

    spans: what is said in some messages, by their index and in the order of the text, each without
        the token that ends the turn.
    unprinted: number of messages with each key that the template does not print.
    """

    text: str
    spans: dict[int, Span]
    unprinted: Counter[str] = field(default_factory=Counter)


class _Rejected(BadInput):
    """The template raises an error."""


@dataclass(frozen=True)
class _Leaf:
    """A text in a message, which a template prints in full or not at all.

    message: index of the message.
    arguments: those of a call, whose name the text is.
    """

    message: int
    key: str
    text: str
    arguments: Any = None


def print_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], wanted: set[int]
) -> Printed:
    """Print a conversation.

    Args:
        wanted: indices of the messages whose spans are returned.

    Raises:
        BadInput: the template rejects the messages, or does not print all that they say.
    """
    template, failures = _Template(tokenizer, tools), list[BadInput]()
    for form in template.forms(messages):
        try:
            return _Conversation(template, form).printed(wanted)
        except BadInput as error:
            failures.append(error)
    # A form that was printed tells more than one that the template rejects.
    raise next((error for error in failures if not isinstance(error, _Rejected)), failures[0])


@dataclass(frozen=True)
class _Template:
    """A chat template, with the tools that it prints."""

    tokenizer: Any
    tools: Sequence[Any]

    @cached_property
    def added(self) -> list[str]:
        """Tokens that are not pieces of text, long ones first."""
        tokens = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return sorted(tokens | set(self.tokenizer.all_special_tokens), key=len, reverse=True)

    @cached_property
    def reasoning(self) -> str:
        """The name under which the template reads thoughts, or ""."""
        return next(filter(self._reads, REASONING), "")

    def _reads(self, name: str) -> bool:
        """Return whether the template reads a key of a message, or compares with a name."""
        given = self.tokenizer.chat_template
        source = given and self.tokenizer.get_chat_template(None, list(self.tools) or None)
        return re.search(rf"\.{name}\b|(['\"]){name}\1", source or "") is not None

    def forms(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Message]]:
        """Yield forms of the same messages, beginning with the usual one."""
        usual = [self._named(message) for message in messages]
        yield usual
        thoughts = [self._split_reasoning(message) for message in usual]
        if thoughts != usual:
            yield thoughts
        if any("tool_calls" in message for message in usual):
            for content in (None, ""):
                for text in (False, True):
                    form = [_with_calls(message, content, text=text) for message in usual]
                    if form != usual:
                        yield form

    def _named(self, message: Mapping[str, Any]) -> Message:
        """Return a message with the role and the key of thoughts that the template reads."""
        named = {key: value for key, value in message.items() if key != "train"}
        if named["role"] == "developer" and not self._reads("developer"):
            named["role"] = "system"
        if REASONING[0] in named:
            if not self.reasoning:
                raise BadInput(
                    f"the tokenizer's chat template does not print {REASONING[0]}",
                    remedy="use a chat template that does, or leave the key out",
                )
            named[self.reasoning] = named.pop(REASONING[0])
        return named

    def _split_reasoning(self, message: Message) -> Message:
        """Move thoughts at the beginning of a content to the key that the template reads."""
        match = _THOUGHTS.match(message["content"] or "")
        if message["role"] != "assistant" or not match or not self.reasoning:
            return message
        answer = {**message, "content": message["content"][match.end() :]}
        if match[1].strip() and self.reasoning not in message:
            answer[self.reasoning] = match[1].strip("\n")
        return answer

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        template = None if self.tokenizer.chat_template else DEFAULT_CHAT_TEMPLATE
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(self.tools) or None,
                    tokenize=False,
                    chat_template=template,
                    **options,
                )
            )
        except MemoryError:
            raise
        except Exception as error:
            # A template can raise anything: Jinja errors to reject messages, other errors from
            # bugs.
            raise _Rejected(
                f"the tokenizer's chat template rejects the messages: {error}",
                remedy="check the roles and their order, or use another chat template",
            ) from error
        size = _size(messages, self.tools)
        allowed = 8 * size + _OWN_CHARACTERS * len(messages) + (1 << 20)
        if len(text) > allowed:
            raise BadInput(
                f"the tokenizer's chat template makes {len(text)} characters of {size}",
                remedy="use another chat template",
            )
        return text


def _with_calls(message: Message, content: str | None, *, text: bool) -> Message:
    """Return a message with other content if it has only calls.

    Args:
        text: whether the arguments of calls are JSON instead of a mapping.
    """
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call) if text else given}}
        for call in message["tool_calls"]
        for given in (call["function"]["arguments"],)
    ]
    only = not (message["content"] or "").strip()
    return {**message, "content": content if only else message["content"], "tool_calls": calls}


def _json(call: Any) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def _size(messages: Sequence[Message], tools: Sequence[Any]) -> int:
    """Return the characters of what the messages and tools say."""
    more = [message for message in messages if len(message) > 2]
    other_bytes = len(json.dumps([more, list(tools)])) if more or tools else 0
    return other_bytes + sum(len(message["content"] or "") for message in messages)


class _Conversation:
    """A conversation, printed once as it is, and once with marks in place of its texts.

    What is between the marks is the template's own. The rest of the text is what is said.
    """

    def __init__(self, template: _Template, messages: Sequence[Message]) -> None:
        self._template, self._messages = template, messages
        self._text = template.render(messages)
        self._leaves: list[_Leaf] = []
        self._marked = [self._mark(*item) for item in enumerate(messages)]
        printed = _MARK.split(template.render(self._marked))
        # A template may reorder messages, such as print the system message within the last turn.
        self._own, self._order = printed[::2], list(map(int, printed[1::2]))
        self._position_of = {
            leaf: position for position, leaf in reversed(list(enumerate(self._order)))
        }
        self._prompts: dict[int, list[str]] = {}

    def _mark(self, index: int, message: Message) -> Message:
        def mark(key: str, text: str, arguments: Any = None) -> str:
            self._leaves.append(_Leaf(index, key, text, arguments))
            return f"\ue000{len(self._leaves) - 1}\ue001"

        marked, reasoning = dict(message), self._template.reasoning if len(message) > 2 else ""
        if reasoning in message:
            marked[reasoning] = mark(REASONING[0], message[reasoning])
        if "tool_calls" not in message or (message["content"] or "").strip():
            marked["content"] = mark("content", message["content"])
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": {**inner, "name": mark("tool_calls", *inner.values())}}
                for call in message["tool_calls"]
                for inner in (call["function"],)
            ]
        if "name" in message and message["role"] != "tool":
            marked["name"] = mark("name", message["name"])
        return marked

    def printed(self, wanted: set[int]) -> Printed:
        """Return the text, and the spans of some messages."""
        unprinted = self._unprinted()
        contents = [self._leaves[leaf].text for leaf in self._order]
        spans = content_spans(self._own, contents, self._text)
        if not spans:
            raise _rewritten()
        positions: dict[int, list[int]] = {}
        for leaf, position in sorted(self._position_of.items(), key=lambda item: item[1]):
            if self._leaves[leaf].key != "name":
                positions.setdefault(self._leaves[leaf].message, []).append(position)
        result = {i: self._span(i, each, spans) for i, each in positions.items() if i in wanted}
        return Printed(self._text, result, unprinted)

    def _unprinted(self) -> Counter[str]:
        """Count the thoughts, names and ids of calls that the template does not print.

        Raises:
            BadInput: it does not print what is said, or prints it twice.
        """
        unprinted = Counter[str]()
        times = Counter(self._order)
        for number, leaf in enumerate(self._leaves):
            if number not in times and leaf.key in ("name", REASONING[0]):
                unprinted[leaf.key] += 1
            elif number not in times or (times[number] > 1 and leaf.key in ("content", *REASONING)):
                raise _rewritten()
            elif leaf.key == "tool_calls":
                _check_arguments(leaf, self._own[self._position_of[number] + 1])
        for number, position in self._position_of.items():
            message = self._messages[self._leaves[number].message]
            around = self._own[position] + self._own[position + 1]
            if message["role"] == "tool":
                keys = ("name", "tool_call_id")
                unprinted.update(key for key in keys if str(message.get(key, "")) not in around)
        printed = "".join(self._own)
        for name in tool_names(self._template.tools):
            if name not in printed:
                raise BadInput(
                    f"the tokenizer's chat template does not print the tool {name[:80]!r}",
                    remedy="use a chat template that prints the tools",
                )
        return unprinted

    def _span(self, index: int, positions: Sequence[int], spans: Sequence[Span]) -> Span:
        """Return the text of the message whose leaves are at these positions."""
        first, last = positions[0], positions[-1]
        if len(positions) <= last - first:
            raise _rewritten()
        start, end = spans[first][0], spans[last][1]
        if self._leaves[self._order[first]].key != "content":
            thinks = self._leaves[self._order[first]].key == REASONING[0]
            start -= len(self._own[first]) - self._prompt(index, first, thinks=thinks)
        if self._leaves[self._order[last]].key != "content":
            end += self._tail(index, last)
        return start, end

    def _prompt(self, index: int, position: int, *, thinks: bool) -> int:
        """Return how much of what is printed before a message the model is given to answer."""
        printed = self._own[position]
        # Without thoughts, some templates print empty ones, and give them with the prompt.
        for options in [{}] if thinks else [{"enable_thinking": False}, {}]:
            known = self._prompts.setdefault(len(options), [])
            for prompt in known:
                if printed.startswith(prompt):
                    return len(prompt)
            prompt = self._ending(index, position, add_generation_prompt=True, **options)
            if printed.startswith(prompt):
                known.append(prompt)
                return len(prompt)
        # The prompt may begin an answer that this message does not give, such as thoughts.
        before = self._ending(index, position)
        if not printed.startswith(before):
            raise _unclear(index)
        borders = re.finditer("|".join([*map(re.escape, self._template.added), r"\s"]), prompt)
        ends = (border.end() for border in borders)
        return max(len(before), *(end for end in ends if printed.startswith(prompt[:end])), 0)

    def _tail(self, index: int, position: int) -> int:
        """Return the length of what the template prints after a message's last leaf.

        The token that ends the turn does not count.
        """
        printed = self._own[position + 1]
        tail = self._ending(index + 1, position + 1).rstrip()
        if not printed.startswith(tail):
            raise _unclear(index)
        end = next(filter(tail.endswith, self._template.added), "")
        return len(tail) - len(end)

    def _ending(self, count: int, position: int, **options: Any) -> str:
        """Return what is printed last for the first messages, after the leaf before `position`."""
        printed = _MARK.split(self._template.render(self._marked[:count], **options))
        if printed[1::2][-1:] != [str(leaf) for leaf in self._order[:position][-1:]]:
            raise _unclear(count)
        return printed[-1]


def _check_arguments(call: _Leaf, after: str) -> None:
    """Check that the arguments of a call are printed after its name, as JSON or one by one."""
    given = call.arguments
    printed = (
        given in after
        if isinstance(given, str)
        else all(key in after for key in given) and (not given or repr(given) not in after)
    )
    if not printed:
        raise BadInput(
            f"the tokenizer's chat template does not print the arguments of {call.text[:80]} as "
            "JSON",
            remedy="use a chat template that prints tool calls",
        )


def _rewritten() -> BadInput:
    return BadInput(
        "the tokenizer's chat template rewrites the messages or leaves part of them out, so "
        "some of the assistant's text could not be predicted",
        remedy="use a chat template that prints each message's content once and in full, apart "
        "from white space at its ends",
    )


def _unclear(index: int) -> BadInput:
    return BadInput(
        f"the tokenizer's chat template prints message {index + 1} in another way when others "
        "follow it, so where the turn of the assistant begins or ends is unclear",
        remedy="use a chat template that prints each message in one way",
    )


Span = tuple[int, int]
"""First character, and the one after the last."""


def content_spans(own: Sequence[str], contents: Sequence[str], text: str) -> list[Span]:
    """Return the spans of the contents in `text`, in order, if each is there in full.

    A template may trim white space at both ends of a content. Anything else that it changes or
    drops would count as part of the answer without ever being predicted, so it must not exist:
    `text` must consist of the contents and the template's own parts, each in its place. The work is
    linear in the length of `text`.

    Args:
        own: what the template prints before, between and after the contents, one more item than
            `contents`.

    Returns:
        One span per content, or an empty list if `text` has a different structure.
    """
    if not text.startswith(own[0]):
        return []
    spans: list[Span] = []
    position = len(own[0])
    for index, content in enumerate(contents, 1):
        span = _span(content, own[index], text, position, last=index == len(contents))
        if span is None:
            return []
        spans.append(span)
        position = span[1] + len(own[index])
    return spans if position == len(text) else []


def _span(content: str, after: str, text: str, start: int, *, last: bool) -> Span | None:
    """Return the span of a content that starts at `start` and is followed by `after`.

    None means that it is not there.
    """
    end = start + len(content)
    if text.startswith(content, start) and text.startswith(after, end):
        return start, end
    core = content.strip()
    lead, tail = content[: content.find(core)], content[content.find(core) + len(core) :]
    end = text.find(core[:1], start, start + len(lead) + 1)
    if end < 0 or not lead.endswith(text[start:end]) or not text.startswith(core, end):
        return None
    end += len(core)
    # Take the first match. There is no backtracking.
    result = len(text) - len(after) if last else text.find(after, end, end + len(tail) + len(after))
    if result < end or not text.startswith(after, result):
        return None
    # A content of only white space may have lost both ends.
    left = text[end:result]
    return (start, result) if tail.startswith(left) or (not core and left in tail) else None
