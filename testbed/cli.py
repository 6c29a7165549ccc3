"""The command line: one app, made of `testbed.commands`. Decides nothing that changes a number."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from testbed.commands import (
    bench,
    codecs,
    devices,
    docs,
    export,
    lab,
    play,
    predict,
    profiles,
    rate_traces,
    reproduce,
    sweep,
    traces,
    vm,
)
from testbed.commands.console import err, say
from testbed.errors import TestbedError, UserError

app = typer.Typer(
    name="testbed",
    help="Measure what activation codecs do to wall-clock time and convergence over slow links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_INTERRUPTED = 130


class _State:
    debug = False


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    _State.debug = debug


for command in (lab.doctor, lab.link, sweep.plan, sweep.run, sweep.sweep, sweep.report, export.export):
    app.command()(command)
app.command()(reproduce.reproduce)
app.command()(docs.docs)
app.command("profiles")(profiles.list_profiles)
app.command("devices")(devices.list_devices)
app.command()(devices.record)
app.command()(play.play)
app.command()(predict.predict)
app.command("lab")(lab.stand)
app.command(context_settings={"allow_interspersed_args": False})(lab.shell)
app.command(context_settings={"allow_interspersed_args": False})(vm.vm)
app.add_typer(bench.app, name="bench")
app.add_typer(codecs.app, name="codecs")
app.add_typer(rate_traces.app, name="rate-trace")
app.add_typer(traces.app, name="trace")


def main() -> None:
    """Run the command line; errors become one message and an exit status: 2 the user's, 1 ours, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except TestbedError as error:
        if _State.debug:
            raise
        label = "error" if isinstance(error, UserError) else "failed"
        say(f"testbed: {label}: {error}", on=err, style="red")
        sys.exit(error.exit_status)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer has caught the KeyboardInterrupt
            say(
                "testbed: interrupted; nothing was left running. The same command goes on with what is missing.", on=err
            )
        raise
    except Exception as error:
        if _State.debug:
            raise
        fault = "a fault of testbed: run again with --debug and report what it prints"
        say(f"testbed: failed: {type(error).__name__}: {error} ({fault})", on=err)
        sys.exit(1)


if __name__ == "__main__":
    main()
