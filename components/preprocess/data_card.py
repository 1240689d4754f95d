"""The data card, and records as the model sees them: rows as text, with the targets marked."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.pages.data_section import DataCard, SampleCard, SideCard, data_section
from steadytrain.components.pages.html import html
from steadytrain.components.preprocess.inspection import RECORDS, first_rows
from steadytrain.components.preprocess.model import find_model, make_tokenizer, with_template
from steadytrain.components.preprocess.prepare import PREDICTED, SideCounts
from steadytrain.components.preprocess.reading import encoders_by_part
from steadytrain.components.preprocess.validate import Checked, check
from steadytrain.components.shared.class_names import in_order
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.left_out import unused_keys
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import Content, Encoder, Fitted, class_reader
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

_SHOWN: Final = 600
"""Characters of a piece: the first two thirds, and the rest from its end."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all targets, or all given."""

    text: str
    target: bool


@dataclass(frozen=True)
class Document:
    """One of the documents in a row.

    name: such as chosen or rejected; "" if the task has one kind.
    targets: number of its tokens that are predicted.
    """

    name: str
    tokens: int
    targets: int
    pieces: list[Piece]


def documents_of(
    values: Mapping[str, Any], tokenizer: Any, names: Sequence[str] = ()
) -> list[Document]:
    """Return the documents of a row that has `input_ids`, and may have `targets` and `lengths`.

    Args:
        names: of the documents, in order.
    """
    ids = np.asarray(values["input_ids"])
    targets = np.asarray(values.get("targets", np.zeros(len(ids))), dtype=bool)
    edges = np.cumsum([0, *values.get("lengths", [len(ids)])]).tolist()
    result = []
    for index, (start, end) in enumerate(pairwise(edges)):
        document_targets = targets[start:end]
        pieces = list(_pieces(tokenizer, ids[start:end].tolist(), document_targets.tolist()))
        name = names[index] if index < len(names) else ""
        result.append(Document(name, end - start, int(document_targets.sum()), pieces))
    return result


def _pieces(tokenizer: Any, ids: Sequence[int], targets: Sequence[bool]) -> Iterator[Piece]:
    """Yield the text of each run of tokens.

    A token may be part of a character, and a tokenizer may write it otherwise at the beginning of a
    text. So a run's text is what it adds to that of the tokens before it.
    """
    whole, shown, end = _decoded(tokenizer, ids), 0, 0
    for target, run in groupby(targets):
        end += len(list(run))
        until = len(whole)
        if end < len(ids):
            until = _alike(whole, _decoded(tokenizer, ids[:end]))
        yield Piece(_abridged(redact(whole[shown : max(shown, until)])), target)
        shown = max(shown, until)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


def _alike(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    signs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((index for index, (one, other) in signs if one != other), shorter)


def _abridged(text: str) -> str:
    left_out = len(text) - _SHOWN
    if left_out <= 0:
        return text
    start, end = text[: 2 * _SHOWN // 3], text[-_SHOWN // 3 :]
    return f"{start} [... {left_out:,} characters ...] {end}"


_Found = tuple[str, int, Checked | Defect]


@dataclass(frozen=True)
class Shown:
    """A record as the model sees it, or why the model does not see it.

    tokens: of the whole record.
    cut: whether its end is left out.
    marked: whether its targets are some of its tokens, and not its label or tokens drawn later.
    rows: the documents of each row.
    unused: keys of its messages that the model does not see, in a sentence.
    """

    source: str
    line: int
    problem: str = ""
    label: str | None = None
    tokens: int = 0
    cut: bool = False
    marked: bool = False
    rows: Sequence[Sequence[Document]] = ()
    unused: str = ""


def show(config: RunConfig, count: int) -> list[Shown]:
    """Return the first records of each data set of a run.

    Labels and a tokenizer that the run would train come from these records alone.

    Raises:
        BadInput: the data or the model cannot be used.
        DataError: a file cannot be read.
    """
    encoder = open_encoder(config.data)
    records = list(first_records(config, encoder, count))
    if encoder.tokenizer is None or "input_ids" not in encoder.schema.names:
        brief = getattr(encoder, "brief", redact)
        return [_as_text(*record, brief) for record in records]
    good = [record for _, _, record in records if isinstance(record, Checked)]
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = _tokenizer(config, encoder, good, Path(scratch) / "tokenizer")
        given = (class_reader(encoder)(one.label) for one in good if one.label is not None)
        labels = tuple(in_order({*itertools.chain.from_iterable(given)}))
        fitted = Fitted(tokenizer, labels, frozenset(labels), Path(scratch))
        contents = [
            Content(record.content, record.label, attachment=record.attachment) for record in good
        ]
        outcomes = iter(encoder.row_encoder(fitted).encode(contents) if good else ())
        loaded, names = load_tokenizer(tokenizer), encoder.tokenizer.documents
        shown, marked = list[Shown](), PREDICTED in encoder.schema.names
        for source, line, record in records:
            outcome = next(outcomes) if isinstance(record, Checked) else record
            if isinstance(outcome, Defect):
                problem = f"{outcome.reason}: {outcome.detail}"
                shown.append(Shown(source, line, problem))
                continue
            assert isinstance(record, Checked)
            rows = [documents_of(row.values, loaded, names) for row in outcome.rows]
            shown.append(
                Shown(
                    source,
                    line,
                    label=record.label,
                    tokens=outcome.tokens,
                    cut=outcome.truncated,
                    marked=marked,
                    rows=rows,
                    unused=unused_keys(record.unread, outcome.unprinted),
                )
            )
        return shown


def _as_text(
    source: str, line: int, record: Checked | Defect, brief: Callable[[str], str]
) -> Shown:
    """Return a record whose rows are not tokens, with what people see of its content."""
    if isinstance(record, Defect):
        return Shown(source, line, f"{record.reason}: {record.detail}")
    piece = Piece(_abridged(brief(record.content)), target=False)
    return Shown(source, line, label=record.label, rows=[[Document("", 0, 0, [piece])]])


def first_records(config: RunConfig, encoder: Encoder, count: int) -> Iterator[_Found]:
    """Yield the first records of each data set of a run, and why one cannot be used.

    Raises:
        BadInput: the data cannot be used.
        DataError: a file cannot be read.
    """
    encoders, difficulty = encoders_by_part(config.data, encoder), config.training.curriculum.column
    for name, part in config.data.by_part().items():
        with closing(first_rows(part, max(count, RECORDS))) as rows:
            for source, line, row in islice(rows, count):
                try:
                    if isinstance(row, Defect):
                        raise row
                    yield source, line, check(row, part, encoders[name], difficulty)
                except Defect as defect:
                    yield source, line, defect


def _tokenizer(config: RunConfig, encoder: Encoder, good: Sequence[Checked], folder: Path) -> Path:
    settings: Any = encoder.tokenizer
    texts = (text for record in good for text in settings.texts(record.content))
    make_tokenizer(find_model(config).tokenizer, texts, folder, settings, with_template(config))
    return folder


def side_card(
    record: DataRecord,
    side: Side,
    counts: SideCounts,
    numbers: Mapping[Side, Mapping[str, float]],
    documents: Callable[[Mapping[str, Any]], list[Document]] | None,
    picture: Callable[[Mapping[str, Any]], str] | None = None,
    *,
    marked: bool,
) -> SideCard:
    """Return the card of one side.

    Args:
        documents: returns the documents of a row; None if rows are not tokens.
        picture: returns the address of a picture of a row; None if there is none.
        marked: whether rows say which of their tokens are targets.
    """
    prepared = record.sides[side]
    places = prepared.rows * record.sequence_length
    return SideCard(
        documents=counts.documents,
        bytes=counts.bytes,
        rows=prepared.rows,
        tokens=prepared.tokens,
        target_tokens=prepared.target_tokens,
        target_share=round(counts.predicted / max(1, prepared.tokens), 4) if marked else None,
        fill=round(prepared.tokens / places, 4) if places else 0.0,
        lengths=[(2**n, 2 ** (n + 1) - 1, counts.lengths[n]) for n in sorted(counts.lengths)],
        truncated=counts.truncated,
        windowed=counts.windowed,
        skipped_windows=counts.skipped,
        labels=dict(counts.labels.most_common()),
        label_counts={} if {*counts.classes} <= {1} else dict(sorted(counts.classes.items())),
        lacks=[label for label in record.labels if not counts.labels[label]],
        numbers=dict(numbers.get(side, {})),
        samples=[
            SampleCard(
                id=one.id,
                text="" if picture else redact(one.text),
                picture=picture(one.values) if picture and one.values else "",
                label=one.label,
                row=documents(one.values) if documents and one.values else [],
            )
            for one in counts.samples
        ],
    )


def card_html(card: DataCard, record: DataRecord, records_line: str) -> str:
    """Return the card as one self-contained page.

    Args:
        record: of the same data.
        records_line: what became of the records, in one line.
    """
    tokens = "none"
    if card.sequence_length:
        origin = "trained on the training side" if card.trained_tokenizer else "the model's own"
        tokens = f"{origin}; sequences of {card.sequence_length:,} tokens"
    facts = {
        "task": card.task,
        "files left out": _counted(card.left_out),
        "detected": _counted(card.detected),
        "records": records_line,
        "warnings": "; ".join(card.warnings) or "none",
        "records of other layouts": _counted(card.layouts),
        "columns not used": _counted(card.unused),
        "near duplicates": "data.near_duplicate_threshold: "
        f"{card.near_duplicate_threshold or 'not searched'}",
        "tokenizer": tokens,
        **card.facts,
        "fingerprint": card.fingerprint,
    }
    return html(
        "card",
        kind="data",
        name="Data card",
        facts=facts.items(),
        data=data_section(record, card),
        sides=card.sides,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "none"


def distribution(numbers: NDArray[np.float64]) -> dict[str, float]:
    """Return what describes numbers, of which there is at least one."""
    shares = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
    quantiles = np.quantile(numbers, [*shares.values()]).tolist()
    return {
        "min": float(numbers.min()),
        **dict(zip(shares, quantiles, strict=True)),
        "max": float(numbers.max()),
        "mean": float(numbers.mean()),
        "deviation": float(numbers.std()),
    }
