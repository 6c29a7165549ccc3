"""A checkpoint's weight files, and verification of their digests. No torch.

A digest of the weights is part of a cell that starts from them: `TextSpec.weights`. Checkpoints made by our programs
also have a seal, in the format of sha256sum, so that altered ones are refused.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

from testbed import manifest, paths
from testbed.errors import SpecError, StageError
from testbed.process import command_line
from testbed.spec import TextSpec
from testbed.workloads import models

SEAL = "SHA256SUMS"
_FILES = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights, whole or in shards. SpecError without such files."""
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
                raise SpecError(
                    f"cannot read {index} as the index of a checkpoint: {type(error).__name__}: {error}"
                ) from None
    raise SpecError(f"cannot load a checkpoint from {folder}: it has no {' or '.join(_FILES)}, whole or in shards")


def seal(folder: Path) -> None:
    """Write the digests of a finished checkpoint's weights next to them; `sha256sum -c SHA256SUMS` checks them, too."""
    lines = [f"{paths.digest(path)}  {path.name}\n" for path in weight_files(folder)]
    (folder / SEAL).write_text("".join(lines), encoding="utf8")


def finish(draft: Path, folder: Path) -> None:
    """Seal a checkpoint, and move it to where stage hosts, possibly of another user, can read it."""
    seal(draft)
    for path in (draft, *draft.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
        paths.give_to_user(path)
    draft.rename(folder)


def weights_digest(model: str) -> str | None:
    """Return the SHA-256 of a checkpoint's weights (over its files in order, if in shards); None for a named size,
    whose weights come from the seed.

    SpecError without weights, or for weights that differ from the checkpoint's seal.
    """
    if model in models.SIZES:
        return None
    files = weight_files(models.checkpoint_folder(model))
    try:
        digests = [manifest.digest(path) for path in files]
    except SpecError as error:
        raise SpecError(f"model {model!r}: {error}") from None
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
    """Raise SpecError where a model's weights differ from the workload's."""
    if spec.weights is not None and (digest := weights_digest(spec.model)) != spec.weights:
        raise SpecError(
            f"model {spec.model!r}: the workload needs weights with SHA-256 {spec.weights}, but "
            f"{'a named size has none' if digest is None else f'{models.checkpoint_folder(spec.model)} has {digest}'}; "
            "restore those weights, or plan again with these"
        )


def _again(model: str, folder: Path) -> str:
    if model in models.MADE:
        return f"remove {folder} and make it again: python -m {models.MADE[model]}"
    return "restore the weights"


def make(model: str) -> None:
    """Make a shipped checkpoint if it is not on this machine yet, which takes minutes. StageError where that fails."""
    if model in models.MADE and not models.made_folder(model).is_dir():
        command = command_line(*models.MADE[model].split())
        if (status := subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode) != 0:
            raise StageError(f"cannot make {model}: {' '.join(command)} ended with status {status}")
