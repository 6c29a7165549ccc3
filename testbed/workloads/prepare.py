"""Make a token file from a text, once: `python -m testbed.workloads.prepare --text bundled --model gpt2-mini`.

The text goes through `datasets` and the model's tokenizer into a .npy of uint16 or uint32 ids, named by the content of
both, in our cache. A second call finds it there and imports none of torch, transformers, datasets and tokenizers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from testbed import paths, results
from testbed.errors import SpecError, TestbedError
from testbed.workloads import models, sources, texts, windows

VERSION = 1
"""Part of every name: raise it when the same text would give other tokens."""
_TOKENIZER = sources.ASSETS / "bpe4096.json"
_CHUNK_CHARACTERS = 1 << 16
"""Lines are tokenised together until they have so many: tokens never span the end of a line where one chunk follows
another. Millions of characters at once, as in texts with long lines, never came to an end in user-mode Linux."""


class Prepared(NamedTuple):
    """A token file."""

    path: Path
    """A one-dimensional .npy of uint16 or uint32."""
    tokens: int
    vocabulary: int
    """Tokens that the tokenizer has."""


def prepare_tokens(text: str, model: str, cache: Path) -> Prepared:
    """Return the token file of a text (see `TextSpec.text`) for a model, made below `cache` where it is not there
    yet.

    A file of text is UTF-8, and may be compressed with xz. Line ends become newlines, as `datasets` reads text. Nothing
    is downloaded but a data set of the hub, once. SpecError for a text or tokenizer that cannot be had or read.
    """
    source, tokenizer = sources.text_file(text, cache), tokenizer_file(model)
    name = hashlib.sha256(f"{VERSION} {paths.digest(source)} {paths.digest(tokenizer)}".encode()).hexdigest()[:32]
    folder = cache / "tokens"
    path, description = folder / f"{name}.npy", folder / f"{name}.json"
    if not (path.is_file() and description.is_file()):
        results.make_folder(folder, "set XDG_CACHE_HOME to a folder of yours")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
            ids, vocabulary = _tokenise(source, tokenizer, Path(scratch))
            np.save(draft := Path(scratch) / path.name, ids)
            sources.place(draft, path)
            draft = Path(scratch) / description.name
            draft.write_text(
                json.dumps({"text": text, "model": model, "tokens": len(ids), "vocabulary": vocabulary}, indent=1)
                + "\n"
            )
            sources.place(draft, description)  # last: where it is, the token file is whole
    about = json.loads(description.read_text(encoding="utf8"))
    return Prepared(path, int(about["tokens"]), int(about["vocabulary"]))


# ------------------------------------------------------------------ what is read
def tokenizer_file(model: str) -> Path:
    """Return the tokenizer.json of a model; all named sizes have the bundled one. SpecError where there is none."""
    if model in models.SIZES:
        return _TOKENIZER
    path = models.checkpoint_folder(model) / "tokenizer.json"
    if not path.is_file():
        raise SpecError(
            f"model {model!r} has no {path}; transformers makes it: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({os.fspath(path.parent)!r})"
        )
    return path


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
    """Tokenise a text; returns (ids, vocabulary). Everything that `datasets` keeps goes into `scratch`."""
    import datasets
    from tokenizers import Tokenizer

    sources.write_plain_text(source, scratch / "text.txt")
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
    pieces = _chunks(line["text"] for line in lines)
    ids = [np.array(tokenizer.encode(piece, add_special_tokens=False).ids, kind) for piece in pieces]
    return np.concatenate(ids), vocabulary


# ------------------------------------------------------------------ command
def _number(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON line: path, tokens, vocabulary. Errors go to stderr as one message; the status is the error's."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.workloads.prepare", description="Make a token file from a text."
    )
    parser.add_argument(
        "--text", required=True, help="'bundled', the path of a text or .parquet file, or hub:NAME:CONFIGURATION"
    )
    parser.add_argument(
        "--model", required=True, help="whose tokenizer: a named size, or a checkpoint's folder or cached id"
    )
    parser.add_argument("--cache", type=Path, default=None, help="folder to keep it in; default: that of testbed")
    parser.add_argument(
        "--sequence-length", type=_number, help="with the next three: make sure that the text is long enough"
    )
    parser.add_argument("--batch-size", type=_number, default=1)
    parser.add_argument("--validation-batches", type=_number, default=1)
    parser.add_argument("--training-sequences", type=_number, default=None)
    asked = parser.parse_args(arguments)
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("HF_HOME", os.fspath(texts.hub_home()))
    try:
        if (
            texts.hub_text(asked.text) is None
        ):  # a local file is all that is read; without this, libraries ask the network about it
            os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        prepared = prepare_tokens(asked.text, asked.model, asked.cache or paths.cache_folder())
        if asked.sequence_length:
            windows.check_text_length(
                prepared.tokens,
                sequence_length=asked.sequence_length,
                batch_size=asked.batch_size,
                validation_batches=asked.validation_batches,
                training_sequences=asked.training_sequences,
            )
    except TestbedError as error:
        sys.stderr.write(f"testbed: error: {error}\n")
        return error.exit_status
    sys.stdout.write(
        json.dumps(
            {"path": os.fspath(prepared.path.resolve()), "tokens": prepared.tokens, "vocabulary": prepared.vocabulary}
        )
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
