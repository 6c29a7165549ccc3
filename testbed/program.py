"""Starts a testbed program from its own package: `python -P testbed/program.py PARENT MODULE ARGUMENT...`.

`process.command_line` writes this line for every helper process. It imports nothing from the current folder: -P keeps
that folder, and this file's folder, whose modules have common names, off Python's search path.
"""

import sys

if __name__ == "__main__":
    root = __file__.rpartition("/testbed/")[0]
    if root not in sys.path:
        sys.path.insert(0, root)
    from testbed import process  # only now can its package be found

    process.run_module(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
