"""Make a token file from a text, once: `python -m testbed.workloads.prepare --text bundled --model gpt2-mini`.

The text goes through `datasets` and the model's tokenizer into a .npy of uint16 or uint32 ids, named by the content of both, in
our cache. A second call finds it there and imports none of torch, transformers, datasets and tokenizers.
"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from testbed import paths, results
from testbed.errors import SpecError, TestbedError
from testbed.workloads import table, windows

VERSION = 1
"""Part of every name: raise it when the same text would give other tokens."""
ASSETS = Path(__file__).parent / "assets"
_TEXT, _TOKENIZER = ASSETS / "sotu_half.txt.xz", ASSETS / "bpe4096.json"
_CHUNK_CHARACTERS = 1 << 16
"""Lines are tokenised together until they have so many: tokens never span the end of a line where one chunk follows another.
Millions of characters at once, as in texts with long lines, never came to an end in user-mode Linux."""
_BLOCK = 1 << 20


class Prepared(NamedTuple):
    """A token file."""

    path: Path
    """A one-dimensional .npy of uint16 or uint32."""
    tokens: int
    vocabulary: int
    """Tokens that the tokenizer has."""


def prepare(text: str, model: str, cache: Path) -> Prepared:
    """The token file of a text ('bundled' or the path of a UTF-8 file) for a model, made below `cache` where it is not there yet.

    The file may be compressed with xz. Line ends become newlines, as `datasets` reads text. Nothing is downloaded.
    SpecError for a text or tokenizer that cannot be read.
    """
    source, tokenizer = _source(text), _tokenizer_file(model)
    name = hashlib.sha256(f"{VERSION} {_digest(source)} {_digest(tokenizer)}".encode()).hexdigest()[:32]
    folder = cache / "tokens"
    path, description = folder / f"{name}.npy", folder / f"{name}.json"
    if not (path.is_file() and description.is_file()):
        results.make_folder(folder, "set XDG_CACHE_HOME to a folder of yours")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
            ids, vocabulary = _tokenise(source, tokenizer, Path(scratch))
            np.save(draft := Path(scratch) / path.name, ids)
            _place(draft, path)
            draft = Path(scratch) / description.name
            draft.write_text(
                json.dumps({"text": text, "model": model, "tokens": len(ids), "vocabulary": vocabulary}, indent=1) + "\n"
            )
            _place(draft, description)  # last: where it is, the token file is whole
    found = json.loads(description.read_text(encoding="utf8"))
    return Prepared(path, int(found["tokens"]), int(found["vocabulary"]))


# ------------------------------------------------------------------ what is read
def _source(text: str) -> Path:
    path = _TEXT if text == "bundled" else Path(text)
    if not path.is_file():
        raise SpecError(f"workload.text: there is no file {text!r}; give the path of a text file, or 'bundled'")
    return path


def _tokenizer_file(model: str) -> Path:
    if model in table.SIZES:
        return _TOKENIZER
    path = table.checkpoint_folder(model) / "tokenizer.json"
    if not path.is_file():
        raise SpecError(
            f"model {model!r} has no {path}; transformers makes it: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({os.fspath(path.parent)!r})"
        )
    return path


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None


def _copy_checked(source: Path, target: Path) -> None:
    """Unpack or copy a text, making sure that it is UTF-8 with something in it."""
    decoder, done = codecs.getincrementaldecoder("utf8")(), 0
    with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as file, target.open("wb") as copy:
        try:
            for block in _blocks(file):
                decoder.decode(block)
                copy.write(block)
                done += len(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise SpecError(
                f"text {source} is not UTF-8: {error.reason} within the {_BLOCK} bytes after byte {done}; convert it first"
            ) from None
        except (lzma.LZMAError, EOFError) as error:
            raise SpecError(f"text {source} is not a whole .xz file: {error}") from None
    if done == 0:
        raise SpecError(f"text {source} is empty")


# ------------------------------------------------------------------ what is made
def _chunks(lines: Iterable[str]) -> Iterator[str]:
    waiting: list[str] = []
    size = 0
    for line in lines:
        waiting.append(line)
        size += len(line)
        if size >= _CHUNK_CHARACTERS:
            yield "".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield "".join(waiting)


def _tokenise(source: Path, tokenizer_file: Path, scratch: Path) -> tuple[npt.NDArray[np.unsignedinteger], int]:
    """(ids, vocabulary). Everything that `datasets` keeps goes into `scratch`."""
    import datasets
    from tokenizers import Tokenizer

    _copy_checked(source, scratch / "text.txt")
    try:
        tokenizer = Tokenizer.from_file(os.fspath(tokenizer_file))
    except Exception as error:  # tokenizers raises the bare class
        raise SpecError(f"{tokenizer_file} is not a tokenizer: {error}") from None
    vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    lines = datasets.load_dataset(
        "text",
        data_files=os.fspath(scratch / "text.txt"),
        split="train",
        keep_linebreaks=True,
        cache_dir=os.fspath(scratch / "datasets"),
    )
    texts = (line["text"] for line in lines)
    ids = [np.array(tokenizer.encode(chunk, add_special_tokens=False).ids, kind) for chunk in _chunks(texts)]
    return np.concatenate(ids), vocabulary


def _place(draft: Path, path: Path) -> None:
    """Stage hosts, which may be another user, read it."""
    draft.chmod(0o644)
    paths.give_to_user(draft)
    draft.replace(path)


# ------------------------------------------------------------------ command
def _number(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON line: path, tokens, vocabulary. Errors go to stderr as one message; the status is the error's."""
    parser = argparse.ArgumentParser(prog="python -m testbed.workloads.prepare", description="Make a token file from a text.")
    parser.add_argument("--text", required=True, help="'bundled', or the path of a UTF-8 text file")
    parser.add_argument("--model", required=True, help="whose tokenizer: a named size, or a checkpoint's folder or cached id")
    parser.add_argument("--cache", type=Path, default=None, help="folder to keep it in; default: that of testbed")
    parser.add_argument("--sequence-length", type=_number, help="with the next two: make sure that the text is long enough")
    parser.add_argument("--batch-size", type=_number, default=1)
    parser.add_argument("--validation-batches", type=_number, default=1)
    asked = parser.parse_args(arguments)
    # A local file is all that is read; without these, libraries ask the network about it.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    try:
        found = prepare(asked.text, asked.model, asked.cache or paths.cache_folder())
        if asked.sequence_length:
            windows.check(
                found.tokens,
                sequence_length=asked.sequence_length,
                batch_size=asked.batch_size,
                validation_batches=asked.validation_batches,
            )
    except TestbedError as error:
        sys.stderr.write(f"testbed: error: {error}\n")
        return error.exit_status
    sys.stdout.write(
        json.dumps({"path": os.fspath(found.path.resolve()), "tokens": found.tokens, "vocabulary": found.vocabulary}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
