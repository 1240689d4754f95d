"""Layouts of conversations with the templates of model families, against Transformers' masks."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.messages import (
    chat_of,
    message_of,
    messages_of,
    scored_in,
)
from steadytrain.components.tasks.encoding.tokens import encode_chat

from support.templates import FAMILIES, family_tokenizer, plain


def schema(name, *fields):
    properties = {field: {"type": "string"} for field in fields}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(number, name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{number:05}", "function": function}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def result(number, content):
    return turn("tool", content, tool_call_id=f"call{number:05}", name="weather")


TOOLS = [schema("weather", "city"), schema("clock")]
SYSTEM, ASK, ANSWER = turn("system", "be brief"), turn("user", "and Rome?"), turn("assistant", "so")
CALLED = [
    turn("user", "how is Paris?"),
    turn("assistant", None, tool_calls=[call(1, "weather", city="Paris")]),
    result(1, "sunny"),
    turn("assistant", "It is sunny."),
]
THOUGHT = turn("assistant", "It rains.", reasoning_content="Rome is wet.")
LAYOUTS = {
    "single turn": ([ASK, ANSWER], []),
    "multi turn": ([ASK, turn("assistant", " a\nb "), ASK, ANSWER], []),
    "system": ([SYSTEM, ASK, ANSWER], []),
    "tools without calls": ([ASK, ANSWER], TOOLS),
    "call": (CALLED, TOOLS),
    "call, content and arguments": (
        [*CALLED[:1], {**CALLED[1], "content": "Let me see."}, *CALLED[2:]],
        TOOLS,
    ),
    "calls in both turns": (
        [*CALLED, ASK, {**CALLED[1], "tool_calls": [call(2, "clock")]}, result(2, "5"), ANSWER],
        TOOLS,
    ),
    "parallel calls": (
        [
            ASK,
            {**CALLED[1], "tool_calls": [call(1, "weather", city='Rome, "é"'), call(2, "clock")]},
            result(1, "wet"),
            result(2, "noon"),
            ANSWER,
        ],
        TOOLS,
    ),
    "ends with a call": (CALLED[:2], TOOLS),
    "reasoning": ([ASK, THOUGHT], []),
    "reasoning in both turns": ([ASK, THOUGHT, ASK, THOUGHT], []),
    "reasoning and call": (
        [CALLED[0], {**CALLED[1], "reasoning_content": "Ask."}, CALLED[2], THOUGHT, ASK, ANSWER],
        TOOLS,
    ),
}
NO_TOOLS = dict.fromkeys([name for name, (_, tools) in LAYOUTS.items() if tools], "")
NO_THOUGHTS = dict.fromkeys([name for name in LAYOUTS if "reasoning" in name], "")
REFUSED = {
    "chatml": NO_THOUGHTS,
    "llama2": NO_TOOLS | NO_THOUGHTS,
    "llama3": NO_THOUGHTS
    | dict.fromkeys(["parallel calls", "call, content and arguments"], "one call, no content"),
    "gemma": NO_TOOLS | NO_THOUGHTS | {"system": "no such role"},
    "phi": NO_TOOLS | NO_THOUGHTS,
    "mistral": NO_THOUGHTS
    | {"system": "no such role", "call, content and arguments": "it drops the content"},
    "zephyr": NO_TOOLS | NO_THOUGHTS,
    "qwen3": {},
    "deepseek": NO_THOUGHTS,
    "channels": {"parallel calls": "one call", "call, content and arguments": "no content"},
}
"""What a template cannot print, by family."""


@pytest.fixture(scope="module")
def tokenizer():
    return family_tokenizer()


def encoded(tokenizer, template, messages, tools=()):
    tokenizer.chat_template = template
    return encode_chat(tokenizer, [message_of(message) for message in messages], tools)


def learned(tokenizer, found, mask=None):
    pairs = zip(found.input_ids, mask or found.targets, strict=True)
    return tokenizer.decode([token for token, target in pairs if target])


def as_taken(template, messages):
    """Return messages as a family's template takes them."""
    renamed = [
        {("thinking" if "thinking" in template and key == "reasoning_content" else key): value
         for key, value in message.items()}
        for message in messages
    ]  # fmt: skip
    if "+ c.function.arguments" in template:
        renamed = json.loads(json.dumps(renamed))
        for each in (c["function"] for m in renamed for c in m.get("tool_calls", ())):
            each["arguments"] = json.dumps(each["arguments"], ensure_ascii=False)
    return renamed


def of_transformers(tokenizer, template, messages, tools):
    """Return tokens and mask."""
    return tokenizer.apply_chat_template(
        as_taken(template, messages),
        tools=tools or None,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_and_targets_are_those_of_transformers(tokenizer, family, layout):
    """The family's own template, against Transformers with the same one and `generation` tags.

    Empty thoughts are the one exception: Transformers' mask has them, but whoever asks for an
    answer without thoughts gives them with the prompt (`enable_thinking=False`), so that a model
    which learned them would print them twice, and would learn not to think.
    """
    template, (messages, tools) = FAMILIES[family], LAYOUTS[layout]
    if layout in REFUSED[family]:
        with pytest.raises(BadInput, match="chat template"):
            encoded(tokenizer, plain(template), messages, tools)
        return
    found = encoded(tokenizer, plain(template), messages, tools)
    theirs = of_transformers(tokenizer, template, messages, tools)
    assert found.input_ids == theirs["input_ids"]
    expected = learned(tokenizer, found, theirs["assistant_masks"])
    assert learned(tokenizer, found) == expected.replace("<think>\n\n</think>\n\n", "")
    if family != "qwen3":
        assert found.targets == theirs["assistant_masks"]
    assert any(found.targets)


def test_thoughts_that_a_template_forgets_are_counted(tokenizer):
    messages, _ = LAYOUTS["reasoning in both turns"]
    found = encoded(tokenizer, plain(FAMILIES["qwen3"]), messages)
    assert learned(tokenizer, found) == (
        "It rains.<|im_end|><think>\nRome is wet.\n</think>\n\nIt rains.<|im_end|>"
    )
    assert found.unprinted == {"reasoning_content": 1}
    both = encoded(tokenizer, plain(FAMILIES["channels"]), messages)
    assert not both.unprinted
    assert encoded(
        tokenizer, plain(FAMILIES["phi"]), [{**ASK, "name": "Ann"}, ANSWER]
    ).unprinted == {"name": 1}
    *asked, result, answer = CALLED
    named = [*asked, {**result, "name": "some_tool", "tool_call_id": "nine12345"}, answer]
    chatml = encoded(tokenizer, plain(FAMILIES["chatml"]), named)
    assert chatml.unprinted == {"name": 1, "tool_call_id": 1}
    assert encoded(tokenizer, plain(FAMILIES["mistral"]), named).unprinted == {"name": 1}


def test_thoughts_in_the_content_are_those_of_the_key(tokenizer):
    """Transformers prints both alike with this template."""
    inline = turn("assistant", "<think>\nRome is wet.\n</think>\n\nIt rains.")
    template = plain(FAMILIES["qwen3"])
    assert encoded(tokenizer, template, [ASK, inline]) == encoded(
        tokenizer, template, [ASK, THOUGHT]
    )
    with pytest.raises(BadInput, match="leaves part of them out"):
        encoded(tokenizer, template.replace("reasoning_content", "other"), [ASK, inline])


FORMS = {
    "arguments as JSON": [call(1, "weather", city="Paris")["function"]],
    "a call without its envelope": [{"name": "weather", "arguments": '{"city":"Paris"}'}],
    "all calls as JSON": json.dumps(CALLED[1]["tool_calls"]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["chatml", "deepseek"])
def test_forms_of_a_call_have_the_same_tokens(tokenizer, family, form):
    template = plain(FAMILIES[family])
    other = [CALLED[0], {"role": "assistant", "tool_calls": FORMS[form]}, *CALLED[2:]]
    assert encoded(tokenizer, template, other, TOOLS) == encoded(tokenizer, template, CALLED, TOOLS)


def test_a_call_without_its_envelope_keeps_its_other_keys():
    (given,) = message_of(turn("assistant", None, tool_calls=[{"name": "a", "id": "1"}]))[
        "tool_calls"
    ]
    assert given == {"type": "function", "id": "1", "function": {"name": "a", "arguments": {}}}


def test_keys_that_nothing_reads_are_counted_by_name():
    """One count for each message with a value there, and none for what is read or empty."""
    asked = {**call(1, "weather"), "index": 0}
    asked["function"]["parsed"] = {"city": "Rome"}
    part = {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}}
    turns = [
        {**ASK, "name": "Ann", "weight": 0, "images": [], "audio": None},
        turn("assistant", [part, part], reasoning="Hm.", refusal="no", annotations=[1], train=True),
        turn("assistant", None, tool_calls=json.dumps([asked, asked]), refusal="", score=0),
        turn("assistant", "so", refusal="no"),
    ]
    unread = Counter()
    assert len(messages_of(json.dumps(turns), "messages", unread)) == 4
    assert unread == {
        "refusal": 2,
        "annotations": 1,
        "content.cache_control": 1,
        "tool_calls.function.parsed": 1,
        "score": 1,
    }


@pytest.mark.parametrize("role", ["developer", "system"])
def test_the_developer_is_the_system_where_the_template_knows_only_that(tokenizer, role):
    template = plain(FAMILIES["chatml"])
    found = encoded(tokenizer, template, [turn(role, "be brief"), ASK, ANSWER])
    assert found == encoded(tokenizer, template, [SYSTEM, ASK, ANSWER])
    knows = template.replace("m.role == 'tool'", "m.role == 'tool' or m.role == 'developer'")
    found = encoded(tokenizer, knows, [turn(role, "be brief"), ASK, ANSWER])
    assert ("<tool_response>\nbe brief" in tokenizer.decode(found.input_ids)) == (role != "system")


def test_parts_of_a_content_are_one_text(tokenizer):
    parts = [{"type": "text", "text": "and "}, {"text": "Ro", "type": "text"}, "me?"]
    template = FAMILIES["gemma"]
    found = encoded(tokenizer, plain(template), [turn("user", parts), ANSWER])
    assert found == encoded(tokenizer, plain(template), [ASK, ANSWER])
    alone = [turn("user", [{"type": "text", "text": "and Rome?"}]), ANSWER]
    assert found.input_ids == of_transformers(tokenizer, template, alone, [])["input_ids"]


def test_arguments_are_printed_as_json_or_the_template_is_refused(tokenizer):
    template, given = plain(FAMILIES["chatml"]), "{{ c.function.arguments | tojson }}"
    expected = encoded(tokenizer, template, CALLED, TOOLS)
    as_python = template.replace(given, "{{ c.function.arguments }}")
    assert encoded(tokenizer, as_python, CALLED, TOOLS) == expected
    with pytest.raises(BadInput, match="does not print the arguments of weather"):
        encoded(tokenizer, template.replace(given, ""), CALLED, TOOLS)


def test_a_turn_whose_end_depends_on_what_follows_is_refused(tokenizer):
    template = plain(FAMILIES["chatml"])
    ends = template.replace("{% endif %}<|im_end|>", "{% endif %}{{ loop.last }}<|im_end|>", 1)
    with pytest.raises(BadInput, match="in another way when others follow it"):
        encoded(tokenizer, ends, CALLED, TOOLS)


def places_of_text(tokenizer, template, messages, tools, text):
    """Return Transformers' tokens, and those of a text where it is printed last, with what ends it.

    A special token ends it if only white space is in between.
    """
    printed = tokenizer.apply_chat_template(
        as_taken(template, messages), tools=tools or None, chat_template=template, tokenize=False
    )
    found = tokenizer(printed, add_special_tokens=False, return_offsets_mapping=True)
    start = printed.rindex(text)
    end = start + len(text)
    after = [
        (low, high)
        for token, (low, high) in zip(found["input_ids"], found["offset_mapping"], strict=True)
        if low >= end and token in tokenizer.added_tokens_decoder
    ]
    if after and not printed[end : after[0][0]].strip():
        end = after[0][1]
    inside = [high > start and low < end for low, high in found["offset_mapping"]]
    return found["input_ids"], inside


def encoded_as(tokenizer, template, messages, tools, train_on):
    """Encode a chat as a run with `data.train_on` does."""
    tokenizer.chat_template = template
    data = DataConfig(source=["x"], task="supervised_finetuning", train_on=train_on)
    content = ChatEncoder(data).read({"messages": messages, "tools": tools})
    return encode_chat(tokenizer, *chat_of(content.text), whole=train_on == "all")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_turn_is_what_the_assistant_says_after_the_last_question(
    tokenizer, family, layout
):
    template, (messages, tools) = FAMILIES[family], LAYOUTS[layout]
    if layout in REFUSED[family]:
        return
    asked = [message["content"] for message in messages if message["role"] == "user"][-1]
    found = encoded_as(tokenizer, plain(template), messages, tools, "last_turn")
    usual = encoded_as(tokenizer, plain(template), messages, tools, "assistant")
    ids, question = places_of_text(tokenizer, plain(template), messages, tools, asked)
    assert found.input_ids == usual.input_ids == ids
    first = question.index(True)
    assert found.targets == [0] * first + usual.targets[first:]
    assert found.ends <= usual.ends
    assert any(found.targets)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("marked", [None, 0, 1, 2])
def test_all_is_each_token_but_the_first_and_those_of_marked_turns(tokenizer, family, marked):
    template = plain(FAMILIES[family])
    messages = [turn("user", "who?"), turn("assistant", "bad answer"), ASK, ANSWER]
    ids, context = places_of_text(
        tokenizer, template, messages, [], messages[marked or 0]["content"]
    )
    given = [{**each, "train": i != marked} for i, each in enumerate(messages)]
    found = encoded_as(tokenizer, template, given, [], "all")
    assert found.input_ids == ids
    whole = [0] + [1] * (len(ids) - 1)
    if marked is None:
        assert found.targets == whole
    else:
        pairs = zip(whole, context, strict=True)
        assert found.targets == [int(target and not inside) for target, inside in pairs]
    assert found.ends == encoded(tokenizer, template, [ASK, ANSWER]).ends


def test_the_last_turn_begins_before_the_calls_that_answer_it(tokenizer):
    messages = [*CALLED, *CALLED, turn("user", "thanks")]
    found = encoded_as(tokenizer, plain(FAMILIES["chatml"]), messages, TOOLS, "last_turn")
    said = learned(tokenizer, found)
    assert (said.count("<tool_call>"), said.count("It is sunny.")) == (1, 1)
    greeting = [turn("assistant", "hello"), turn("user", "bye")]
    found = encoded_as(tokenizer, plain(FAMILIES["chatml"]), greeting, [], "last_turn")
    assert learned(tokenizer, found) == "hello<|im_end|>"
    last = [ASK, ANSWER, ASK, {**ANSWER, "weight": 0}]
    with pytest.raises(Defect, match="leaves nothing to learn"):
        encoded_as(tokenizer, plain(FAMILIES["chatml"]), last, [], "last_turn")


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        (turn("assistant", None), "content is NoneType"),
        (turn("user", None, tool_calls=[call(1, "weather")]), "only the assistant has calls"),
        (turn("user", "a", thinking="b"), "only the assistant has calls and thoughts"),
        (turn("assistant", "a", thinking="b", reasoning="c"), "differ in one message"),
        (turn("assistant", "a", reasoning=[{"text": "b"}]), "reasoning is list, not text"),
        (turn("assistant", None, tool_calls=[{"function": {}}]), "not a call with a name"),
        (
            turn("assistant", None, tool_calls=[{"name": "a", "arguments": "{"}]),
            "of a are not JSON",
        ),
        (turn("assistant", None, tool_calls=[{"name": "a", "arguments": [1]}]), "no JSON object"),
        (turn("assistant", None, tool_calls=3), "tool_calls is int, not a list"),
        (turn("assistant", "a", function_call={"name": "b"}), "write it as tool_calls"),
        (turn("assistant", "a", weight=0.5), "weight is 0.5, not 0 or 1"),
        (turn("assistant", "a", weight=True), "weight is True, not 0 or 1"),
        (turn("assistant", "a", weight="0"), "weight is '0', not 0 or 1"),
        (turn("assistant", "a", train=0), "train is 0, not true or false"),
        (turn("assistant", "a", train=True, weight=0), "weight is 0 and train is true"),
        (turn("assistant", "a", loss="false"), "loss is 'false', not true or false"),
        (turn("assistant", "a", loss_scale=0.3), "loss_scale is 0.3, not 0 or 1"),
        (turn("assistant", "a", loss=1, trainable=False), "loss is 1 and trainable is false"),
        (turn("assistant", "a", mask=0), "mask is 0: write train"),
        (turn("user", "a", masked=True), "masked is True: write train"),
        (turn("user", "a", weight=1), "asks to learn a turn of the user"),
        (turn("user", [{"type": "image_url", "image_url": "x"}]), "part of type 'image_url'"),
        (turn("user", [{"type": "text"}]), "part of type 'text', not text"),
        (turn("user", [3]), "part of type 'int'"),
    ],
)
def test_a_message_that_cannot_be_used_is_a_defect(message, detail):
    with pytest.raises(Defect, match=detail):
        message_of(message)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": 0, "trainable": False}])
def test_a_turn_that_is_marked_is_context_alone(tokenizer, family, mark):
    """The tokens are those of Transformers; the mask lacks the first answer and its end."""
    template, first = FAMILIES[family], turn("assistant", "bad answer")
    messages = [{**ASK, **mark}, {**first, **mark}, ASK, {**ANSWER, "weight": 1, "train": True}]
    theirs = of_transformers(tokenizer, template, [ASK, first, ASK, ANSWER], [])
    only = of_transformers(tokenizer, template, [ASK, first], [])["assistant_masks"]
    last = len(only) - only[::-1].index(1)
    expected = [
        target if place >= last else 0 for place, target in enumerate(theirs["assistant_masks"])
    ]
    found = encoded(tokenizer, plain(template), messages)
    assert found.input_ids == theirs["input_ids"]
    printed = learned(tokenizer, found, expected).replace("<think>\n\n</think>\n\n", "")
    assert learned(tokenizer, found) == printed
    assert "so" in printed
    assert "bad" not in printed
    assert list(scored_in([message_of(message) for message in messages])) == ["so"]


def test_what_is_scored_is_what_most_templates_print():
    """Thoughts before the last question are not, and calls are in any style."""
    messages = [ASK, THOUGHT, *CALLED[:2], THOUGHT]
    found = list(scored_in([message_of(message) for message in messages]))
    assert found == ["It rains.", "weather", "city", "Paris", "Rome is wet.", "It rains."]
    assert chat_of({"messages": messages, "tools": TOOLS}) == (messages, TOOLS)
