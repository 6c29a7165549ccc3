"""Commands about codecs: the list, and what is known of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from testbed import paths
from testbed.commands.console import out, print_table, table
from testbed.process import start_program

if TYPE_CHECKING:
    from testbed.codecs.catalogue.row import CodecRow, Parameter

app = typer.Typer(help="List the codecs; show what is known of one.", invoke_without_command=True)
_CodecText = Annotated[
    str, typer.Argument(metavar="NAME", help="A codec's name, or a text such as 'ef(topk(0.1))' or 'pkg.mod:Class'.")
]
_TOGETHER = (
    "They are put together like this: ef(topk(0.1)); fwd=bf16, bwd=int8 for the two directions; 0: int8; rest: bf16 "
    "for the boundaries. One in full: python -m testbed codecs show NAME"
)


@app.callback()
def codecs(context: typer.Context) -> None:
    """List the codecs. Anyone's own is named 'package.module:Class'."""
    if context.invoked_subcommand is not None:
        return
    from testbed.codecs.catalogue.table import CODECS

    rows = table("codec", "bits per element", "state at each end", "what it is")
    if out.is_terminal:
        for column in rows.columns[1:3]:  # what they say is long for some; unlike names they may be broken
            column.no_wrap, column.max_width, column.overflow = False, 30, "fold"
    for name, row in CODECS.items():
        marks = "".join(f" ({mark})" for mark in _marks(row))
        rows.add_row(
            name,
            escape(row.size),
            escape(row.state),
            escape(f"{row.summary} [{row.source}]{marks}"),
        )
    out.print(rows)
    out.print(_TOGETHER, highlight=False)


@app.command()
def show(text: _CodecText) -> None:
    """Print all that is known of a codec: parameters, bytes, state, law, source, and what its own code says of it."""
    from testbed.codecs.catalogue.placement import parse_placement
    from testbed.codecs.catalogue.table import CODECS

    if text in CODECS:  # even where it needs arguments
        rows_shown = [CODECS[text]]
    else:
        chosen = parse_placement(text)
        out.print(f"{escape(chosen.text)}: about {chosen.nominal_bits:.4g} bits per element\n", highlight=False)
        rows_shown = list({part.name: part.row for spec in chosen.specs() for part in spec.parts()}.values())
    for row in rows_shown:
        _show(row)


@app.command()
def check(text: _CodecText) -> None:
    """Try a codec, ours or anyone else's: bytes, state, its law, odd tensors, hostile bytes, cost.

    Exit status 1 if it fails.
    """
    from testbed.pipeline.control import host_environment

    # In a process of its own, as the person behind sudo: it runs a stranger's code.
    with start_program(
        "testbed.codecs.check",
        text,
        attempt=f"check {text!r}",
        env=host_environment(),  # its cost is that of a training's, where memory is not handed back at each tensor
        start_new_session=False,  # a Ctrl-C ends it too
        **paths.as_invoking_user(),
    ) as program:
        status = program.wait()
    raise typer.Exit(status)


def _show(row: CodecRow) -> None:
    from testbed.codecs.catalogue import docstrings

    out.print(f"[bold]{escape(row.name)}[/bold]: {escape(row.summary)}", highlight=False)
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
            rows.add_row(name, escape(fact))
    out.print(rows)
    if row.parameters:
        told = [(one.name, _default(one), escape(one.allowed), escape(one.doc)) for one in row.parameters]
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
    out.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    out.print(escape(text or "says nothing of itself"), highlight=False, soft_wrap=True)


def _work(row: CodecRow) -> str:
    """Return what a device does per value, for people; see `codecs.catalogue.counting`."""
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
