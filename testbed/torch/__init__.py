"""How can any torch.distributed job report what it sends and when, and use our codecs? Needs torch, but not the lab.

process_group  wraps every gloo group of a job, in layers
autoload       does so at `import torch`, if the environment requests it
observed       a layer that logs every collective and message, waits, steps and modules: a file per rank
pace           module hooks that sleep as long as a module takes on a device
coded          a layer that codes messages and collectives
exchanges      coded sums, gathers and scatters among the ranks of a process group
steps          detects where the steps of a job end
hooks          a communication hook of DistributedDataParallel
fsdp           all-gathers and reduce-scatters of FSDP2
hivemind       a codec as a compression of hivemind
flower         a codec as a mod of Flower's client app, and as a strategy

    testbed.torch.step()        # a step of the job ends here; an optimiser's step() is noted without it
"""

from __future__ import annotations

import importlib
from typing import Any

_FROM = {
    "step": "steps",
    "register_backend": "process_group",
    "install": "process_group",
    "ddp_hook": "hooks",
    "code_fsdp": "fsdp",
    "code_groups": "coded",
}


def __getattr__(name: str) -> Any:
    """Import names on first use: torch itself imports this package, through its entry point."""
    if name in _FROM:
        return getattr(importlib.import_module(f"testbed.torch.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FROM])
