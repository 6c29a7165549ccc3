"""Make a token file from a text, once: `python -m testbed.workloads.prepare --text bundled --model gpt2-mini`; or files
of pixels and labels from a data set of images: `--images hub:ylecun/cifar10`.

The text goes through `datasets` and the model's tokenizer into a .npy of uint16 or uint32 ids, named by the content of
both, in our cache; images are decoded into .npy files named by the data set. A second call finds them there and imports
none of torch, transformers, datasets and tokenizers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from testbed import paths
from testbed.errors import SpecError, status_of
from testbed.workloads import models, sources, texts
from testbed.workloads.networks import PreparedImages, find_prepared, prepared_paths

VERSION = 1
"""Part of every text's name: raise it when the same text would give other tokens."""
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
        with sources.making(folder) as scratch:
            ids, vocabulary = _tokenise(source, tokenizer, scratch)
            np.save(draft := scratch / path.name, ids)
            sources.place(draft, path)
            draft = scratch / description.name
            draft.write_text(
                json.dumps({"text": text, "model": model, "tokens": len(ids), "vocabulary": vocabulary}, indent=1)
                + "\n"
            )
            sources.place(draft, description)  # last: where it is, the token file is whole
    about = json.loads(description.read_text(encoding="utf8"))
    return Prepared(path, int(about["tokens"]), int(about["vocabulary"]))


def prepare_images(images: str, cache: Path) -> PreparedImages:
    """Return the files of a data set of the hub whose columns are one image and one class, with splits train and test,
    made below `cache` where they are not there yet. SpecError for one that cannot be had, or is none of that.
    """
    texts.check_images_name(images)
    if (hub := texts.hub_set(images, "images")) is None:
        raise SpecError(f"workload.images: {images!r} come with scikit-learn: there is nothing to prepare")
    if (found := find_prepared(hub, cache)) is not None:
        return found
    splits, files = sources.load_hub_set(hub, "images"), prepared_paths(hub, cache)
    with sources.making(files[0].parent) as scratch:
        drafts = [scratch / path.name for path in files]
        about = _decode(f"workload.images: data set {hub}", splits, *drafts[:2])
        drafts[2].write_text(json.dumps(about, indent=1) + "\n")
        for draft, path in zip(drafts, files, strict=True):
            sources.place(draft, path)  # the description last: where it is, the others are whole
    return PreparedImages(files[0], files[1], **about)


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


def _decode(what: str, splits: Any, pixels: Path, labels: Path) -> dict[str, int]:
    """Write the images and labels of a `datasets.DatasetDict`; returns what `PreparedImages` says of them."""
    missing = {"train", "test"} - set(splits)
    if missing:
        raise SpecError(f"{what} has no split {' and no split '.join(sorted(missing))}; it has {', '.join(splits)}")
    image, label = _columns(what, splits["train"])
    counts = {"train": len(splits["train"]), "test": len(splits["test"])}
    classes = splits["train"].features[label].num_classes
    rows = ((split, number, row) for split in counts for number, row in enumerate(splits[split]))
    shape: tuple[int, ...] = ()
    values: npt.NDArray[np.uint8] | None = None
    chosen = np.empty(sum(counts.values()), np.int64)
    for place, (split, number, row) in enumerate(rows):
        here = f"{what}: image {number} of split {split}"
        if row[image] is None or row[image].mode not in _CHANNELS:
            mode = "missing" if row[image] is None else f"of mode {row[image].mode}"
            raise SpecError(f"{here} is {mode}; images must be of mode {' or '.join(_CHANNELS)}")
        found = (_CHANNELS[row[image].mode], *row[image].size)
        if values is None:
            shape = found
            if shape[1] != shape[2]:
                raise SpecError(f"{here} is {shape[1]} x {shape[2]} pixels; images must be square")
            values = np.lib.format.open_memmap(pixels, "w+", np.uint8, (len(chosen), shape[0] * shape[1] * shape[2]))
        if found != shape:
            raise SpecError(f"{here} is {_described(found)}, and the first one {_described(shape)}; all must be alike")
        if row[label] is None or not 0 <= row[label] < classes:
            raise SpecError(f"{here} has label {row[label]}; labels must be 0 to {classes - 1}")
        channels_last = np.asarray(row[image]).reshape(shape[2], shape[1], shape[0])
        values[place] = channels_last.transpose(2, 0, 1).reshape(-1)
        chosen[place] = row[label]
    if values is None or 0 in counts.values():
        raise SpecError(f"{what} has {counts['train']} images to train on and {counts['test']} to test on")
    np.save(labels, chosen)
    return {**counts, "channels": shape[0], "side": shape[1], "classes": classes}


_CHANNELS = {"L": 1, "RGB": 3}
"""By the mode of an image, as Pillow calls it."""


def _described(shape: tuple[int, ...]) -> str:
    return f"of {shape[0]} channel(s), {shape[1]} x {shape[2]} pixels"


def _columns(what: str, rows: Any) -> tuple[str, str]:
    """Return the names of the columns of a `datasets.Dataset` that hold image and class."""
    import datasets

    kinds = (datasets.Image, datasets.ClassLabel)
    chosen = [[name for name, kind in rows.features.items() if isinstance(kind, wanted)] for wanted in kinds]
    if [len(names) for names in chosen] != [1, 1]:
        types = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in rows.features.items())
        raise SpecError(f"{what}: its columns are {types}; one must be Image, and one ClassLabel")
    return chosen[0][0], chosen[1][0]


# ------------------------------------------------------------------ command
def main(arguments: list[str] | None = None) -> int:
    """Print one JSON line: path, tokens, vocabulary of a text; what `PreparedImages` holds of images. Errors go to
    stderr as one message; the status is the error's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m testbed.workloads.prepare",
        description="Make a token file from a text, or files of pixels from a data set of images.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="'bundled', the path of a text or .parquet file, or hub:NAME:CONFIGURATION")
    source.add_argument("--images", help="hub:NAME or hub:NAME:CONFIGURATION")
    parser.add_argument(
        "--model", help="of a text, whose tokenizer: a named size, or a checkpoint's folder or cached id"
    )
    parser.add_argument("--cache", type=Path, default=None, help="folder to keep it in; default: that of testbed")
    asked = parser.parse_args(arguments)
    if asked.text and not asked.model:
        parser.error("--text needs --model")
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("HF_HOME", os.fspath(texts.hub_home()))
    cache = asked.cache or paths.cache_folder()

    def prepare() -> None:
        if asked.text and texts.hub_set(asked.text, "text") is None:
            # a local file is all that is read; without this, libraries ask the network about it
            os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        made = prepare_images(asked.images, cache) if asked.images else prepare_tokens(asked.text, asked.model, cache)
        sys.stdout.write(json.dumps(made._asdict(), default=lambda path: os.fspath(path.resolve())) + "\n")

    return status_of(prepare)


if __name__ == "__main__":
    sys.exit(main())
