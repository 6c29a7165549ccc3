"""Which claims say what a codec or local steps cost in loss: the evidence behind an advice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from testbed import paths
from testbed.errors import SpecError
from testbed.frozen import read_toml
from testbed.report.claims import FILE, Claim, read_claims

_TABLE = Path(__file__).with_name("evidence.toml")


class Evidence(NamedTuple):
    """A claim that a setting keeps the loss."""

    experiment: str
    claim: Claim
    parameters: float
    """Millions of parameters of the model that was trained."""


def read_evidence() -> dict[str, Evidence]:
    """Return the evidence by setting: a codec, or `8 local steps`. SpecError if a claim is missing."""
    found, folders = dict[str, Evidence](), paths.experiment_folders()
    for setting, row in read_toml(_TABLE).items():
        file = next((path for each in folders if (path := each / row["experiment"] / FILE).is_file()), Path(FILE))
        claims = [claim for claim in read_claims(file) if claim.claim.startswith(row["claim"])]
        if len(claims) != 1:
            raise SpecError(f"{file} has {len(claims)} claims that begin with {row['claim']!r}, instead of one")
        found[setting] = Evidence(row["experiment"], claims[0], row["parameters"])
    return found


def proven_codecs() -> list[str]:
    """Return the codecs whose claim holds."""
    return [name for name, one in read_evidence().items() if one.claim.verdict == "holds" and "steps" not in name]
