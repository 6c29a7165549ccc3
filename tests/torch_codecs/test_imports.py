"""What an engineer's own training loads with us."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LOADS = """
import json, sys
import testbed.torch
{}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
ALL = "from testbed.torch import ddp_hook, code_fsdp, code_groups, step, flower, hivemind"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ALL])
def test_the_adapters_load_no_model_and_no_data_set(more: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LOADS.format(more)], capture_output=True, text=True, env={**os.environ}, check=True
    )
    loaded = set(json.loads(ran.stdout))
    assert not loaded & {"transformers", "datasets", "pandas", "matplotlib", "pyroute2", "scapy", "hivemind", "flwr"}
    assert ("torch" in loaded) == bool(more)
