"""Divide the training side into folds for cross-validation, or preview them without preparing."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.preprocess.duplicates import KEPT
from steadytrain.components.preprocess.inputs import inputs_of
from steadytrain.components.preprocess.parallel import workers, worth_starting
from steadytrain.components.preprocess.prepare import training_records
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.split import SIDES
from steadytrain.components.preprocess.spool import Spool
from steadytrain.components.preprocess.survey import check_sides, set_aside, survey
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.tune import CrossValidationConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import Encoder, class_reader, has_label_sets

_EARLIER: Final = 2
"""Parts before the one that the first fold in time is tested on: to train, and to validate."""
_REMEDY: Final = (
    "lower cross_validation.folds (of a search, automl.quality: fast has 4), or give more data"
)


@dataclass(frozen=True)
class Division:
    """The fold of each document of the training side.

    sizes: documents of each fold, or of each part of `in_time`.
    warning: what is odd about it; "" if nothing is.
    shortest: in time, how many times the shortest series has in the first part.
    """

    fold_of: Mapping[str, int]
    sizes: Sequence[int]
    warning: str
    shortest: int | None = None

    @classmethod
    def all_of(
        cls,
        records: Callable[[], Iterable[pa.Table]],
        chosen: CrossValidationConfig,
        salt: str,
        encoder: Encoder,
    ) -> list[Division]:
        """Divide documents as often as asked, each time in another order, or once in time.

        Args:
            records: see `of` and `in_time`.

        Raises:
            BadInput, DataError: as for `assign` and `in_time`.
        """
        if hasattr(encoder, "parts_in_time"):
            return [cls.in_time(records(), encoder, chosen.folds)]
        labeled = encoder.labeled
        salts = [salt, *(f"{salt}\0{number}" for number in range(1, chosen.repeats))]
        return [cls.of(records(), chosen.folds, each, labeled=labeled) for each in salts]

    @classmethod
    def of(cls, records: Iterable[pa.Table], folds: int, salt: str, *, labeled: bool) -> Division:
        """Divide documents.

        Args:
            records: tables with the columns id, group and, if labeled, label: a class, or a list of
                them. The rarest of a list counts.

        Raises:
            BadInput, DataError: as for `assign`.
        """
        columns: dict[str, list[Any]] = {
            "id": [],
            "group": [],
            **({"label": []} if labeled else {}),
        }
        for table in records:
            for name, values in columns.items():
                values += table.column(name).to_pylist()
        counts, labels = _single(columns.get("label"))
        fold_of = assign(columns["id"], labels, columns["group"], folds=folds, salt=salt)
        folds_of = [fold_of[document] for document in columns["id"]]
        sizes = Counter(folds_of)
        rare = sorted(label for label, count in counts.items() if count < folds)
        odd = [_torn(columns["group"], folds_of)]
        if rare:
            odd.append(
                f"there are fewer than {folds} training records with the label {', '.join(rare)}, "
                "so that some folds have none"
            )
        if alone := sorted(label for label, count in counts.items() if count == 1):
            odd.append(
                f"a single training record has the label {', '.join(alone)}; models that need a "
                "record of each fail on the fold that it is in"
            )
        sized = [sizes[fold] for fold in range(folds)]
        return cls(fold_of, sized, "; ".join(filter(None, odd)))

    @classmethod
    def in_time(cls, records: Iterable[pa.Table], encoder: Any, folds: int) -> Division:
        """Divide documents by time into `folds` + 2 parts, for rolling-origin folds.

        Args:
            records: tables with the columns id and those of `Encoder.test_columns`.
            encoder: has `parts_in_time`.

        Raises:
            DataError: there are too few times.
        """
        whole = pa.concat_tables(records)
        parts, shortest = encoder.parts_in_time(whole, folds)
        sizes = Counter(parts)
        ids: list[Any] = whole.column("id").to_pylist()
        fold_of = dict(zip(ids, parts, strict=True))
        late = _later_labels(whole.column("label").to_pylist(), parts) if encoder.labeled else []
        warning = (
            f"no record that the first fold learns from has the label {', '.join(late)}, which "
            "only later ones have; models that need a record of each fail on that fold"
        )
        sized = [sizes[part] for part in range(folds + _EARLIER)]
        return cls(fold_of, sized, warning if late else "", shortest)

    def divide(self, part: Path, key: str, first: int = 0) -> list[Path]:
        """Write the rows of an Arrow file to a file for each fold next to it.

        Args:
            key: column with the document of a row.
            first: number of the first fold, after those of other divisions.
        """
        numbers = range(first, first + len(self.sizes))
        paths = [part.with_name(f"fold-{fold}-{part.name}") for fold in numbers]
        with pa.memory_map(str(part)) as source, ExitStack() as stack:
            reader = pa.ipc.open_file(source)
            writers = [
                stack.enter_context(pa.ipc.new_file(str(path), reader.schema)) for path in paths
            ]
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                documents: list[Any] = batch.column(key).to_pylist()
                folds = np.array([self.fold_of[document] for document in documents])
                for fold, writer in enumerate(writers):
                    writer.write_batch(batch.filter(pa.array(folds == fold, pa.bool_())))
        return paths


def _torn(groups: Sequence[str | None], folds: Sequence[int]) -> str:
    """Return which groups are in several folds; "" if none is.

    Equal records stay together, and those of one document may belong to several groups.
    """
    found = defaultdict[str, set[int]](set)
    for group, fold in zip(groups, folds, strict=True):
        if group:
            found[group].add(fold)
    if not (torn := sorted(group for group, where in found.items() if len(where) > 1)):
        return ""
    return (
        f"{len(torn):,} of {len(found):,} groups are in several folds, such as {torn[0][:80]!r}, "
        "since records of theirs equal those of other groups, and equal records are kept together; "
        "scores on the folds may be too good"
    )


def _later_labels(labels: Sequence[Any], parts: Sequence[int]) -> list[str]:
    """Return the classes that the first part in time does not have."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for label, part in zip(labels, parts, strict=True):
        found[part == 0].update(label if isinstance(label, list) else [label])
    return sorted(found[False] - found[True])


def _single(labels: list[Any] | None) -> tuple[Counter[str], list[str] | None]:
    """Return how often each class occurs, and one class of each record."""
    if labels is None:
        return Counter(), None
    sets: list[list[str]] = [label if isinstance(label, list) else [label] for label in labels]
    counts = Counter(label for one in sets for label in one)
    return counts, [min(one, key=lambda label: (counts[label], label), default="") for one in sets]


def read_table(path: Path) -> pa.Table:
    """Return the raw records in a file."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def assign(
    documents: Sequence[str],
    labels: Sequence[str] | None,
    groups: Sequence[str | None],
    *,
    folds: int,
    salt: str,
) -> dict[str, int]:
    """Return the fold of each document, by scikit-learn's splitters.

    It depends on the set of documents and the salt, not on their order.

    Args:
        labels: to stratify by; None if the documents have none.
        groups: of each document; None for one that belongs to no group.

    Raises:
        BadInput: scikit-learn is not installed.
        DataError: there are too few documents or groups, or each label has too few documents.
    """
    order = sorted(range(len(documents)), key=lambda row: _order_key(salt, documents[row]))
    names = [groups[row] or f"\0{documents[row]}" for row in order]
    # Numbers in this order, because the splitters sort groups of equal size by their names.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    units = [numbers[name] for name in names]
    classes = [labels[row] for row in order] if labels is not None else [""] * len(order)
    if len(numbers) < folds:
        what = "groups" if any(groups) else "records"
        raise DataError(
            f"the training side has {len(numbers)} {what}, and cross_validation.folds is {folds}",
            remedy=_REMEDY,
        )
    if max(Counter(classes).values()) < folds:
        raise DataError(
            f"each label has fewer than cross_validation.folds = {folds} training records",
            remedy=_REMEDY,
        )
    result = dict[str, int]()
    splitter = _splitter(folds, grouped=any(groups), stratified=len(set(classes)) > 1)
    # It warns of rare labels, as the caller does.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        for fold, (_, rows) in enumerate(splitter.split(classes, classes, units)):
            result |= {documents[order[row]]: fold for row in rows}
    if len(set(result.values())) < folds:
        raise DataError(
            f"the groups cannot be divided among {folds} folds: one would be empty", remedy=_REMEDY
        )
    return result


def joined(sides: Sequence[SideRecord]) -> SideRecord:
    """Return several folds as one side. It has no index: each fold has its own."""
    return SideRecord(
        shards=[shard for side in sides for shard in side.shards],
        rows=sum(side.rows for side in sides),
        documents=sum(side.documents for side in sides),
        tokens=sum(side.tokens for side in sides),
        target_tokens=sum(side.target_tokens for side in sides),
    )


def holding_out(data: DataRecord, chosen: CrossValidationConfig) -> DataRecord:
    """Return the data of a run that holds out a fold; all data if it holds out none.

    The fold takes the place of the test side, which the record no longer names.
    """
    fold = chosen.fold
    if fold is None:
        return data
    sides = [item.side for item in data.folds]
    if len(data.folds) > chosen.splits:
        # In time, there are parts before the first fold, and what follows the fold is not used.
        held = data.folds[fold + _EARLIER]
        changed = {"train": joined(sides[: fold + 1]), "validation": sides[fold + 1]}
    else:
        held, first = data.folds[fold], fold - fold % chosen.folds
        others = [sides[n] for n in range(first, first + chosen.folds) if n != fold]
        changed = {"train": joined(others)}
    return data.model_copy(
        update={
            "fingerprint": value_digest([data.fingerprint, fold]),
            "split_digest": value_digest([data.split_digest, chosen.folds, fold]),
            "sides": {**data.sides, **changed, "test": held.side},
            "test_records": held.records,
            "folds": [],
            "learned_until": None,
            "tested_from": None,
        }
    )


def _order_key(salt: str, document: str) -> bytes:
    return hashlib.sha256(f"{salt}\0{document}".encode()).digest()


def _splitter(folds: int, *, grouped: bool, stratified: bool) -> Any:
    try:
        from sklearn.model_selection import (
            GroupKFold,
            KFold,
            StratifiedGroupKFold,
            StratifiedKFold,
        )
    except ImportError as error:
        raise BadInput(
            "folds are made by the package scikit-learn, which is not installed",
            remedy="pip install 'steadytrain[train]'",
        ) from error
    if grouped:
        return (StratifiedGroupKFold if stratified else GroupKFold)(folds)
    return (StratifiedKFold if stratified else KFold)(folds)


_MOST: Final = 256_000_000
"""Bytes of data that are read for that."""


@dataclass(frozen=True)
class Preview:
    """The folds as they are before records are encoded, which may leave some out.

    sizes: records of each fold.
    shortest: the fewest times that a fold learns a series from; None without series.
    labels: number of labels, of records with any number of them; otherwise 0.
    records: of the training side, which in time has some before those of the first fold.
    """

    sizes: tuple[int, ...]
    warnings: tuple[str, ...]
    records: int
    shortest: int | None = None
    labels: int = 0


def preview_folds(config: RunConfig) -> Preview:
    """Divide the training side as the preprocess step does. Nothing is kept.

    Args:
        config: of a run that holds out a fold.

    Raises:
        DataError: the step would reject the data.
        BadInput, StorageError: they cannot be read here, or are too large for that.
    """
    encoder = open_encoder(config.data)
    inputs = inputs_of(config)
    stored = inputs.stored_bytes
    if stored is None or stored > _MOST:
        raise BadInput(
            "the data are not on this machine"
            if stored is None
            else f"the data have {size(stored)}, and at most {size(_MOST)} are read"
        )
    warnings = list[str]()
    with tempfile.TemporaryDirectory() as name, workers(worth_starting(stored)) as pool:
        scratch = Path(name)
        quarantine = Quarantine(scratch / "quarantine.jsonl")
        spool = Spool(scratch / "spool", inputs.bytes)
        try:
            surveyed = survey(
                config,
                encoder,
                inputs,
                spool=spool,
                quarantine=quarantine,
                scratch=scratch,
                workers=pool,
                progress=lambda *_: None,
                warn=warnings.append,
            )
        except DataError as error:
            if quarantine.defects:
                error.remedy += "; a real run keeps that file"
            raise
        finally:
            spool.close()
            quarantine.close()
        kept = surveyed.findings.sides[surveyed.findings.codes == KEPT]
        counts = np.bincount(kept, minlength=len(SIDES)).tolist()
        documents = dict(zip(SIDES, counts, strict=True))
        counted = {**quarantine.counts, **set_aside(surveyed.findings)}
        check_sides(documents, config.data, counted, surveyed.given)
        division, *_ = Division.all_of(
            lambda: _records(spool, encoder),
            config.cross_validation,
            config.data.split_salt,
            encoder,
        )
        tested = division.sizes[_EARLIER if hasattr(encoder, "parts_in_time") else 0 :]
    if division.warning:
        warnings.append(division.warning)
    if defects := quarantine.warning(surveyed.reading.records):
        warnings.append(defects)
    sets = surveyed.reading.labels.values() if has_label_sets(encoder) else ()
    labels = {*itertools.chain.from_iterable(map(class_reader(encoder), sets))}
    return Preview(
        tuple(tested), tuple(warnings), sum(division.sizes), division.shortest, len(labels)
    )


def _records(spool: Spool, encoder: Encoder) -> Iterator[pa.Table]:
    for part in spool.written():
        read = training_records(part, spool.folder)
        table = read.select(["id", "group", "label"])
        if hasattr(encoder, "parts_in_time"):
            columns = encoder.test_columns(read.select(["content", "label", "attachment"]))
            table = pa.table({"id": table["id"], **columns})
        elif has_label_sets(encoder):
            labels: list[Any] = table["label"].to_pylist()
            sets = [*map(class_reader(encoder), labels)]
            table = table.set_column(2, "label", pa.array(sets, pa.list_(pa.string())))
        ids: list[Any] = table["id"].to_pylist()
        yield table.set_column(0, "id", pa.array([one.hex() for one in ids], pa.string()))
