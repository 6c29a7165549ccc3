"""Name what a workload learns from: a text, which is a bundled one, a file's path, or a data set of the Hugging Face
hub; or images, which are digits or a data set of the hub.

`sources` gets it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from testbed import paths
from testbed.errors import SpecError

BUNDLED = {"bundled": "sotu_half.txt.xz", "moby-dick": "moby_dick.txt.xz"}
"""Texts that come with the package, and their files among the assets: what models are trained on, and another one, to
fine-tune them on."""
DIGITS = "digits"
"""The images that come with scikit-learn."""
Use: TypeAlias = Literal["text", "images"]
"""What a data set is wanted for: the key of the workload that names it."""
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
        """What files made of it are called, without a suffix."""
        return "--".join(part.replace("/", "--") for part in self if part)


def hub_set(name: str, use: Use) -> HubSet | None:
    """Read what 'hub:NAME' or 'hub:NAME:CONFIGURATION' means; None for another text or other images. SpecError for a
    name that cannot be one.
    """
    if not name.startswith("hub:"):
        return None
    if match := _HUB_SET.fullmatch(name):
        return HubSet(match[1], match[2])
    raise SpecError(
        f"workload.{use} is {name!r}; a data set of the hub is 'hub:NAME' or 'hub:NAME:CONFIGURATION', for example "
        f"{_EXAMPLES[use]!r}"
    )


def check_text_name(text: str) -> None:
    """Check a text's name as far as that needs no network. SpecError."""
    if hub_set(text, "text") is None and text not in BUNDLED and not Path(text).is_file():
        raise SpecError(
            f"workload.text: there is no file {text!r}; give the path of a text or .parquet file, "
            f"{' or '.join(map(repr, BUNDLED))}, or a data set of the hub, 'hub:NAME:CONFIGURATION'"
        )


def check_images_name(images: str) -> None:
    """Check the name of images as far as that needs no network. SpecError."""
    if hub_set(images, "images") is None and images != DIGITS:
        raise SpecError(
            f"workload.images: there are no images {images!r}; give {DIGITS!r}, which come with scikit-learn, or a "
            f"data set of the hub, 'hub:NAME' or 'hub:NAME:CONFIGURATION', for example {_EXAMPLES['images']!r}"
        )


def hub_home() -> Path:
    """Return where huggingface_hub and datasets keep what they have downloaded; under sudo that of the person behind
    it.
    """
    return Path(os.environ.get("HF_HOME") or paths.user_cache() / "huggingface")
