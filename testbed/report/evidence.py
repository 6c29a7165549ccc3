"""Which claims say what a codec or local steps cost in loss: the evidence behind an advice."""

from __future__ import annotations

from typing import Final, NamedTuple

from testbed import paths
from testbed.errors import SpecError
from testbed.report.claims import FILE, Claim, read_claims


class Evidence(NamedTuple):
    """A claim about a setting."""

    setting: str
    """A codec, or `8 local steps`."""
    experiment: str
    claim: Claim
    parameters: float
    """Parameters of the model that was trained."""

    @property
    def holds(self) -> bool:
        """Whether the claim, that the setting keeps the loss, holds."""
        return self.claim.verdict == "holds"


_SAID: Final = {
    "bf16": ("codec_quality", "bf16 costs at most 1 %", 1.9e6),
    "int8": ("seed_activation_delta", "random weights: int8 costs at most 1 %", 5.3e6),
    "int6": ("codec_quality", "6 bits both ways cost at most 1 %", 1.9e6),
    "int4(group=64)": ("codec_quality", "4 bits both ways cost at most 1 %", 1.9e6),
    "8 local steps": ("local_steps_or_codec", "DiLoCo with 8 local steps ends", 17_408.0),
    "32 local steps": ("local_steps_or_codec", "DiLoCo with 32 local steps ends", 17_408.0),
}
"""By setting: the experiment, how its claim begins, and the parameters of its model, as its README has them."""


def read_evidence() -> dict[str, Evidence]:
    """Return the evidence by setting, from the experiments' claims. SpecError if a claim is missing."""
    folders, found = paths.experiment_folders(), dict[str, Evidence]()
    for setting, (experiment, begins, parameters) in _SAID.items():
        files = [folder / experiment / FILE for folder in folders if (folder / experiment / FILE).is_file()]
        claims = [claim for file in files[:1] for claim in read_claims(file) if claim.claim.startswith(begins)]
        if len(claims) != 1:
            raise SpecError(f"{experiment}/{FILE} has {len(claims)} claims that begin with {begins!r}, instead of one")
        found[setting] = Evidence(setting, experiment, claims[0], parameters)
    return found
