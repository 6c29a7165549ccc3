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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from testbed import manifest, paths
from testbed.errors import SpecError, status_of
from testbed.workloads import models, sources, texts
from testbed.workloads.networks import PreparedImages, find_prepared, prepared_paths

VERSION = 1
"""Version in the names of token files: increment it when the tokens of the same text change."""
_TOKENIZER = sources.ASSETS / "bpe4096.json"
_CHUNK_CHARACTERS = 1 << 16
"""Characters per chunk of lines tokenised together; tokens never span the line end between two chunks. Millions of
characters at once, as in texts with long lines, never finished in user-mode Linux."""


class Prepared(NamedTuple):
    """A token file."""

    path: Path
    """A one-dimensional .npy of uint16 or uint32."""
    tokens: int
    vocabulary: int
    """Vocabulary size of the tokenizer."""


def prepare_tokens(text: str, model: str, cache: Path, note: Callable[[str], None] = lambda message: None) -> Prepared:
    """Return the token file of a text (see `TextSpec.text`) for a model, made below `cache` unless it is there, whole
    and as it was written; an altered one is set aside, and named to `note`.

    A file of text is UTF-8, and may be compressed with xz. Line ends become newlines, as `datasets` reads text. Only a
    data set of the hub is downloaded, once. SpecError for a text or tokenizer that is unavailable or unreadable.
    """
    source, tokenizer = sources.text_file(text, cache), tokenizer_file(model)
    key = hashlib.sha256(f"{VERSION} {paths.digest(source)} {paths.digest(tokenizer)}".encode()).hexdigest()
    folder = cache / "tokens"
    path, description, proving = files = [folder / f"{key[:32]}{end}" for end in (".npy", ".json", manifest.ENDING)]
    if fault := manifest.find_fault(proving, lambda: key):
        if proving.exists():  # those of an older testbed have none, and are overwritten
            aside = [manifest.set_aside(each).name for each in files if each.exists()]
            note(f"prepared data in {folder} is made again: {fault}; set aside as {', '.join(aside)}")
        with sources.making(folder) as scratch:
            ids, vocabulary = _tokenise(source, tokenizer, scratch)
            np.save(draft := scratch / path.name, ids)
            sources.place(draft, path)
            draft = scratch / description.name
            draft.write_text(
                json.dumps({"text": text, "model": model, "tokens": len(ids), "vocabulary": vocabulary}, indent=1)
                + "\n"
            )
            sources.place(draft, description)
            manifest.write_manifest(proving, key, [path, description])
    about = json.loads(description.read_text(encoding="utf8"))
    return Prepared(path, int(about["tokens"]), int(about["vocabulary"]))


def prepare_images(images: str, cache: Path) -> PreparedImages:
    """Return the files of a data set of the hub whose columns are one image and one class, with splits train and test,
    made below `cache` if missing. SpecError for one that is unavailable, altered, or of another form.
    """
    texts.check_images_name(images)
    if (hub := texts.hub_set(images, "images")) is None:
        raise SpecError(f"workload.images: {images!r} come with scikit-learn and need no preparation")
    if (prepared := find_prepared(hub, cache)) is not None:
        return prepared
    splits, files = sources.load_hub_set(hub, "images"), prepared_paths(hub, cache)
    with sources.making(files[0].parent) as scratch:
        drafts = [scratch / path.name for path in files]
        about = _decode(f"workload.images: data set {hub}", splits, *drafts[:2])
        drafts[2].write_text(json.dumps(about, indent=1) + "\n")
        for draft, path in zip(drafts, files, strict=True):
            sources.place(draft, path)
        manifest.write_manifest(files[2].with_suffix(manifest.ENDING), files[2].stem, files)
    return PreparedImages(files[0], files[1], **about)


# ------------------------------------------------------------------ inputs
def tokenizer_file(model: str) -> Path:
    """Return the tokenizer.json of a model; all named sizes have the bundled one. SpecError if missing."""
    if model in models.SIZES:
        return _TOKENIZER
    path = models.checkpoint_folder(model) / "tokenizer.json"
    if not path.is_file():
        raise SpecError(
            f"model {model!r} has no {path}; create it with transformers: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({os.fspath(path.parent)!r})"
        )
    return path


# ------------------------------------------------------------------ outputs
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
    """Tokenise a text; returns (ids, vocabulary). All files of `datasets` go into `scratch`."""
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
    """Write the images and labels of a `datasets.DatasetDict`; returns the fields of `PreparedImages`."""
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
        form = (_CHANNELS[row[image].mode], *row[image].size)
        if values is None:
            shape = form
            if shape[1] != shape[2]:
                raise SpecError(f"{here} is {shape[1]} x {shape[2]} pixels; images must be square")
            values = np.lib.format.open_memmap(pixels, "w+", np.uint8, (len(chosen), shape[0] * shape[1] * shape[2]))
        if form != shape:
            raise SpecError(f"{here} is {_described(form)}, but the first one {_described(shape)}; all must be alike")
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
"""Channels by Pillow's mode of an image."""


def _described(shape: tuple[int, ...]) -> str:
    return f"of {shape[0]} channel(s), {shape[1]} x {shape[2]} pixels"


def _columns(what: str, rows: Any) -> tuple[str, str]:
    """Return the names of the image and class columns of a `datasets.Dataset`."""
    import datasets

    kinds = (datasets.Image, datasets.ClassLabel)
    chosen = [[name for name, kind in rows.features.items() if isinstance(kind, wanted)] for wanted in kinds]
    if [len(names) for names in chosen] != [1, 1]:
        types = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in rows.features.items())
        raise SpecError(f"{what}: its columns are {types}; one must be Image, and one ClassLabel")
    return chosen[0][0], chosen[1][0]


# ------------------------------------------------------------------ command
def main(arguments: list[str] | None = None) -> int:
    """Print notes, and last one JSON line: path, tokens and vocabulary of a text, or the fields of `PreparedImages`.
    Errors go to stderr as one message; returns the error's exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m testbed.workloads.prepare",
        description="Make a token file from a text, or files of pixels from a data set of images.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="'bundled', the path of a text or .parquet file, or hub:NAME:CONFIGURATION")
    source.add_argument("--images", help="hub:NAME or hub:NAME:CONFIGURATION")
    parser.add_argument(
        "--model", help="for a text, the model with the tokenizer: a named size, or a checkpoint's folder or cached id"
    )
    parser.add_argument("--cache", type=Path, default=None, help="cache folder; default: that of testbed")
    asked = parser.parse_args(arguments)
    if asked.text and not asked.model:
        parser.error("--text needs --model")
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("HF_HOME", os.fspath(texts.hub_home()))
    cache = asked.cache or paths.cache_folder()

    def say(message: str) -> None:
        sys.stdout.write(f"{message}\n")

    def prepare() -> None:
        if asked.text and texts.hub_set(asked.text, "text") is None:
            # only local files are read; without this, libraries access the network
            os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        text = (asked.text, asked.model, cache, say)
        made = prepare_images(asked.images, cache) if asked.images else prepare_tokens(*text)
        sys.stdout.write(json.dumps(made._asdict(), default=lambda path: os.fspath(path.resolve())) + "\n")

    return status_of(prepare)


if __name__ == "__main__":
    sys.exit(main())
