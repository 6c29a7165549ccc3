"""The command line: one app, assembled from `testbed.commands`. Nothing here affects a measured number."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Final

import typer

from testbed.commands.console import err, say
from testbed.errors import UserError, explained

_INTERRUPTED = 130
_COMMANDS: Final = {
    "doctor": "lab.doctor",
    "link": "lab.link",
    "plan": "sweep.plan",
    "run": "sweep.run",
    "sweep": "sweep.sweep",
    "report": "sweep.report",
    "export": "export.export",
    "reproduce": "reproduce.reproduce",
    "docs": "docs.docs",
    "profiles": "profiles.list_profiles",
    "devices": "devices.list_devices",
    "record": "devices.record",
    "exec": "execute.execute",
    "play": "play.play",
    "predict": "predict.predict",
    "advise": "advise.advise",
    "chaos": "chaos.chaos",
    "lab": "lab.stand",
    "shell": "lab.shell",
    "vm": "vm.vm",
    "bench": "bench.app",
    "codecs": "codecs.app",
    "rate-trace": "rate_traces.app",
    "trace": "traces.app",
}
"""Where in `testbed.commands` a command is, in the order of --help."""
_OTHERS_WORDS: Final = ("exec", "shell", "vm")
"""Commands that pass on what follows the first word that is no option."""


class _State:
    debug = False


def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    _State.debug = debug


def make_app(*names: str) -> typer.Typer:
    """Return the app with these commands, or with all. Only their modules are imported."""
    app = typer.Typer(
        name="testbed",
        help="Measure how codecs change wall-clock time and convergence when training over slow links.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=_options,
    )
    for name in names or _COMMANDS:
        module, _, place = _COMMANDS[name].partition(".")
        command = getattr(importlib.import_module(f"testbed.commands.{module}"), place)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings={"allow_interspersed_args": name not in _OTHERS_WORDS})(command)
    return app


def main() -> None:
    """Run the command line. An error becomes one message and an exit status: 2 user error, 1 ours, 130 interrupted."""
    try:
        named = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        make_app(*([named] if named in _COMMANDS else []))(standalone_mode=True)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer has caught the KeyboardInterrupt
            say("testbed: interrupted; nothing is left running. The same command resumes unfinished sweeps.", on=err)
        raise
    except Exception as error:
        if _State.debug:
            raise
        if (told := explained(error)) is not None:
            label = "error" if isinstance(told, UserError) else "failed"
            say(f"testbed: {label}: {told}", on=err, style="red")
            sys.exit(told.exit_status)
        fault = "a bug in testbed: run `testbed --debug COMMAND ...` and report the traceback"
        say(f"testbed: failed: {type(error).__name__}: {error} ({fault})", on=err)
        sys.exit(1)


if __name__ == "__main__":
    main()
