"""Get a workload's data: a bundled text, a file, or a data set of the Hugging Face hub, fetched once.

A .parquet file's column "text" is the text, one line per row; a data set's split "train" is cached as such a file.
"""

from __future__ import annotations

import codecs
import lzma
import os
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
"""Timeout for the hub's first response; libraries retry for minutes."""
_INSTEAD: dict[Use, str] = {"text": "the path of a .parquet or text file", "images": f"{texts.DIGITS!r}"}
"""Alternatives that need no hub."""


def text_file(text: str, cache: Path) -> Path:
    """Return the file that holds a text. A data set of the hub is fetched if it is not below `cache`. SpecError if
    unavailable.
    """
    texts.check_text_name(text)
    if hub := texts.hub_set(text, "text"):
        path = cache / "texts" / f"{hub.file_name}.parquet"
        if not path.is_file():
            _fetch_text(hub, path)
        return path
    return ASSETS / texts.BUNDLED[text] if text in texts.BUNDLED else Path(text)


def write_plain_text(path: Path, target: Path) -> None:
    """Write a text as plain UTF-8 to `target`: unpacked, one line per row, or unchanged. SpecError otherwise."""
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
                f"text {path} is not UTF-8: {error.reason} within the {_BLOCK} bytes after byte {done}; convert it to "
                "UTF-8"
            ) from None
        except (lzma.LZMAError, EOFError) as error:
            raise SpecError(f"text {path} is not a complete .xz file: {error}") from None
    if done == 0:
        raise SpecError(f"text {path} is empty")


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Make a scratch folder inside a cache folder, which is created if missing. SpecError where that fails."""
    results.make_folder(folder, "set XDG_CACHE_HOME to a folder that you can write to")
    with paths.scratch_folder(".making-", folder) as scratch:
        yield scratch


def place(draft: Path, path: Path) -> None:
    """Move a finished file to where stage hosts, possibly of another user, can read it."""
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
        raise SpecError(f"text {path} is not a complete .parquet file: {error}") from None


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
    """Load a split of a data set, a `datasets.Dataset`, or all of them by name; fetched unless `datasets` has cached
    it. SpecError for an unavailable one.
    """
    unreachable = _unreachable(hub, use)
    import datasets

    datasets.config.HF_HUB_OFFLINE = unreachable is not None  # offline: use the cache only
    cache = os.environ.get("HF_DATASETS_CACHE") or os.fspath(texts.hub_home() / "datasets")
    try:
        return datasets.load_dataset(hub.name, hub.configuration, split=split, cache_dir=cache)
    except Exception as error:  # from many libraries; missing and broken data look alike
        if unreachable is None:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise SpecError(f"workload.{use}: cannot load data set {hub} from the hub: {reason}") from None
        raise SpecError(
            f"workload.{use}: data set {hub} is not in {cache}, and the hub is unreachable ({unreachable}). Run this "
            "once with access to the hub and without HF_HUB_OFFLINE; or copy that folder from a machine that has run "
            f"load_dataset({', '.join(repr(part) for part in hub if part)}); or use {_INSTEAD[use]}"
        ) from None


def _unreachable(hub: HubSet, use: Use) -> str | None:
    """Return why the hub is unreachable, or None. SpecError when it reports that the data set does not exist."""
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    api = huggingface_hub.HfApi()
    try:
        api.dataset_info(hub.name, timeout=_ANSWER_S)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.HFValidationError) as error:
        raise SpecError(f"workload.{use}: the hub refuses data set {hub}: {' '.join(str(error).split())}") from None
    except Exception as error:  # any other failure
        return f"{api.endpoint}: {type(error).__name__}: {error}"
    return None
