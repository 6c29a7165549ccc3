"""Get a workload's data: a bundled text, files, or a data set of the Hugging Face hub, fetched once.

A .parquet file's column "text", or else its only column of strings, is the text, one line per row; a data set's split
"train" is cached as such a file. A .bin file is tokens: ids without a header.
"""

from __future__ import annotations

import codecs
import io
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from testbed import paths, results
from testbed.errors import SpecError
from testbed.workloads import texts
from testbed.workloads.texts import HubSet, Use

ASSETS = Path(__file__).parent / "assets"
_BLOCK = 1 << 20
_ROWS = 1024
"""Rows of a .parquet file in memory at once; a row may be a long document."""
_ANSWER_S = 10.0
"""Timeout for the hub's first response; libraries retry for minutes."""
_INSTEAD: dict[Use, str] = {"text": "the path of a .parquet or text file", "images": f"{texts.DIGITS!r}"}
"""Alternatives that need no hub."""


def text_files(text: str, cache: Path) -> list[Path]:
    """Return the files that hold a text, in order. A data set of the hub is fetched if it is not below `cache`.
    SpecError if unavailable.
    """
    if hub := texts.hub_set(text, "text"):
        path = cache / "texts" / f"{hub.file_name}.parquet"
        if not path.is_file():
            _fetch_text(hub, path)
        return [path]
    return [ASSETS / texts.BUNDLED[text]] if text in texts.BUNDLED else texts.local_files(text)


def read_text(files: Sequence[Path], show: Callable[[float], None]) -> Iterator[str]:
    """Yield a text in pieces: its files one after another, unpacked, with newlines as line ends. The last line of each
    file but the last also ends with one. `show` receives the share of the files that is read. SpecError for other
    content.
    """
    read, last, total = 0, "", sum(path.stat().st_size for path in files)
    for path in files:
        done, ended = 0, last.endswith("\n") or not last
        lines = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf8")(), translate=True)
        try:
            for block, place in _rows(path) if path.suffix == ".parquet" else _blocks(path):
                piece = lines.decode(block, final=not block)
                done += len(block)
                if piece:
                    yield piece if ended else "\n" + piece
                    ended, last = True, piece
                show((read + place) / max(1, total))
        except UnicodeDecodeError as error:
            raise SpecError(
                f"text {path} is not UTF-8: {error.reason} within the {_BLOCK} bytes after byte {done}; convert it to "
                "UTF-8"
            ) from None
        except (lzma.LZMAError, EOFError) as error:
            raise SpecError(f"text {path} is not a complete .xz file: {error}") from None
        read += place
    if not last:
        raise SpecError(f"text {' + '.join(map(os.fspath, files))} is empty")


def read_tokens(
    files: Sequence[Path], kind: type[np.unsignedinteger], vocabulary: int
) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Yield the ids in .bin files, one after another, each of `kind`, little-endian, without a header. SpecError for an
    id outside of the vocabulary.
    """
    item = np.dtype(kind).newbyteorder("<")
    for path in files:
        if path.stat().st_size % item.itemsize or not path.stat().st_size:
            raise SpecError(f"text {path} has {path.stat().st_size} bytes, which are not ids of {item.itemsize} bytes")
        with path.open("rb") as file:
            while len(ids := np.fromfile(file, item, _BLOCK)):
                if (largest := int(ids.max())) >= vocabulary:
                    raise SpecError(
                        f"text {path} has the id {largest}, but the model knows {vocabulary} tokens; write the ids of "
                        f"its own tokenizer, {item.itemsize} bytes each, little-endian, without a header"
                    )
                yield ids


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
def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of a file, unpacked, with how many of its bytes were read by then; an empty one last."""
    file: IO[bytes]
    with path.open("rb") as raw, lzma.open(raw) if path.suffix == ".xz" else nullcontext(raw) as file:
        while block := file.read(_BLOCK):
            yield block, raw.tell()
        yield b"", raw.tell()


def _rows(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the rows of a .parquet file as `_blocks` does."""
    import pyarrow
    from pyarrow import parquet

    strings = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    size, done = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = {field.name: field.type for field in file.schema_arrow}
            able = [name for name, kind in columns.items() if kind in strings]
            if "text" not in able and len(able) != 1:
                types = ", ".join(f"{name}: {kind}" for name, kind in columns.items())
                raise SpecError(f"text {path}: its columns are {types}; one must be text: string, or the only string")
            for batch in file.iter_batches(_ROWS, columns=["text" if "text" in able else able[0]]):
                rows = batch.column(0).drop_null().to_pylist()
                done += batch.num_rows
                block = "".join(row if row.endswith("\n") else row + "\n" for row in rows).encode()
                if block:
                    yield block, size * done // file.metadata.num_rows
            yield b"", size
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
