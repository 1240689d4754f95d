"""Learners of tables, by framework. Each imports its library when it learns."""

from steadytrain.components.tabular.learners.base import (
    Array,
    TableLearner,
    read_side,
    read_table,
)

__all__ = ["Array", "TableLearner", "read_side", "read_table"]
