"""Writes the tables as CSV or Parquet files, or converts them to pandas frames."""

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
from testbed.export.rows import MAKERS, RecordedRun
from testbed.results import Run

Format = Literal["csv", "parquet"]
DICTIONARY = "columns.csv"
"""The file that describes the columns of the tables: table, column, pandas type, meaning."""


def _batch(table: str, recorded: RecordedRun) -> Any:
    return pa.RecordBatch.from_pylist(list(MAKERS[table](recorded)), schema=schema(table))


def _writer(path: Path, table: str, form: Format) -> Any:
    if form == "csv":
        return pa.csv.CSVWriter(path, schema(table))
    return pa.parquet.ParquetWriter(path, schema(table), compression="zstd")


def write_tables(runs: Iterable[Run], folder: Path, form: Format) -> list[Path]:
    """Write one file per table, and a description of their columns, into an existing folder; return the files.

    Holds one run at a time in memory. SpecError if a file cannot be written.
    """
    files = {table: folder / f"{table}.{form}" for table in TABLES}
    dictionary = folder / DICTIONARY
    try:
        with ExitStack() as stack:
            writers = {table: stack.enter_context(_writer(path, table, form)) for table, path in files.items()}
            for recorded in map(RecordedRun, runs):
                for table, writer in writers.items():
                    batch = _batch(table, recorded)
                    if batch.num_rows:
                        writer.write_batch(batch)
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
    batches = [_batch(table, recorded) for recorded in map(RecordedRun, runs)]
    return pa.Table.from_batches(batches, schema=schema(table)).to_pandas(types_mapper=pandas_type)


def pandas_type(kind: Any) -> Any:
    """Return the pandas type for a pyarrow type that may have missing values; None: pyarrow's own choice."""
    import pandas

    return {pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}.get(kind)
