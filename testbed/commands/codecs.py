"""The `codecs` commands: list the codecs, describe one, check one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from testbed import paths
from testbed.commands.console import out, print_table, table
from testbed.errors import StageError
from testbed.process import failed, start_program

if TYPE_CHECKING:
    from testbed.codecs.catalogue.row import CodecRow, Parameter

app = typer.Typer(help="List the codecs; describe or check one.", invoke_without_command=True)
_CodecText = Annotated[
    str, typer.Argument(metavar="NAME", help="Codec: a name, or text such as 'ef(topk(0.1))' or 'pkg.mod:Class'.")
]
_TOGETHER = (
    "Codecs nest: ef(topk(0.1)). One per direction: fwd=bf16, bwd=int8. One per boundary: 0: int8; rest: bf16. "
    "Details of one: python -m testbed codecs show NAME"
)


@app.callback()
def codecs(context: typer.Context) -> None:
    """List the codecs, or describe or check one. A codec of your own is named 'package.module:Class'."""
    if context.invoked_subcommand is not None:
        return
    from testbed.codecs.catalogue.table import CODECS

    rows = table("codec", "bits per element", "state at each end", "description")
    if out.is_terminal:
        for column in rows.columns[1:3]:  # long for some codecs; unlike names, these may wrap
            column.no_wrap, column.max_width, column.overflow = False, 30, "fold"
    for name, row in CODECS.items():
        marks = "".join(f" ({mark})" for mark in _marks(row))
        rows.add_row(name, row.size, row.state, f"{row.summary} [{row.source}]{marks}")
    out.print(rows)
    out.print(_TOGETHER, highlight=False)


@app.command()
def show(text: _CodecText) -> None:
    """Describe a codec: parameters, bytes, state, law, source and the docstrings of its code."""
    from testbed.codecs.catalogue.placement import parse_placement
    from testbed.codecs.catalogue.table import CODECS

    if text in CODECS:  # even where it needs arguments
        rows_shown = [CODECS[text]]
    else:
        chosen = parse_placement(text)
        out.print(f"{chosen.text}: about {chosen.nominal_bits:.4g} bits per element\n", highlight=False)
        rows_shown = list({part.name: part.row for spec in chosen.specs() for part in spec.parts()}.values())
    for row in rows_shown:
        _show(row)


@app.command()
def check(text: _CodecText) -> None:
    """Test a codec, shipped or your own: bytes, state, its law, odd tensors, hostile bytes, cost.

    Exit status 1 if it fails.
    """
    from testbed.runtime.control_plane import host_environment

    # In a separate process, as the user who called sudo: this runs third-party code.
    with start_program(
        "testbed.codecs.check",
        text,
        attempt=f"check {text!r}",
        env=host_environment(),  # the allocator settings of a training, so that its costs are comparable
        start_new_session=False,  # Ctrl-C reaches it too
        **paths.as_invoking_user(),
    ) as program:
        status = program.wait()
    if status < 0:
        raise failed(f"check {text!r}", StageError, status, b"")
    raise typer.Exit(status)


def _show(row: CodecRow) -> None:
    from testbed.codecs.catalogue import docstrings

    out.print(Text.assemble((row.name, "bold"), f": {row.summary}"))
    facts = {
        "for example": row.example_text,
        "bits per element": row.size,
        "state at each end": row.state,
        "law": row.law,
        "per value on a device": _work(row),
        "in the model": row.hook,
        "source": row.source,
        "mark": ", ".join(_marks(row)),
    }
    rows = table("", "")
    rows.show_header = False
    for name, fact in facts.items():
        if fact:
            rows.add_row(name, fact)
    out.print(rows)
    if row.parameters:
        told = [(one.name, _default(one), one.allowed, one.doc) for one in row.parameters]
        print_table(("parameter", "default", "values", "meaning"), told)
    modules: dict[str, str | None] = {}
    for path in dict.fromkeys((row.forward, row.backward)):
        documented = docstrings.class_docs(path)
        ways = [way for way in ("forward", "backward") if getattr(row, way) == path]
        _print_docs(f"{path} ({' and '.join(ways)})", documented.of_class)
        modules[path.partition(":")[0]] = documented.of_module
    for module, text in modules.items():
        _print_docs(module, text)
    out.print()


def _print_docs(title: str, text: str | None) -> None:
    out.print(f"\n{title}", style="bold", highlight=False)
    out.print(text or "no docstring", highlight=False, soft_wrap=True)


def _work(row: CodecRow) -> str:
    """Format the work that a device does per value; see `codecs.catalogue.counting`."""
    if isinstance(row.work, str):
        return f"not counted: {row.work}"
    ways = {"": row.work, "gradients: ": row.backward_work}
    return "\n".join(
        f"{way}{end} reads {counts.reads} bytes, writes {counts.writes}, {counts.operations} operations"
        for way, work in ways.items()
        if work is not None
        for end, counts in work._asdict().items()
    )


def _marks(row: CodecRow) -> list[str]:
    return [
        *(["negative control"] if row.control else []),
        *(["changes the model"] if row.hook else []),
        *(["measures its link"] if row.measures else []),
    ]


def _default(parameter: Parameter) -> str:
    from testbed.codecs.catalogue.row import REQUIRED

    return "required" if parameter.default is REQUIRED else str(parameter.default)
