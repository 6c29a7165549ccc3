"""What the forks of forked.py find loaded: all of the package, and what its parts load when they are first called."""

import importlib
import os
import pkgutil

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, which reads it then

import matplotlib.pyplot
import pandas

import testbed
from testbed import forks
from testbed.runtime import host

__all__ = ["matplotlib", "pandas"]
for module in pkgutil.walk_packages(testbed.__path__, "testbed."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
forks.preload(host.PRELOADED)
