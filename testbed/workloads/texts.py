"""Name a workload's text: a bundled one, a file's path, or a data set of the Hugging Face hub.

`sources` gets it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from testbed import paths
from testbed.errors import SpecError

BUNDLED = {"bundled": "sotu_half.txt.xz", "moby-dick": "moby_dick.txt.xz"}
"""Texts that come with the package, and their files among the assets: what models are trained on, and another one, to
fine-tune them on."""
_HUB_TEXT = re.compile(r"hub:([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?")


class HubText(NamedTuple):
    """A data set of the hub."""

    name: str
    configuration: str | None

    def __str__(self) -> str:
        return self.name if self.configuration is None else f"{self.name} ({self.configuration})"


def hub_text(text: str) -> HubText | None:
    """Read what 'hub:NAME' or 'hub:NAME:CONFIGURATION' means; None for another text. SpecError for a name that cannot
    be one.
    """
    if not text.startswith("hub:"):
        return None
    if match := _HUB_TEXT.fullmatch(text):
        return HubText(match[1], match[2])
    raise SpecError(
        f"workload.text is {text!r}; a data set of the hub is 'hub:NAME' or 'hub:NAME:CONFIGURATION', for example "
        "'hub:Salesforce/wikitext:wikitext-2-raw-v1'"
    )


def check_text_name(text: str) -> None:
    """Check a text's name as far as that needs no network. SpecError."""
    if hub_text(text) is None and text not in BUNDLED and not Path(text).is_file():
        raise SpecError(
            f"workload.text: there is no file {text!r}; give the path of a text or .parquet file, "
            f"{' or '.join(map(repr, BUNDLED))}, or a data set of the hub, 'hub:NAME:CONFIGURATION'"
        )


def hub_home() -> Path:
    """Return where huggingface_hub and datasets keep what they have downloaded; under sudo that of the person behind
    it.
    """
    return Path(os.environ.get("HF_HOME") or paths.user_cache() / "huggingface")
