"""Build the prepared data, from the first byte read to the data card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import pyarrow.compute as pc

from steadytrain.components.pages.data_section import DataCard
from steadytrain.components.preprocess.data_card import (
    card_html,
    distribution,
    documents_of,
    side_card,
)
from steadytrain.components.preprocess.folds import Division, joined, read_table
from steadytrain.components.preprocess.inputs import Inputs
from steadytrain.components.preprocess.model import SAMPLE_BYTES, Model, make_tokenizer
from steadytrain.components.preprocess.parallel import Workers, workers, worth_starting
from steadytrain.components.preprocess.prepare import (
    DOCUMENT,
    PREDICTED,
    PartJob,
    SideCounts,
    prepare,
    row_schema,
    training_texts,
)
from steadytrain.components.preprocess.quarantine import Quarantine
from steadytrain.components.preprocess.reading import Reading, check_defects
from steadytrain.components.preprocess.shards import write_packed, write_rows
from steadytrain.components.preprocess.split import SIDES, split_digest
from steadytrain.components.preprocess.spool import Spool
from steadytrain.components.preprocess.survey import Survey, check_sides, survey
from steadytrain.components.shared.arrow_files import added_columns, join_files
from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import DATA_CODE, code_digest, file_digest, value_digest
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.left_out import LEFT_OUT, LONG, in_one_line, longer, unused_keys
from steadytrain.components.shared.records import DataRecord, FoldRecord, Side, SideRecord
from steadytrain.components.shared.stage import Stage
from steadytrain.components.tasks.encoding.base import (
    COLUMNS,
    Encoder,
    Fitted,
    RowEncoder,
    TokenizerSettings,
)
from steadytrain.components.tasks.encoding.fields import DEFECTS
from steadytrain.components.tasks.encoding.labeled_text import has_numbers
from steadytrain.components.tasks.encoding.tokens import cached_tokenizer

TEST_RECORDS: Final = "test-records.arrow"
TOKENIZER: Final = "tokenizer"


def build(
    config: RunConfig,
    encoder: Encoder,
    model: Model | None,
    inputs: Inputs,
    scratch: Path,
    current: Stage,
) -> DataRecord:
    """Prepare the data in <scratch>/data. Other folders in `scratch` hold intermediate results.

    Args:
        model: None if the task has no tokenizer.

    Returns:
        The record. Its folder is not the final one yet.

    Raises:
        DataError: the data cannot be used.
    """
    with workers(worth_starting(inputs.stored_bytes)) as pool:
        return _Builder(config, encoder, model, inputs, scratch, current, pool).build()


@dataclass
class _Builder:
    config: RunConfig
    encoder: Encoder
    model: Model | None
    inputs: Inputs
    scratch: Path
    current: Stage
    pool: Workers
    counts: dict[Side, SideCounts] = field(
        default_factory=lambda: {side: SideCounts() for side in SIDES}
    )

    def __post_init__(self) -> None:
        self.data = self.config.data
        self.folder = self.scratch / "data"
        self.parts = self.scratch / "parts"
        self.parts.mkdir()
        self.quarantine = Quarantine(self.folder / "quarantine.jsonl")
        self.spool = Spool(self.scratch / "spool", self.inputs.bytes)
        chosen = self.config.cross_validation
        self.folds = 0 if chosen.fold is None else chosen.splits
        self.added = added_columns(self.config.training)
        self.warnings = list[str]()

    def build(self) -> DataRecord:
        try:
            surveyed = survey(
                self.config,
                self.encoder,
                self.inputs,
                spool=self.spool,
                quarantine=self.quarantine,
                scratch=self.scratch,
                workers=self.pool,
                progress=self._progress,
                warn=self._warn,
            )
            reading, labels = surveyed.reading, surveyed.labels
            tokenizer = self._make_tokenizer()
            fitted = Fitted(tokenizer, tuple(labels), frozenset(surveyed.trained), self.scratch)
            names = self._encode(self.encoder.row_encoder(fitted))
            check_defects(self.data, self.quarantine, reading.records)
            documents = {side: count.documents for side, count in self.counts.items()}
            check_sides(documents, self.data, self.quarantine.counts, surveyed.given)
        finally:
            self.spool.close()
            self.quarantine.close()
        numbers = self._numbers(names)
        described = self._describe(names)
        folds = self._divide(names) if self.folds else []
        whole = [side for side in SIDES if side != "train" or not folds]
        sides = {side: self._pack(side, names) for side in whole}
        if folds:
            once = folds[: self.config.cross_validation.folds]
            sides["train"] = joined([fold.side for fold in once])
        join_files(self._parts("test-records", names), self.folder / TEST_RECORDS)
        split = split_digest(self.data, surveyed.given)
        record = self._record(sides, folds, surveyed, split)
        if absent := self._absent_tokens(names):
            self._warn(
                f"tokens of model.added_tokens that the training side does not have, so that "
                f"they stay as they begin: {listed(absent)}"
            )
        self._write_card(record, reading, numbers, described)
        return record

    def _make_tokenizer(self) -> Path | None:
        """Return the folder of the task's tokenizer, or None if it has none."""
        settings, folder = self.encoder.tokenizer, self.folder / TOKENIZER
        if settings is None:
            return None
        origin = self.model.tokenizer if self.model else None
        make_tokenizer(origin, self._sample(settings), folder, settings, self.config)
        return folder

    def _sample(self, settings: TokenizerSettings) -> Iterator[str]:
        """Yield texts of the training side, by content hash, up to SAMPLE_BYTES."""
        done = 0
        total = min(SAMPLE_BYTES, sum(path.stat().st_size for path in self.spool.written()))
        for part in self.spool.written():
            for text in training_texts(part, self.spool.folder, settings):
                if done >= SAMPLE_BYTES:
                    return
                done += len(text)
                yield text
            self._progress("training the tokenizer", min(done, total), total, "bytes")

    def _encode(self, rows: RowEncoder) -> list[str]:
        """Encode the parts one by one, and return their names in order."""
        jobs = [
            PartJob(
                part=part,
                spool=self.spool.folder,
                output=self.parts,
                encoder=self.encoder,
                rows=rows,
                records=("test", "train") if self.folds else ("test",),
                added=self.added,
                mixed=bool(self.data.mixture),
            )
            for part in self.spool.written()
        ]
        total, done = sum(job.part.stat().st_size for job in jobs), 0
        for job, prepared in zip(jobs, self.pool.map(prepare, jobs), strict=True):
            for side, counts in prepared.sides.items():
                self.counts[side].add(counts)
            self.quarantine.add(prepared.quarantine)
            done += job.part.stat().st_size
            self._progress("encoding", done, total, "bytes")
        return [job.part.stem for job in jobs]

    def _absent_tokens(self, names: list[str]) -> list[str]:
        """Return the tokens that the run adds and that no row of the training side has."""
        added = self.config.model.added_tokens
        if not added or "input_ids" not in self.encoder.schema.names:
            return []
        ids = cached_tokenizer(self.folder / TOKENIZER).convert_tokens_to_ids(added)
        absent = dict(zip(ids, added, strict=True))
        for part in self._parts("train", names):
            tokens = pc.unique(pc.list_flatten(read_table(part)["input_ids"])).to_pylist()
            absent = {token: name for token, name in absent.items() if token not in {*tokens}}
        return [*absent.values()]

    def _describe(self, names: list[str]) -> dict[str, Any]:
        """Write what the rows have in common, and return the fields of the data card for it."""
        describe = getattr(self.encoder, "describe", None)
        if describe is None:
            return {}
        sides = {side: map(read_table, self._parts(side, names)) for side in SIDES}
        description = describe(sides)
        content = description.model_dump_json(indent=1)
        (self.folder / COLUMNS).write_text(content, encoding="utf-8")
        for remark in description.remarks():
            self._warn(remark)
        # Only now is it known which columns are texts.
        if cut := getattr(self.encoder, "cut", None):
            tokenizer = cached_tokenizer(self.folder / TOKENIZER)
            for side in SIDES:
                rows = map(read_table, self._parts(side, names))
                self.counts[side].truncated = cut(description, rows, tokenizer)
        fields: dict[str, Any] = description.card()
        return fields

    def _numbers(self, names: list[str]) -> dict[Side, dict[str, float]]:
        """Return how the numbers to predict are distributed on each side, if records have them."""
        if not has_numbers(self.encoder):
            return {}
        result = dict[Side, dict[str, float]]()
        for side in SIDES:
            columns = [read_table(part)["label"] for part in self._parts(side, names)]
            result[side] = distribution(np.concatenate([column.to_numpy() for column in columns]))
        return result

    def _pack(self, side: Side, names: list[str]) -> SideRecord:
        self._progress("packing", SIDES.index(side), len(SIDES), "sides")
        counts = self.counts[side]
        sources = {name: counts.sources[name] for name in self.data.mixture}
        return self._write(side, self._parts(side, names), counts.documents, sources)

    def _write(
        self, side: str, parts: list[Path], documents: int, sources: Mapping[str, int] | None = None
    ) -> SideRecord:
        """Write the rows of a side. Of a mixture, `sources` has each data set's documents."""
        if self.encoder.packed:
            capacity = self.data.sequence_length
            return write_packed(
                side,
                parts,
                self.folder,
                capacity=capacity,
                documents=documents,
                sources=sources or {},
            )
        schema = row_schema(self.encoder, self.added)
        return write_rows(side, parts, self.folder, schema=schema, documents=documents)

    def _divide(self, names: list[str]) -> list[FoldRecord]:
        """Write the folds of the training side, division by division."""
        records = self._parts("train-records", names)
        divisions = Division.all_of(
            lambda: map(read_table, records),
            self.config.cross_validation,
            self.data.split_salt,
            self.encoder,
        )
        if warning := divisions[0].warning:
            self._warn(warning)
        result = list[FoldRecord]()
        for division in divisions:
            first = len(result)
            parts = self._parts("train", names)
            rows = [division.divide(part, DOCUMENT, first) for part in parts]
            texts = [division.divide(part, "id", first) for part in records]
            for index, documents in enumerate(division.sizes):
                self._progress(
                    "packing", len(result), len(divisions) * len(division.sizes), "folds"
                )
                name = f"fold-{first + index}"
                side = self._write(name, [part[index] for part in rows], documents)
                stored = f"{name}/records.arrow"
                join_files([part[index] for part in texts], self.folder / stored)
                result.append(FoldRecord(side=side, records=stored))
        return result

    def _parts(self, kind: str, names: list[str]) -> list[Path]:
        return [self.parts / f"{kind}-{name}.arrow" for name in names]

    def _record(
        self,
        sides: dict[Side, SideRecord],
        folds: list[FoldRecord],
        surveyed: Survey,
        split: str,
    ) -> DataRecord:
        labels = surveyed.labels
        text = self.encoder.tokenizer is not None
        tokenizer = sorted((self.folder / TOKENIZER).iterdir()) if text else []
        prepared = [
            *(name for side in sides.values() for name in (*side.shards, side.index) if name),
            *(name for fold in folds for name in (fold.side.index, fold.records)),
            TEST_RECORDS,
            *(f"{TOKENIZER}/{path.name}" for path in tokenizer),
            *(name for name in (COLUMNS,) if (self.folder / name).is_file()),
        ]
        content = {name: file_digest(self.folder / name) for name in prepared}
        return DataRecord(
            folder=str(self.folder),
            fingerprint=value_digest([content, split, labels, code_digest(*DATA_CODE)]),
            task=self.data.task,
            sides=sides,
            test_records=TEST_RECORDS,
            split_digest=split,
            sequence_length=self.data.sequence_length if text else 0,
            tokenizer=TOKENIZER if text else "",
            labels=labels,
            turn_ends=sorted(self.counts["train"].ends),
            profile=surveyed.reading.tally.profile(),
            folds=folds,
            learned_until=surveyed.learned_until,
            tested_from=surveyed.tested_from,
        )

    def _write_card(
        self,
        record: DataRecord,
        reading: Reading,
        numbers: Mapping[Side, Mapping[str, float]],
        described: dict[str, Any],
    ) -> None:
        settings, names = self.encoder.tokenizer, set(self.encoder.schema.names)
        threshold = self.data.near_duplicate_threshold if settings else None
        documents, picture = None, getattr(self.encoder, "picture", None)
        if settings and "input_ids" in names:
            tokenizer = cached_tokenizer(self.folder / TOKENIZER)
            documents = partial(documents_of, tokenizer=tokenizer, names=settings.documents)
        if defects := self.quarantine.warning(reading.records):
            self._warn(defects)
        if long := self._long(reading.records):
            self._warn(long)
        unprinted = sum((side.unprinted for side in self.counts.values()), Counter[str]())
        if keys := unused_keys(reading.unread, unprinted):
            self._warn(f"{keys}; the model does not see their values")
        counts, quarantine = self.counts, self.quarantine.counts
        marked = {"input_ids", PREDICTED} <= names
        card = DataCard(
            fingerprint=record.fingerprint,
            task=record.task,
            source=[address for _, address in self.data.addresses],
            sequence_length=record.sequence_length,
            trained_tokenizer=self.model is not None and self.model.tokenizer is None,
            left_out=dict(self.inputs.left_out),
            detected=dict(reading.detected),
            layouts=dict(reading.layouts),
            unused=dict(reading.unused.most_common()),
            records=reading.records,
            defective=sum(quarantine[reason] for reason in DEFECTS),
            duplicates={reason: quarantine[reason] for reason in LEFT_OUT},
            near_duplicate_threshold=threshold,
            quarantine=dict(quarantine.most_common()),
            unread_keys=dict(reading.unread),
            unprinted_keys=dict(unprinted),
            warnings=self.warnings,
            sides={
                side: side_card(
                    record, side, counts[side], numbers, documents, picture, marked=marked
                )
                for side in get_args(Side)
            },
            **described,
        )
        plain = card.model_dump()
        content = json.dumps(plain, indent=2, ensure_ascii=False)
        (self.folder / "card.json").write_text(content, encoding="utf-8")
        page = card_html(card, record, in_one_line(record, plain))
        (self.folder / "card.html").write_text(page, encoding="utf-8")

    def _long(self, records: int) -> str:
        """Return how many chats or pairs are longer than a row, and what became of them, or ""."""
        counts, how = self.quarantine.counts, self.data.fits_long_records
        cut = sum(side.truncated for side in self.counts.values())
        windowed = sum(side.windowed for side in self.counts.values())
        total = cut + windowed + sum(counts[reason] for reason in LONG)
        if not total or how is None:
            return ""
        return (
            f"{total:,} of {records:,} records are longer than data.sequence_length = "
            f"{self.data.sequence_length:,} (data.long_records: {how}): "
            f"{longer(cut, windowed, counts)}; a larger data.sequence_length learns more of them"
        )

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        self.current.emit(Warned(stage=self.current.name, message=message))

    def _progress(self, work: str, done: float, total: float | None, unit: str) -> None:
        self.current.progress(work, done, total, unit)
