"""`python -m testbed`, and the script `testbed`.

Root runs no code of the current folder. For `python -m`, Python itself puts that folder first on its search path, and
imports a few modules before this one; so under sudo, only the script is accepted.
"""

# Nothing is imported up here: under `python -m` it would be searched for in the current folder.


def main() -> None:
    """Take the current folder off the search path, then run the command line.

    Exits with status 2 if sudo would run code of the current folder, or root that of a world-writable folder, as root.
    """
    import os
    import sys

    by_module = not sys.flags.safe_path and sys.path[0] == os.getcwd()  # noqa: PTH109 - pathlib is not imported yet
    if by_module:
        del sys.path[0]
    if os.geteuid() == 0:
        sys.dont_write_bytecode |= "SUDO_UID" in os.environ  # compiled files would belong to root
        _check_root(by_module=by_module)
    from testbed.cli import main as run_command_line

    run_command_line()


def _check_root(*, by_module: bool) -> None:
    """Exit if root would run code that another user may have placed there."""
    import contextlib
    import os
    import pwd
    import shlex
    import stat
    import sys
    from pathlib import Path

    from testbed import paths
    from testbed.errors import UserError

    package, why = Path(__file__).parent, ""
    if (user := paths.invoking_user()) is not None:
        os.environ["HOME"] = pwd.getpwuid(0).pw_dir  # some sudos keep the user's, where libraries would write as root
        compiled = package / "__pycache__"  # Python has written this module and its package there already
        for path in (compiled, *compiled.glob("__*")) if package.stat().st_uid == user[0] else ():
            with contextlib.suppress(OSError):
                paths.give_to_user(path)
        if by_module or str(Path.cwd()) in set(sys.path) - {str(package.parent)}:
            why = (
                f"Python searches the current folder, {Path.cwd()}, for modules, and sudo would run them as root; "
                f"run: sudo {paths.script()} {shlex.join(sys.argv[1:])}"
            )
    for folder in map(Path, sys.path):
        if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
            why = f"anybody may write to {folder}, where Python finds modules; forbid it: chmod o-w {folder}"
    if why:
        sys.stderr.write(f"testbed: error: cannot run as root: {why}\n")
        sys.exit(UserError.exit_status)


if __name__ == "__main__":
    main()
