"""Called by `import torch`, through the entry point `torch.backends`: does nothing unless `TESTBED_TORCH` is set.

TESTBED_TORCH is JSON with any of

folder  where each rank writes its log (observed.py)
record  also log how long each module takes (true), for `pace`
pace    {"mode": "recorded", "file": ...}, {"mode": "flops", "device": ...}: module hooks that sleep (pace.py)
codec   codecs for messages and collectives, as in `exec --codec`

`import torch` never fails because of this: errors go to standard error. A job that was only to be observed runs
unobserved; for one that was to be paced or coded, `init_process_group` fails, because its results would be those of
another job.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Final

VARIABLE: Final = "TESTBED_TORCH"
_KEYS: Final = ("folder", "record", "pace", "codec")
_MODULES: Final = {"codec": "testbed.torch.coded", "folder": "testbed.torch.observed", "pace": "testbed.torch.pace"}
"""For each key, the module whose `layers(wanted)` installs its hooks and returns its layers, innermost first."""


def load() -> None:
    """Install what the environment requests."""
    if not (text := os.environ.get(VARIABLE)):
        return
    wanted: Any = None
    try:
        wanted = json.loads(text)
        install(wanted)
    except Exception as error:
        message = f"testbed: cannot do as {VARIABLE}={text} says: {type(error).__name__}: {error}"
        sys.stderr.write(message + "\n")
        if not isinstance(wanted, dict) or wanted.get("codec") or wanted.get("pace"):
            _refuse(message)


def install(wanted: dict[str, Any]) -> None:
    """Install what is requested. Raises errors of any kind if that is impossible."""
    if unknown := sorted(set(wanted) - set(_KEYS)):
        raise ValueError(f"unknown keys {', '.join(unknown)}; known are {', '.join(_KEYS)}")
    layers: list[Any] = []
    for key, module in _MODULES.items():
        if wanted.get(key):
            layers += importlib.import_module(module).layers(wanted)
    importlib.import_module("testbed.torch.process_group").install(*layers)


def _refuse(message: str) -> None:
    """Make the job fail where it would start to communicate."""

    def init_process_group(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        if (module := sys.modules.get(name)) is not None:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]
