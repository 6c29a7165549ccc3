"""Tables as CSV or Parquet files, and as pandas frames."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from testbed import paths
from testbed.errors import SpecError
from testbed.export.columns import PANDAS, TABLES, schema
from testbed.export.rows import MAKERS, Recorded
from testbed.results import Run

Format = Literal["csv", "parquet"]
DICTIONARY = "columns.csv"
"""Beside the tables: table, column, pandas' type, what it means."""


def _batch(table: str, one: Recorded) -> Any:
    return pa.RecordBatch.from_pylist(list(MAKERS[table](one)), schema=schema(table))


def _writer(path: Path, table: str, form: Format) -> Any:
    if form == "csv":
        return pa.csv.CSVWriter(path, schema(table))
    return pa.parquet.ParquetWriter(path, schema(table), compression="zstd")


def write(runs: Iterable[Run], folder: Path, form: Format) -> list[Path]:
    """Every table into an existing folder, a file each, and what their columns mean. Returns the files. SpecError when one
    cannot be written.

    A run at a time is held in memory.
    """
    files = {table: folder / f"{table}.{form}" for table in TABLES}
    dictionary = folder / DICTIONARY
    try:
        with ExitStack() as stack:
            writers = {table: stack.enter_context(_writer(path, table, form)) for table, path in files.items()}
            for one in map(Recorded, runs):
                for table, writer in writers.items():
                    batch = _batch(table, one)
                    if batch.num_rows:
                        writer.write_batch(batch)
        pa.csv.write_csv(pa.table(_dictionary()), dictionary)
    except OSError as error:
        raise SpecError(f"cannot write the tables to {folder}: {error}; choose another folder with -o") from None
    for path in (*files.values(), dictionary):
        paths.give_to_user(path)
    return [*files.values(), dictionary]


def _dictionary() -> dict[str, list[str]]:
    every = [(table, column) for table, columns in TABLES.items() for column in columns]
    return {
        "table": [table for table, _ in every],
        "column": [column.name for _, column in every],
        "type": [PANDAS[column.kind] for _, column in every],
        "what": [column.what for _, column in every],
    }


def frame(table: str, runs: Iterable[Run]) -> Any:
    """One table as a pandas.DataFrame. Counts and truth values that can be missing stay what they are."""
    batches = [_batch(table, one) for one in map(Recorded, runs)]
    return pa.Table.from_batches(batches, schema=schema(table)).to_pandas(types_mapper=pandas_type)


def pandas_type(kind: Any) -> Any:
    """Of a pyarrow type the pandas type that can miss values; None: as pyarrow has it."""
    import pandas

    return {pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}.get(kind)
