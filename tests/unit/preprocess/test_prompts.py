"""All answers to one prompt are on one side of the split."""

from __future__ import annotations

import pytest

from steadytrain.components.preprocess.split import content_id, split_digest
from steadytrain.components.preprocess.step import run
from steadytrain.components.preprocess.validate import check
from steadytrain.components.shared.config import DataConfig, from_mapping
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.fields import Defect

from support.data import documents, read_table, sentence, side_of, write_jsonl


def said(role, content):
    return {"role": role, "content": content}


WHY, SO, NO = said("user", "why?"), said("assistant", "so"), said("assistant", "no")
SYSTEM, HELLO = said("system", "be brief"), said("assistant", "hello")
MORE = [said("user", "more"), said("assistant", "that is all")]
SFT, PAIRS, EMBEDDING = "supervised_finetuning", "preference", "text_embedding"
SAME = [
    (SFT, {"prompt": "why?", "completion": "so"}),
    (SFT, {"prompt": " why?\n", "completion": "no"}),
    (SFT, {"messages": [WHY, SO]}),
    (SFT, {"messages": [SYSTEM, WHY, NO, *MORE]}),
    (SFT, {"messages": [HELLO, WHY, SO]}),
    (PAIRS, {"prompt": "why?", "chosen": "so", "rejected": "no"}),
    (PAIRS, {"chosen": [WHY, SO, *MORE], "rejected": [WHY, SO, MORE[0], NO]}),
    (EMBEDDING, {"prompt": "why?", "completion": "so"}),
]
OTHER = [
    (SFT, {"prompt": "Why?", "completion": "so"}),
    (SFT, {"messages": [WHY, MORE[0], SO]}),
    (PAIRS, {"prompt": "why not?", "chosen": "so", "rejected": "no"}),
]
ALONE = [
    (SFT, {"messages": [SYSTEM, SO]}),
    (EMBEDDING, {"text": "why?"}),
    ("causal_lm", {"text": "why?"}),
]


def group_of(task, row, **data):
    config = DataConfig(source=["x"], task=task, **data)
    return check(row, config, open_encoder(config)).group


def test_group_is_the_prompt_in_every_layout_and_task() -> None:
    (shared,) = {group_of(*case) for case in SAME}
    others = [group_of(*case) for case in OTHER]
    assert len({shared, *others}) == 1 + len(OTHER)
    assert {group_of(*case) for case in ALONE} == {None}
    assert {group_of(*case, group_by_prompt=False) for case in SAME} == {None}


def test_a_column_groups_instead_of_the_prompt_with_values_of_any_length() -> None:
    long = "é" * 100_000
    names = [
        group_of(SFT, SAME[0][1] | {"who": who}, columns={"group": "who"})
        for who in ("ann", long, long + "é")
    ]
    assert names[0] == "ann"
    assert len(set(names)) == 3
    assert max(map(len, names)) == 32
    with pytest.raises(Defect, match="bad_encoding"):
        group_of(SFT, SAME[0][1] | {"who": "\ud800" * 2000}, columns={"group": "who"})


def test_no_prompt_of_the_test_side_is_learned(tmp_path, configure) -> None:
    """Sixty prompts with four answers each: split by record, most would be on several sides."""
    rows = [
        {"prompt": sentence(5000 + number % 60, 8), "completion": sentence(number, 8)}
        for number in range(240)
    ]
    config = configure(write_jsonl(tmp_path / "x.jsonl", rows), task=SFT, sequence_length=256)
    record = run(config)
    encoder = open_encoder(config.data)
    prompts = {content_id(encoder.read(row).text).hex(): row["prompt"] for row in rows}
    sides = {side: {prompts[one] for one in documents(record, side)} for side in record.sides}
    assert sum(map(len, sides.values())) == 60
    assert sum(side.documents for side in record.sides.values()) == 240
    tested = read_table(record.path(record.test_records))
    assert len(set(tested["group"].to_pylist())) == len(sides["test"])
    alone = {one: side_of(bytes.fromhex(one), None, config.data) for one in prompts}
    split = {(prompts[one], side) for one, side in alone.items()}
    assert len(split) > 100


def test_one_prompt_for_all_records_is_an_error_that_names_the_field(tmp_path, configure) -> None:
    rows = [{"prompt": "go on", "completion": sentence(number)} for number in range(60)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match="side of the split is empty") as raised:
        run(configure(path, task=SFT))
    assert "data.group_by_prompt to false" in raised.value.remedy
    alone = run(configure(path, task=SFT, group_by_prompt=False))
    assert all(side.documents for side in alone.sides.values())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task": "causal_lm"}, "records of causal_lm have no prompt"),
        ({"task": SFT, "columns": {"group": "who"}}, "data.columns.group is 'who'"),
    ],
)
def test_turning_it_off_is_refused_where_it_has_no_effect(data, message) -> None:
    model = {"config": {"model_type": "gpt2"}, "vocab_size": 400}
    given = {"name": "x", "output": "o", "model": model}
    with pytest.raises(ConfigError, match=message):
        from_mapping(given | {"data": {"source": ["x"], "group_by_prompt": False, **data}})


def test_digest_tells_the_two_rules_apart() -> None:
    data = DataConfig(source=["x"], task=SFT)
    assert split_digest(data, {}) != split_digest(
        data.model_copy(update={"group_by_prompt": False}), {}
    )
