"""Make a token file from a text, once: `python -m testbed.workloads.prepare --text bundled --model gpt2-mini`; or files
of pixels and labels from a data set of images: `--images hub:ylecun/cifar10`.

The text goes through the model's tokenizer, on all cores, into a .npy of uint16 or uint32 ids, named by the content of
both, in our cache; it is never in memory as a whole. Images are decoded into .npy files named by the data set. A second
call finds them there and imports none of torch, transformers, datasets and tokenizers.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
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
_CHUNKS_TOGETHER = 64
"""Chunks that the cores share."""
_SHOW_S = 0.25
"""Least time between two lines of progress."""


class Prepared(NamedTuple):
    """A token file."""

    path: Path
    """A one-dimensional .npy of uint16 or uint32."""
    tokens: int
    vocabulary: int
    """Vocabulary size of the tokenizer."""


def _mute(told: object) -> None:
    """Tell nobody."""


def prepare_tokens(
    text: str, model: str, cache: Path, note: Callable[[str], None] = _mute, show: Callable[[float], None] = _mute
) -> Prepared:
    """Return the token file of a text (see `TextSpec.text`) for a model, made below `cache` unless it is there, whole
    and as it was written; an altered one is set aside, and named to `note`. `show` receives the share that is done.

    A file of text is UTF-8, and may be compressed with xz; line ends become newlines. Files of tokens need no
    tokenizer, but ids that the model knows. Only a data set of the hub is downloaded, once. SpecError for a text or
    tokenizer that is unavailable or unreadable.
    """
    files = sources.text_files(text, cache)
    known = models.model_size(model).vocabulary if files[0].suffix == texts.TOKENS else None
    by = paths.digest(tokenizer_file(model)) if known is None else f"ids below {known}"
    key = hashlib.sha256(f"{VERSION} {' '.join(map(paths.digest, files))} {by}".encode()).hexdigest()
    folder = cache / "tokens"
    path, description, proving = made = [folder / f"{key[:32]}{end}" for end in (".npy", ".json", manifest.ENDING)]
    if fault := manifest.find_fault(proving, lambda: key):
        if proving.exists():  # those of an older testbed have none, and are overwritten
            aside = [manifest.set_aside(each).name for each in made if each.exists()]
            note(f"prepared data in {folder} is made again: {fault}; set aside as {', '.join(aside)}")
        with sources.making(folder) as scratch:
            if known is None:
                vocabulary, ids = _tokenise(sources.read_text(files, show), tokenizer_file(model))
            else:
                vocabulary, ids = known, sources.read_tokens(files, _kind(known), known)
            count = _write_ids(draft := scratch / path.name, _kind(vocabulary), ids)
            sources.place(draft, path)
            draft = scratch / description.name
            draft.write_text(
                json.dumps({"text": text, "model": model, "tokens": count, "vocabulary": vocabulary}, indent=1) + "\n"
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
def _chunks(pieces: Iterable[str]) -> Iterator[str]:
    waiting = ""
    for piece in pieces:
        waiting, begin = waiting + piece, 0
        while (end := waiting.find("\n", begin + _CHUNK_CHARACTERS - 1) + 1) > 0:
            yield waiting[begin:end]
            begin = end
        waiting = waiting[begin:]
    if waiting:
        yield waiting


def _kind(vocabulary: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def _tokenise(pieces: Iterable[str], tokenizer_file: Path) -> tuple[int, Iterator[npt.NDArray[np.unsignedinteger]]]:
    """Tokenise a text in pieces; returns the vocabulary, and the ids in parts."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(os.fspath(tokenizer_file))
    except Exception as error:  # tokenizers raises the bare class
        raise SpecError(f"{tokenizer_file} is not a tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def ids() -> Iterator[npt.NDArray[np.unsignedinteger]]:
        chunks = _chunks(pieces)
        while some := list(itertools.islice(chunks, _CHUNKS_TOGETHER)):
            for encoded in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(encoded.ids, _kind(vocabulary))

    return vocabulary, ids()


def _write_ids(path: Path, kind: type[np.unsignedinteger], parts: Iterable[npt.NDArray[np.unsignedinteger]]) -> int:
    """Write ids, one part after another, as the .npy that numpy would save; return how many."""
    with path.open("wb") as file:
        np.save(file, np.empty(0, kind))
        begin = file.tell()
        for part in parts:
            part.tofile(file)
        count = (file.tell() - begin) // np.dtype(kind).itemsize
        file.seek(0)
        form = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, form)
        assert file.tell() == begin, "numpy leaves room for any count"
    return count


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
    """Print notes and progress, and last one JSON line: path, tokens and vocabulary of a text, or the fields of
    `PreparedImages`. Errors go to stderr as one message; returns the error's exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m testbed.workloads.prepare",
        description="Make a token file from a text, or files of pixels from a data set of images.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="'bundled', the path of a file or folder, or hub:NAME:CONFIGURATION")
    source.add_argument("--images", help="hub:NAME or hub:NAME:CONFIGURATION")
    parser.add_argument(
        "--model", help="for a text, the model with the tokenizer: a named size, or a checkpoint's folder or cached id"
    )
    parser.add_argument("--progress", action="store_true", help="say which share of a text is tokenised")
    parser.add_argument("--cache", type=Path, default=None, help="cache folder; default: that of testbed")
    asked = parser.parse_args(arguments)
    if asked.text and not asked.model:
        parser.error("--text needs --model")
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("HF_HOME", os.fspath(texts.hub_home()))
    cache = asked.cache or paths.cache_folder()

    shown_s = time.monotonic()

    def say(message: str) -> None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()

    def show(share: float) -> None:
        nonlocal shown_s
        if asked.progress and time.monotonic() > shown_s + _SHOW_S:
            shown_s = time.monotonic()
            say(f"{texts.PROGRESS}{share:.4f}")

    def prepare() -> None:
        text = (asked.text, asked.model, cache, say, show)
        made = prepare_images(asked.images, cache) if asked.images else prepare_tokens(*text)
        say(json.dumps(made._asdict(), default=lambda path: os.fspath(path.resolve())))

    return status_of(prepare)


if __name__ == "__main__":
    sys.exit(main())
