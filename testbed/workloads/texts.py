"""Names of a workload's data: a text, which is a bundled one, a path, or a data set of the Hugging Face hub; or images,
which are digits or a data set of the hub.

`sources` fetches it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from testbed import paths
from testbed.errors import SpecError

BUNDLED = {"bundled": "sotu_half.txt.xz", "moby-dick": "moby_dick.txt.xz"}
"""Bundled texts and their files among the assets: one for training models, and another for fine-tuning."""
PROGRESS = "progress "
"""Start of the lines in which `prepare` says which share of a text is tokenised."""
TOKENS = ".bin"
"""Suffix of files that hold token ids."""
ENDINGS = (".txt", ".xz", ".parquet", TOKENS)
"""Suffixes of the files that are read in a folder; a path that names one file may have another."""
DIGITS = "digits"
"""Name of scikit-learn's digits."""
Use: TypeAlias = Literal["text", "images"]
"""Use of a data set: the workload's key that names it."""
_EXAMPLES: dict[Use, str] = {"text": "hub:Salesforce/wikitext:wikitext-2-raw-v1", "images": "hub:ylecun/cifar10"}
_HUB_SET = re.compile(r"hub:([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?")


class HubSet(NamedTuple):
    """A data set of the hub."""

    name: str
    configuration: str | None

    def __str__(self) -> str:
        return self.name if self.configuration is None else f"{self.name} ({self.configuration})"

    @property
    def file_name(self) -> str:
        """Name of files made from it, without a suffix."""
        return "--".join(part.replace("/", "--") for part in self if part)


def hub_set(name: str, use: Use) -> HubSet | None:
    """Parse 'hub:NAME' or 'hub:NAME:CONFIGURATION'; None for another text or other images. SpecError for an invalid
    name.
    """
    if not name.startswith("hub:"):
        return None
    if match := _HUB_SET.fullmatch(name):
        return HubSet(match[1], match[2])
    raise SpecError(
        f"workload.{use} is {name!r}; write a data set of the hub as 'hub:NAME' or 'hub:NAME:CONFIGURATION', for "
        f"example {_EXAMPLES[use]!r}"
    )


def check_text_name(text: str) -> None:
    """Check a text's name, without network access. SpecError if invalid."""
    if hub_set(text, "text") is None and text not in BUNDLED:
        local_files(text)


def local_files(text: str) -> list[Path]:
    """Return the files of a text at a path, in order: the file, or those of a folder with one of `ENDINGS`, by name.
    SpecError if there are none, or some with text and some with tokens.
    """
    path = Path(text)
    if text and path.is_dir():
        named = (each for each in path.iterdir() if each.suffix in ENDINGS and not each.name.startswith("."))
        files = sorted(filter(Path.is_file, named))
        if files and len({each.suffix == TOKENS for each in files}) == 1:
            return files
        found = "text and tokens (.bin)" if files else f"no file that ends with {', '.join(ENDINGS)}"
        raise SpecError(f"workload.text: folder {text!r} has {found}; use one with files of text, or of tokens")
    if path.is_file():
        return [path]
    raise SpecError(
        f"workload.text: there is no file {text!r}; use the path of a text, .parquet or .bin file, or of a folder of "
        f"such files, {' or '.join(map(repr, BUNDLED))}, or a data set of the hub, 'hub:NAME:CONFIGURATION'"
    )


def check_images_name(images: str) -> None:
    """Check the name of images, without network access. SpecError if invalid."""
    if hub_set(images, "images") is None and images != DIGITS:
        raise SpecError(
            f"workload.images: unknown images {images!r}; use {DIGITS!r}, which come with scikit-learn, or a data set "
            f"of the hub, 'hub:NAME' or 'hub:NAME:CONFIGURATION', for example {_EXAMPLES['images']!r}"
        )


def hub_home() -> Path:
    """Return the cache folder of huggingface_hub and datasets; under sudo that of the invoking user."""
    return Path(os.environ.get("HF_HOME") or paths.user_cache() / "huggingface")
