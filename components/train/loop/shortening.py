"""Cut packed rows into shorter sequences, the last answer to memory that ran out.

Every row stays in its global batch. A document of more tokens than allowed becomes several ones, if
the task learns from any part of a document. Otherwise, its first tokens stay, as an answer needs
its prompt. Validation and evaluation keep complete rows, so that scores stay comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from steadytrain.components.tasks.base import Row
from steadytrain.components.train.loop.data import Rows

Places = list[tuple[int, int]]
"""The (start, tokens) of each document of a sequence, in its row."""


def cut_places(lengths: Sequence[int], longest: int, *, cuttable: bool) -> list[Places]:
    """Return the documents of each sequence that a packed row becomes, at least one.

    Args:
        lengths: tokens of each document in the row.
        longest: most tokens of a sequence.
        cuttable: whether the task learns from any part of a document.
    """
    result: list[Places] = [[]]
    start = filled = 0
    for length in map(int, lengths):
        end = start + (length if cuttable else min(length, longest))
        for first in range(start, end, longest):
            size = min(longest, end - first)
            if filled + size > longest:
                result.append([])
                filled = 0
            result[-1].append((first, size))
            filled += size
        start += length
    return result


def shortened(row: Row, longest: int, *, cuttable: bool) -> Iterator[Row]:
    """Yield a packed row as sequences of at most `longest` tokens.

    Args:
        row: as `documents.collate_rows` takes it.
        longest, cuttable: as for `cut_places`.
    """
    for places in cut_places(row["lengths"], longest, cuttable=cuttable):
        columns = {
            name: np.concatenate([row[name][:0], *(row[name][at : at + n] for at, n in places)])
            for name in ("input_ids", "targets")
        }
        yield {**row, **columns, "lengths": [size for _, size in places]}


def without_targets(row: Row) -> Row:
    """Return the first tokens of a packed row, from which nothing is learned."""
    ids = row["input_ids"][:2]
    return {**row, "input_ids": ids, "targets": np.zeros(len(ids)), "lengths": [len(ids)]}


def of_shortening(rows: Rows, longest: int, full: int, *, cuttable: bool) -> Iterator[str]:
    """Yield what is learned otherwise, if sequences are shortened.

    Args:
        rows: of the training side.
        longest: most tokens of a sequence; 0 means that nothing is shortened.
        full: tokens of a complete row.
        cuttable: as for `cut_places`.
    """
    if not longest:
        return
    columns = [pc.list_flatten(batch.column("lengths")) for batch in rows.batches]
    lengths = np.from_dlpack(pa.concat_arrays(columns)).astype(np.int64)
    long = lengths > longest
    left = int((lengths[long] - longest).sum())
    effect = f"{left:,} of {int(lengths.sum()):,} tokens are not learned"
    if cuttable:
        effect = "each part is learned without the tokens before it"
    yield (
        f"sequences have at most {longest:,} tokens instead of {full:,}, because longer ones did "
        f"not fit into memory (recovery.min_sequence_length): {int(long.sum()):,} of "
        f"{len(lengths):,} documents are cut, and {effect}. Validation has complete sequences"
    )
