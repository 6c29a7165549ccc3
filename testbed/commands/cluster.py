"""The flags of the commands that may run their work on a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.commands.console import one_of, say
from testbed.errors import UserError

if TYPE_CHECKING:
    from testbed.sweep.ray_cluster import RayCluster

ExecutorFlag = Annotated[
    str, typer.Option(help="local: this machine; ray: a Ray cluster, for played runs on the virtual clock.")
]
AddressFlag = Annotated[
    str | None,
    typer.Option(help="With --executor ray: address of the head; default: auto, this machine's cluster."),
]
RuntimeEnvFlag = Annotated[
    str | None,
    typer.Option(
        "--runtime-env",
        help="With --executor ray: Ray's runtime environment, JSON or its file; default: testbed is installed there.",
    ),
]


def check_cluster_flags(executor: str, address: str | None, runtime_env: str | None) -> dict[str, Any] | None:
    """Check the flags; return the runtime environment, if any."""
    one_of("executor", executor, ("local", "ray"))
    given = {"--address": address, "--runtime-env": runtime_env}
    if executor == "local" and (useless := [name for name, value in given.items() if value is not None]):
        raise UserError(f"{' and '.join(useless)} is for --executor ray: add that, or omit it")
    return None if runtime_env is None else _parsed(runtime_env)


def cluster_words(executor: str, address: str | None, runtime_env: str | None) -> list[str]:
    """Return the same flags for another command."""
    check_cluster_flags(executor, address, runtime_env)
    given = {"--executor": executor if executor == "ray" else None, "--address": address, "--runtime-env": runtime_env}
    return [word for name, value in given.items() if value is not None for word in (name, value)]


@contextmanager
def connected(executor: str, address: str | None, runtime_env: dict[str, Any] | None) -> Iterator[RayCluster | None]:
    """Connect to the cluster; None for the executor `local`."""
    if executor == "local":
        yield None
        return
    from testbed.sweep.ray_cluster import RayCluster

    cluster = RayCluster(address or "auto", runtime_env, say)
    try:
        yield cluster
    finally:
        cluster.close()


def refuse_others(live: Sequence[str], clock: str) -> None:
    """Raise UserError, before anything is connected, if a cluster cannot make these runs. `live`: ids of live cells."""
    if live:
        raise UserError(
            f"--executor ray makes played runs alone, and {len(live)} cells are live, such as {live[0]}: use --timing "
            "played, exclude them, or omit --executor"
        )
    if clock != "virtual":
        raise UserError("--executor ray plays on the virtual clock alone: use --clock virtual, or omit --executor")


def _parsed(text: str) -> dict[str, Any]:
    stripped = text.strip()
    try:
        content = stripped if stripped.startswith(("{", "[")) else Path(text).read_text(encoding="utf8")
        value = json.loads(content)
    except OSError as error:
        raise UserError(f"--runtime-env {text!r}: neither JSON nor a file that can be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--runtime-env {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f'--runtime-env {text!r} must be a JSON object, e.g. {{"working_dir": "."}}')
    return value
