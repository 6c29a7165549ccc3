"""Get what a workload learns from: a bundled text, a file, or a data set of the Hugging Face hub, fetched once.

A .parquet file's column "text" is the text, a line a row; a data set's split "train" is kept as such a file in our
cache.
"""

from __future__ import annotations

import codecs
import lzma
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from testbed import paths, results
from testbed.errors import SpecError
from testbed.workloads import texts
from testbed.workloads.texts import HubSet, Use

ASSETS = Path(__file__).parent / "assets"
_BLOCK = 1 << 20
_ANSWER_S = 10.0
"""How long the hub has to answer at all; libraries try again and again, for minutes."""
_INSTEAD: dict[Use, str] = {"text": "the path of a .parquet or text file", "images": f"{texts.DIGITS!r}"}
"""What needs no hub."""


def text_file(text: str, cache: Path) -> Path:
    """Return the file that holds a text. A data set of the hub is fetched if it is not below `cache`. SpecError."""
    texts.check_text_name(text)
    if hub := texts.hub_set(text, "text"):
        path = cache / "texts" / f"{hub.file_name}.parquet"
        if not path.is_file():
            _fetch_text(hub, path)
        return path
    return ASSETS / texts.BUNDLED[text] if text in texts.BUNDLED else Path(text)


def write_plain_text(path: Path, target: Path) -> None:
    """Write a text as plain UTF-8 to `target`: unpacked, a line a row, or as it is. SpecError when that is not what it
    holds.
    """
    done = 0
    decoder = codecs.getincrementaldecoder("utf8")()
    with target.open("wb") as copy:
        try:
            for block in _rows(path) if path.suffix == ".parquet" else _blocks(path):
                decoder.decode(block)
                copy.write(block)
                done += len(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise SpecError(
                f"text {path} is not UTF-8: {error.reason} within the {_BLOCK} bytes after byte {done}; "
                "convert it first"
            ) from None
        except (lzma.LZMAError, EOFError) as error:
            raise SpecError(f"text {path} is not a whole .xz file: {error}") from None
    if done == 0:
        raise SpecError(f"text {path} is empty")


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Give a scratch folder inside one of our cache, which is made where it is not there yet. SpecError where it cannot
    be.
    """
    results.make_folder(folder, "set XDG_CACHE_HOME to a folder of yours")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
        yield Path(scratch)


def place(draft: Path, path: Path) -> None:
    """Move a finished file to where stage hosts, which may be another user, read it."""
    draft.chmod(0o644)
    paths.give_to_user(draft)
    draft.replace(path)


# ------------------------------------------------------------------ files
def _blocks(path: Path) -> Iterator[bytes]:
    file: IO[bytes]
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _rows(path: Path) -> Iterator[bytes]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = {field.name: field.type for field in file.schema_arrow}
            if columns.get("text") not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                types = ", ".join(f"{name}: {kind}" for name, kind in columns.items())
                raise SpecError(f"text {path}: its columns are {types}; one must be text: string")
            for batch in file.iter_batches(columns=["text"]):
                for row in batch.column(0).drop_null():
                    line = row.as_py()
                    yield (line if line.endswith("\n") else line + "\n").encode()
    except (pyarrow.ArrowException, OSError) as error:
        raise SpecError(f"text {path} is not a whole .parquet file: {error}") from None


# ------------------------------------------------------------------ the hub
def _fetch_text(hub: HubSet, path: Path) -> None:
    rows = load_hub_set(hub, "text", "train")
    if "text" not in rows.column_names:
        raise SpecError(
            f"workload.text: data set {hub} has no column 'text'; its columns are {', '.join(rows.column_names)}"
        )
    with making(path.parent) as scratch:
        draft = scratch / path.name
        rows.select_columns(["text"]).to_parquet(draft)
        place(draft, path)


def load_hub_set(hub: HubSet, use: Use, split: str | None = None) -> Any:
    """Load a split of a data set, a `datasets.Dataset`, or all of them by name; fetched where `datasets` has not cached
    it. SpecError for one that cannot be had.
    """
    unreachable = _unreachable(hub, use)
    import datasets

    datasets.config.HF_HUB_OFFLINE = unreachable is not None  # then it looks into its cache, and asks nobody
    cache = os.environ.get("HF_DATASETS_CACHE") or os.fspath(texts.hub_home() / "datasets")
    try:
        return datasets.load_dataset(hub.name, hub.configuration, split=split, cache_dir=cache)
    except Exception as error:  # of many libraries; what is not there and what is broken look alike
        if unreachable is None:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise SpecError(f"workload.{use}: cannot load data set {hub} from the hub: {reason}") from None
        raise SpecError(
            f"workload.{use}: data set {hub} is not in {cache}, and the hub is out of reach ({unreachable}). Either "
            f"run this once with the hub in reach and without HF_HUB_OFFLINE; or copy that folder from a machine where "
            f"load_dataset({', '.join(repr(part) for part in hub if part)}) has run; or give {_INSTEAD[use]}"
        ) from None


def _unreachable(hub: HubSet, use: Use) -> str | None:
    """Say why the hub cannot be asked for a data set, or None. SpecError when it says that there is no such thing."""
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    api = huggingface_hub.HfApi()
    try:
        api.dataset_info(hub.name, timeout=_ANSWER_S)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.HFValidationError) as error:
        raise SpecError(
            f"workload.{use}: the hub does not give us data set {hub}: {' '.join(str(error).split())}"
        ) from None
    except Exception as error:  # whatever else happens on the way
        return f"{api.endpoint}: {type(error).__name__}: {error}"
    return None
