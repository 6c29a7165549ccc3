"""`testbed bench codecs`: what codecs cost and how wrong they are, on tensors of a real training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from testbed import paths, results
from testbed.codecs.measured import BENCHED, FAST_BPS, SLOW_BPS, Benchmark, Measured
from testbed.commands.console import out, table
from testbed.errors import StageError, UserError

_COLUMNS = ("bits", "error", "encode", "decode", "GB/s", "80 Mbit/s", "1 Gbit/s", "share", "pays to")


def codecs(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CODEC]...", help="Codecs; without any, a long list.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Results as JSON.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw bits a value against error, activations and gradients apart: FIGURE.png and .svg.")
    ] = None,
) -> None:
    """Measure encode and decode on saved activations and gradients, beside the time on the wire and other packages."""
    from testbed.codecs import selection
    from testbed.report import distortion
    from testbed.sweep.environment import snapshot

    texts = [selection.read(name).text for name in names] if names else list(BENCHED)
    for file in (output, figure):
        if file:
            results.make_folder(file.absolute().parent, "name another file")
    tensors = _tensors()
    about = _run("testbed.codecs.check.about", str(tensors))
    environment = snapshot()
    lines = [json.loads(line) for line in _run("testbed.codecs.check.bench", str(tensors), *texts)]
    found = Benchmark(
        machine=f"{environment['cpu_model'] or 'unknown processor'}, one thread",
        tensors=next(about),
        results=tuple(Measured.model_validate(line) for line in lines if "failed" not in line),
        failed={f"{line['codec']}, {line['direction']}": line["failed"] for line in lines if "failed" in line},
    )
    _print(found)
    if output:
        results.write_json(output, found)
    if figure:
        distortion.save(found, figure)
    if found.failed:
        raise typer.Exit(1)


def _print(found: Benchmark) -> None:
    rows = table("codec", "of", *_COLUMNS, "package", right=_COLUMNS)
    for one in found.results:
        rows.add_row(
            escape(one.codec),
            "X" if one.direction == "forward" else "G",
            f"{one.bits_per_value:.3g}",
            f"{one.relative_error:.1e}",
            f"{1e3 * one.encode_s:.2f}",
            f"{1e3 * one.decode_s:.2f}",
            f"{one.bytes_per_s / 1e9:.2f}",
            f"{1e3 * one.wire_s(SLOW_BPS):.1f}",
            f"{1e3 * one.wire_s(FAST_BPS):.2f}",
            f"{one.share_of_wire:.1%}" + (" !" if one.share_of_wire > 0.1 and not one.package else ""),
            f"{one.break_even_bps / 1e9:.2g}" if one.break_even_bps else "-",
            one.package or "testbed",
        )
    out.print(rows)
    for name, reason in found.failed.items():
        out.print(f"{name}: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    values = found.results[0].values if found.results else 0
    out.print(
        f"{found.machine}; {found.tensors}; messages of {values} values, activations X and gradients G. Times are milliseconds: "
        "encode, decode, the payload on links of 80 Mbit/s and 1 Gbit/s. GB/s: fp32 bytes through encode and decode. share: of "
        "the tensor's bf16 time at 80 Mbit/s that encode and decode take, at most 10 % (! is more). pays to: Gbit/s up to which "
        "it is faster than bf16.",
        highlight=False,
        soft_wrap=True,
    )


def _tensors() -> Path:
    """Made once a machine, by a short training."""
    target = paths.cache_folder() / "boundary-tensors-1.npz"
    if not target.exists():
        results.make_folder(target.parent, "set XDG_CACHE_HOME to a folder of yours")
        out.print(f"training a small model for its activations and gradients, once, for some minutes: {target}", soft_wrap=True)
        list(_run("testbed.workloads.capture", str(target)))
    return target


def _run(module: str, *arguments: str) -> Iterator[str]:
    """The lines that a program of ours prints, as the person behind sudo, with one thread. StageError when it fails."""
    user = paths.invoking_user()
    identity: dict[str, Any] = {} if user is None else {"user": user[0], "group": user[1], "extra_groups": []}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, **identity,
    )  # fmt: skip
    if done.returncode:
        if done.returncode == UserError.exit_status:
            raise UserError(done.stderr.strip())
        raise StageError(f"{module} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    yield from done.stdout.splitlines()
