"""The records before they are encoded: read, checked, and without duplicates."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from steadytrain.components.preprocess.boilerplate import PERMUTATIONS, band_rows, sign_unshared
from steadytrain.components.preprocess.duplicates import KEPT, REASONS, Findings, find_duplicates
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.parallel import Workers
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.reading import Reading, check_labels, read_everything
from steadytrain.components.preprocess.split import (
    SIDES,
    TRAIN,
    DeclaredSide,
    held_out,
    like_absent,
    near_equal_labels,
    sides_at,
    stratify,
)
from steadytrain.components.preprocess.spool import Spool, read_part
from steadytrain.components.shared.class_names import counting, in_order, label_in, listed, part_of
from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.left_out import LONG, counted, detections, left_out
from steadytrain.components.shared.records import Side, TimeKey
from steadytrain.components.tasks.encoding.base import Encoder, class_reader, has_label_sets
from steadytrain.components.tasks.encoding.fields import DEFECTS
from steadytrain.components.tasks.encoding.labeled_text import has_numbers

_NEAR_ADVICE: Final = (
    "look at the near duplicates in the quarantine file; if they are different records, raise "
    "data.near_duplicate_threshold or set it to null; otherwise "
)
_LONG_ADVICE: Final = (
    "raise data.sequence_length, or set data.long_records to what keeps more of the records; "
    "otherwise "
)

_HELD_OUT: Final[tuple[Side, ...]] = ("validation", "test")

Progress = Callable[[str, float, float | None, str], None]
"""Takes the work, how much is done, the total (None if unknown), and the unit."""


@dataclass(frozen=True)
class Survey:
    """What is known about the records.

    trained: the labels that occur on the training side, sorted.
    labels: the classes in their order.
    given: the held-out sides that the data give, with the digests of their records.
    learned_until, tested_from: see `DataRecord`.
    """

    reading: Reading
    findings: Findings
    trained: list[str]
    labels: list[str]
    given: Mapping[Side, str]
    learned_until: TimeKey | None = None
    tested_from: TimeKey | None = None


def survey(
    config: RunConfig,
    encoder: Encoder,
    inputs: Inputs,
    *,
    spool: Spool,
    quarantine: Quarantine,
    scratch: Path,
    workers: Workers,
    progress: Progress,
    warn: Callable[[str], None],
) -> Survey:
    """Read all records, and put the good ones on the spool with what duplicates them.

    Raises:
        DataError: the data cannot be used.
        BadInput: the weights of classes are not those of the labels.
    """
    data = config.data
    reading = read_everything(
        inputs,
        data,
        encoder,
        config.training.curriculum.column,
        spool=spool,
        quarantine=quarantine,
        scratch=scratch,
        workers=workers,
        progress=lambda done: (
            progress("reading", spool.count, None, "records")
            if inputs.bytes is None
            else progress("reading", min(done, inputs.bytes), inputs.bytes, "bytes")
        ),
    )
    for remark in detections(reading.detected):
        warn(remark)
    for layout, count in reading.layouts.items():
        records = "1 record is" if count == 1 else f"{count:,} records are"
        warn(f"{records} read as {layout}; if that is wrong, name their columns in data.columns")
    for what, count in reading.noticed.items():
        warn(f"{count:,} {'record' if count == 1 else 'records'} {what}")
    settings = encoder.tokenizer
    threshold = data.near_duplicate_threshold if settings else None
    rows = 0 if threshold is None else band_rows(threshold)
    divided = hasattr(encoder, "divide")
    fixed = [*_HELD_OUT] if divided else _fixed_sides(data, reading, warn)
    if divided:
        _warn_of_splits(data, reading, warn)
    shares, places = held_out(data, fixed), spool.array("places")
    given, until, tested = (
        _divided(encoder, spool) if divided else (spool.array("given"), None, None)
    )
    drawn = ~np.isin(given, [SIDES.index(side) for side in fixed])
    findings = find_duplicates(
        spool,
        np.where(drawn, sides_at(places, shares), given),
        threshold=threshold,
        bands=PERMUTATIONS // rows if rows else 0,
        conflicts=encoder.labeled,
        keeps_copies=getattr(encoder, "keeps_copies", False),
        groups=places if fixed and not divided else None,
        sign_again=lambda numbers: sign_unshared(
            spool,
            numbers,
            shared=reading.sample.shared(),
            compared=settings.compared if settings else None,
            rows=rows,
            workers=workers,
        ),
        progress=lambda done, total: progress("finding duplicates", done, total, "bands"),
    )
    if encoder.labeled and shares:
        # Kept records resemble no other, so that moving one is no leak.
        kept, rare, count = drawn & (findings.codes == KEPT), list[str](), 0
        if kept.any():
            findings.sides[kept], rare, count = _stratified(
                places[kept], spool.array("labels")[kept], shares, reading.labels, encoder
            )
        if rare:
            what = "class has" if len(rare) == 1 else "classes have"
            units = "groups" if data.grouped_by else "records"
            least = f"{len(shares) + 1} {units}"
            problem = f"{len(rare):,} {what} too few {units} for {len(shares) + 1} sides"
            if len(rare) == count:
                raise DataError(
                    f"there is nothing to hold out: {problem}, and there is no other class",
                    remedy=f"give more data, so that a class has at least {least}",
                )
            warn(f"{problem}, so all of them are in training: {listed(rare)}")
    findings.save(spool.folder)
    _check_numbers(data, encoder, spool, findings)
    read = class_reader(encoder)
    trained = _trained_labels(data, spool, reading, findings, read) if encoder.labeled else []
    labels = _labels(data, trained)
    config.training.class_weights.check_labels(labels)
    if encoder.labeled:
        _warn_of_labels(data, _classes(reading.labels.values(), read), labels, trained, warn)
    ids = spool.array("ids")
    digests = {
        side: hashlib.sha256(
            np.unique(ids[given == SIDES.index(side)], axis=0).tobytes()
        ).hexdigest()
        for side in fixed
    }
    return Survey(reading, findings, trained, labels, digests, until, tested)


def _divided(encoder: Any, spool: Spool) -> tuple[NDArray[np.uint8], TimeKey, TimeKey]:
    """Return the sides that the encoder gives all records, as their index in SIDES.

    The latest time that is learned or validated, and the earliest that is tested, come with them.
    """
    parts = [read_part(path).select(["number", "content", "label"]) for path in spool.written()]
    records = pa.concat_tables(parts).sort_by("number")
    texts: list[Any] = records["content"].to_pylist()
    sides = encoder.divide(texts, records["label"].to_pylist())
    tested, keys = [side == "test" for side in sides], [*map(encoder.time_key, texts)]
    until = max(key for key, held_out in zip(keys, tested, strict=True) if not held_out)
    given = np.array([SIDES.index(side) for side in sides], dtype=np.uint8)
    return given, until, min(itertools.compress(keys, tested))


def _check_numbers(data: DataConfig, encoder: Encoder, spool: Spool, findings: Findings) -> None:
    """Check the numbers to predict, if records have them.

    Raises:
        DataError: those of the training side are all the same, or some are too large.
    """
    if not has_numbers(encoder):
        return
    numbers = np.empty(len(findings.sides))
    for path in spool.written():
        part = read_part(path)
        labels: list[Any] = part["label"].to_pylist()
        numbers[part["number"].to_numpy()] = [*map(float, labels)]
    field = "data.target" if data.target else "data.columns.label"
    column = repr(data.target or data.columns.label)
    for index, side in enumerate(SIDES):
        found = numbers[(findings.codes == KEPT) & (findings.sides == index)]
        if not found.size:
            continue
        least, most = found.min(), found.max()
        with np.errstate(over="ignore", invalid="ignore"):
            deviation = found.std()
        if not np.isfinite(deviation):
            raise DataError(
                f"the numbers in {column} reach from {least:g} to {most:g} on the {side} side, and "
                "their squares are too large to compute with",
                remedy=f"divide them by a constant, leave wrong records out, or check {field}",
            )
        if index == TRAIN and least == most:
            raise DataError(
                f"each record of the training side has the number {least:g} in {column}, so that "
                "there is nothing to learn",
                remedy=f"give records with different numbers, or check {field}",
            )


def _stratified(
    places: NDArray[np.uint64],
    labels: NDArray[np.uint64],
    shares: Mapping[int, float],
    names: Mapping[int, str],
    encoder: Encoder,
) -> tuple[NDArray[np.uint8], list[str], int]:
    """Return the sides of records, the classes that are too rare for all, and the number of all.

    Args:
        labels: hashes of the records' labels.
        names: labels by hash.
    """
    if not has_label_sets(encoder):
        sides, rare = stratify(places, labels, shares)
        return sides, in_order(names[int(label)] for label in rare), len(np.unique(labels))
    read = class_reader(encoder)
    result, set_of = np.unique(labels, return_inverse=True)
    sets = [read(names[int(label)]) for label in result]
    classes = sorted(_classes(map(names.__getitem__, result.tolist()), read))
    numbers = {name: number for number, name in enumerate(classes, start=1)}
    # Records without a label are divided as a class of their own, 0.
    listed_as = [np.array([*map(numbers.__getitem__, one)] or [0], np.uint64) for one in sets]
    times = np.array([len(one) for one in listed_as])[set_of]
    firsts = np.cumsum(times) - times
    members = np.concatenate([listed_as[index] for index in set_of])
    sides, rare = stratify(np.repeat(places, times), members, shares, sets=True)
    return sides[firsts], in_order(classes[number - 1] for number in rare if number), len(classes)


def _classes(labels: Iterable[str], read: Callable[[str], Sequence[str]]) -> set[str]:
    return set(itertools.chain.from_iterable(map(read, labels)))


def _fixed_sides(data: DataConfig, reading: Reading, warn: Callable[[str], None]) -> list[Side]:
    """Return the held-out sides that the data give, and say what becomes of their splits.

    A split is kept if each of several parts has it, and has other records too.

    Raises:
        DataError: nothing is left to train on.
    """
    fields = {field for field, _ in data.addresses}
    fixed = [side for side in _HELD_OUT if f"data.{side}_source" in fields]
    kinds: tuple[DeclaredSide, ...] = ("train", *_HELD_OUT, "pooled")
    counts = {kind: [reading.given[part, kind] for part in data.by_part()] for kind in kinds}
    named = [side for side in _HELD_OUT if side not in fixed and any(counts[side])]
    kept = [side for side in named if all(counts[side])]
    keep, keeps = (
        " and ".join(f"a {side} split of {sum(counts[side]):,} records" for side in sides)
        for sides in (named, kept)
    )
    if pooled := sum(counts["pooled"]):
        warn(
            f"{pooled:,} records of validation and test splits in data.source are pooled with the "
            "others, because data.splits is pool: a new split is drawn from all of them"
        )
    elif data.splits == "pool":
        warn("data.splits is pool, but no name in data.source says validation or test")
    elif named and not all(counts["train"]):
        alone = f"data.source has {keep}, and no other records"
        if fixed:
            raise DataError(
                alone,
                remedy="add records to train on, or set data.splits: pool, to train on these",
            )
        where = " in each of data.parts" if data.parts else ""
        warn(f"{alone}{where}: a new split is drawn from all records")
        return []
    elif keeps:
        warn(
            f"data.source has {keeps}, kept as {'these sides' if kept[1:] else 'that side'} of the "
            "split; data.splits: pool draws a new split from all records"
        )
    if named != kept and all(counts["train"]):
        lacking = " and ".join(side for side in named if side not in kept)
        warn(
            f"not each of data.parts has a {lacking} split, so the records of those that there are "
            "are pooled with the others, and a new split is drawn from all of them"
        )
    return [*fixed, *kept]


def _warn_of_splits(data: DataConfig, reading: Reading, warn: Callable[[str], None]) -> None:
    """Say what becomes of splits in data whose sides the encoder decides."""
    time = data.columns.time
    what = f"data.task {data.task}" if time is None else f"data.columns.time = {time!r}"
    for side in _HELD_OUT:
        if count := sum(reading.given[part, side] for part in data.by_part()):
            warn(
                f"data.source has a {side} split of {count:,} records, which count like all "
                f"others: {what} holds out the last records in time"
            )


def set_aside(findings: Findings) -> dict[str, int]:
    """Return how many records are left out as duplicates or leaks, by reason."""
    counts = np.bincount(findings.codes, minlength=len(REASONS)).tolist()
    return {reason: count for reason, count in zip(REASONS, counts, strict=True) if reason}


def check_sides(
    documents: Mapping[Side, int],
    data: DataConfig,
    counts: Mapping[str, int],
    given: Collection[Side],
) -> None:
    """Check that no side of the split is empty.

    Args:
        documents: number of usable records.
        given: sides that the data give.
        counts: number of records that are left out, by reason.

    Raises:
        DataError: one is.
    """
    defective = sum(counts.get(reason, 0) for reason in DEFECTS)
    long = counted(LONG, counts)
    reasons = (
        f"{defective:,} defective" if defective else "",
        left_out(counts, data.near_duplicate_threshold),
        *long,
    )
    because = ", ".join(filter(None, reasons))
    advice = _LONG_ADVICE if long else ""
    if counts.get("near_duplicate") or counts.get("leakage"):
        advice += _NEAR_ADVICE
    total = sum(documents.values())
    usable = "is 1 usable record" if total == 1 else f"are {total:,} usable records"
    for side, count in documents.items():
        if not count:
            raise DataError(
                f"the {side} side of the split is empty: there {usable}"
                f"{', and left out are ' if because else ''}{because}",
                remedy=f"{advice}{_advice(side, data, given)}{_group_advice(data)}",
            )


def _advice(side: Side, data: DataConfig, given: Collection[Side]) -> str:
    if data.in_time:
        return "give more data"
    if side in given:
        field = f"data.{side}_source"
        by_field = any(name == field for name, _ in data.addresses)
        drawn = f"leave {field} out" if by_field else "set data.splits to pool"
        return f"give usable records for this side, or {drawn}, so that it is drawn"
    shares = [f"data.{side}_share" for side in _HELD_OUT if side not in given]
    if not shares:
        return "give more data to train on"
    return f"give more data, raise {' or '.join(shares)}, or set another data.split_salt"


def _group_advice(data: DataConfig) -> str:
    if data.grouped_by and not data.columns.group:
        return (
            "; all answers to one prompt are on one side, so there must be many prompts: if an "
            "instruction is the prompt of all records, set data.group_by_prompt to false"
        )
    return "; with data.columns.group there must be many groups" if data.columns.group else ""


def _trained_labels(
    data: DataConfig,
    spool: Spool,
    reading: Reading,
    findings: Findings,
    read: Callable[[str], Sequence[str]],
) -> list[str]:
    because = left_out(set_aside(findings), data.near_duplicate_threshold)
    seen = np.unique(spool.array("labels")[(findings.sides == TRAIN) & (findings.codes == KEPT)])
    trained = in_order(_classes((reading.labels[int(label)] for label in seen), read))
    check_labels(trained, data)
    for name in data.by_part():
        mine = [label for label in trained if not name or part_of(label) == name]
        where, of = (f"parts.{name}.", f" of the part {name!r}") if name else ("", "")
        if len(mine) < 2:
            raise DataError(
                f"the training side{of} has {len(mine)} different labels ({', '.join(mine)}), "
                "and at least two are needed; "
                f"{(findings.codes != KEPT).sum():,} of all records are left out as duplicates, or "
                "because equal texts have different labels"
                f"{': ' if because else ''}{because}",
                remedy="give data with more classes, or check "
                f"data.{'target' if data.target else f'{where}columns.label'}",
            )
    return trained


def _labels(data: DataConfig, trained: list[str]) -> list[str]:
    """Return the classes in their order: the configured labels, or those that are trained."""
    if not data.parts:
        if isinstance(data.target, list):
            return in_order(data.target)
        return data.labels or trained
    labels = list[str]()
    for name, part in sorted(data.parts.items()):
        given = [label_in(name, label) for label in part.labels or ()]
        own = [label.partition("/")[2] for label in trained if part_of(label) == name]
        labels += given or [label_in(name, label) for label in in_order(own)]
    return labels


def _warn_of_labels(
    data: DataConfig,
    read: Iterable[str],
    labels: list[str],
    trained: list[str],
    warn: Callable[[str], None],
) -> None:
    for alike in near_equal_labels(read):
        warn(
            f"the labels {', '.join(map(repr, alike))} are separate classes, although they "
            "differ only in case, spaces or Unicode form"
        )
    if unclear := like_absent(read):
        warn(
            f"the label {', '.join(map(repr, unclear))} is a class like any other; if it says that "
            "a label is absent, leave those records out"
        )
    if data.labels is None and not data.parts and (question := counting(trained)):
        warn(f"the labels in {data.target or data.columns.label!r} are {question}")
    absent = in_order(set(labels) - set(trained))
    if absent:
        warn(f"no training record has the label {', '.join(absent)}")
