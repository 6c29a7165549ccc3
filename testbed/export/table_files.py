"""Writes the tables as CSV or Parquet files, or converts them to pandas frames."""

from __future__ import annotations

import itertools
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
from testbed.export.rows import MAKERS, RecordedRun, Row
from testbed.results import Run

Format = Literal["csv", "parquet"]
DICTIONARY = "columns.csv"
"""The file that describes the columns of the tables: table, column, pandas type, meaning."""


_ROWS = 4096
"""Rows that are written together: each write has a cost of its own."""


def _batch(table: str, rows: Iterable[Row]) -> Any:
    return pa.RecordBatch.from_pylist(list(rows), schema=schema(table))


def _writer(path: Path, table: str, form: Format) -> Any:
    if form == "csv":
        return pa.csv.CSVWriter(path, schema(table))
    return pa.parquet.ParquetWriter(path, schema(table), compression="zstd")


def write_tables(runs: Iterable[Run], folder: Path, form: Format) -> list[Path]:
    """Write one file per table, and a description of their columns, into an existing folder; return the files.

    Holds few rows in memory. SpecError if a file cannot be written.
    """
    files = {table: folder / f"{table}.{form}" for table in TABLES}
    dictionary = folder / DICTIONARY
    try:
        with ExitStack() as stack:
            writers = {table: stack.enter_context(_writer(path, table, form)) for table, path in files.items()}
            waiting: dict[str, list[Row]] = {table: [] for table in writers}
            for recorded in itertools.chain(map(RecordedRun, runs), [None]):
                for table, rows in waiting.items():
                    rows += [] if recorded is None else MAKERS[table](recorded)
                    if len(rows) >= _ROWS or (rows and recorded is None):
                        writers[table].write_batch(_batch(table, rows))
                        rows.clear()
        pa.csv.write_csv(pa.table(_dictionary()), dictionary)
    except OSError as error:
        raise SpecError(f"cannot write the tables to {folder}: {error}; choose another folder with -o") from None
    for path in (*files.values(), dictionary):
        paths.give_to_user(path)
    return [*files.values(), dictionary]


def _dictionary() -> dict[str, list[str]]:
    every = [(table, *column) for table, columns in TABLES.items() for column in columns]
    tables, names, kinds, whats = map(list, zip(*every, strict=True))
    return {"table": tables, "column": names, "type": [PANDAS[kind] for kind in kinds], "what": whats}


def pandas_frame(table: str, runs: Iterable[Run]) -> Any:
    """Return one table as a pandas.DataFrame.

    Missing values turn neither counts into floats nor booleans into objects.
    """
    batches = [_batch(table, MAKERS[table](recorded)) for recorded in map(RecordedRun, runs)]
    return pa.Table.from_batches(batches, schema=schema(table)).to_pandas(types_mapper=pandas_type)


def pandas_type(kind: Any) -> Any:
    """Return the pandas type for a pyarrow type that may have missing values; None: pyarrow's own choice."""
    import pandas

    return {pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}.get(kind)
