"""Which files are a checkpoint's weights, and are they the ones that they are taken for? No torch.

A digest of the weights is part of a cell that begins with them: `TextSpec.weights`. A checkpoint that a program of
ours made has a seal beside it besides, in the format of sha256sum, so that one that was altered is not taken at all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from testbed import paths
from testbed.errors import SpecError, StageError
from testbed.spec import TextSpec
from testbed.workloads import models

SEAL = "SHA256SUMS"
_FILES = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights, whole or in shards. SpecError where there are none."""
    for name in _FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                return sorted(
                    {folder / part for part in json.loads(index.read_text(encoding="utf8"))["weight_map"].values()}
                )
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise SpecError(f"{index} is not the index of a checkpoint: {type(error).__name__}: {error}") from None
    raise SpecError(
        f"cannot load a checkpoint from {folder}: it has neither {' nor '.join(_FILES)}, whole or in shards"
    )


def seal(folder: Path) -> None:
    """Write the digests of a finished checkpoint's weights beside them; `sha256sum -c SHA256SUMS` looks as well."""
    lines = [f"{paths.digest(path)}  {path.name}\n" for path in weight_files(folder)]
    (folder / SEAL).write_text("".join(lines), encoding="utf8")


def finish(draft: Path, folder: Path) -> None:
    """Seal a checkpoint, and put it where stage hosts, which may be another user, read it."""
    seal(draft)
    for path in (draft, *draft.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
        paths.give_to_user(path)
    draft.rename(folder)


def weights_digest(model: str) -> str | None:
    """Return the SHA-256 of a checkpoint's weights (of those of its files, in order, where it is in shards); None for
    a named size, whose weights come from the seed.

    SpecError where there are no weights, or they are not what the checkpoint's seal says.
    """
    if model in models.SIZES:
        return None
    files = weight_files(models.checkpoint_folder(model))
    try:
        states = [path.stat() for path in files]
    except OSError as error:
        raise SpecError(f"model {model!r}: cannot read {error.filename}: {error.strerror}") from None
    digests = [_digest(path, state.st_mtime_ns, state.st_size) for path, state in zip(files, states, strict=True)]
    sealed = files[0].with_name(SEAL)
    if sealed.is_file():
        lines = (line.partition("  ") for line in sealed.read_text(encoding="utf8").splitlines())
        said = {name: digest for digest, _, name in lines}
        for path, digest in zip(files, digests, strict=True):
            if said.get(path.name) != digest:
                raise SpecError(
                    f"model {model!r}: {path} was altered: its SHA-256 is {digest}, and {sealed} has "
                    f"{said.get(path.name, 'none for it')}; {_again(model, path.parent)}"
                )
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def check_weights(spec: TextSpec) -> None:
    """Raise SpecError where a workload's model has other weights than the workload says."""
    if spec.weights is not None and (found := weights_digest(spec.model)) != spec.weights:
        raise SpecError(
            f"model {spec.model!r}: the workload begins with weights whose SHA-256 is {spec.weights}, and "
            f"{'a named size has none' if found is None else f'{models.checkpoint_folder(spec.model)} has {found}'}; "
            "bring those weights back, or plan anew with these"
        )


def _again(model: str, folder: Path) -> str:
    if model in models.MADE:
        return f"remove {folder} and make it again: python -m {models.MADE[model]}"
    return "bring the weights back"


@functools.lru_cache(maxsize=64)
def _digest(path: Path, changed_ns: int, size: int) -> str:
    """Return the digest of a file as it was changed last: many cells begin with the same weights."""
    return paths.digest(path)


def make(model: str) -> None:
    """Make a checkpoint of ours where it is not on this machine yet: minutes. StageError where that fails."""
    if model in models.MADE and not models.made_folder(model).is_dir():
        command = [sys.executable, "-m", *models.MADE[model].split()]
        if (status := subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode) != 0:
            raise StageError(f"cannot make {model}: {' '.join(command)} ended with status {status}")
