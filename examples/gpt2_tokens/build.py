"""Token files at GPT-2's vocabulary, from the Python source that is on this machine.

Trains a byte-level BPE tokenizer on the standard library and the installed packages, and writes
`train.bin` and `val.bin` (uint16, no header, as nanoGPT's `prepare.py` does) and the tokenizer's
folder. Nothing is downloaded; the same packages give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
LARGEST_FILE = 2**20
"""Bytes; what is larger is mostly generated."""
HELD_OUT_PCT = 2


def main() -> None:
    """Build everything in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the files")
    parser.add_argument("--megabytes", type=float, default=48.0, help="text to read at most")
    parser.add_argument("--vocabulary", type=int, default=50257, help="size of the vocabulary")
    chosen = parser.parse_args()
    if not 257 <= chosen.vocabulary <= 2**16:
        parser.error(
            "--vocabulary must hold 256 bytes and an end, and fit into uint16: 257 to 65536"
        )
    console = Console()
    began = time.monotonic()
    texts = list(source_texts(round(chosen.megabytes * 1e6)))
    console.print(f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.0f} MB of Python source")
    tokenizer = train(texts, chosen.vocabulary)
    chosen.out.mkdir(parents=True, exist_ok=True)
    special = {"eos_token": END, "bos_token": END}
    folder = chosen.out / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(str(folder))
    counts = write(texts, tokenizer, chosen.out)
    for name, count in counts.items():
        console.print(f"{chosen.out / name}: {count:,} tokens")
    console.print(f"vocabulary {tokenizer.get_vocab_size()}, {time.monotonic() - began:.0f} s")


def source_texts(most_bytes: int) -> Iterator[str]:
    """Yield the text of Python files, each content once, in an order that mixes the packages."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = {path for root in roots for path in root.rglob("*.py")}
    seen: set[str] = set()
    left = most_bytes
    # By the hash of its name, a file's place depends on no other file.
    for _, path in sorted(
        (digest(path.name.encode() + path.parent.name.encode()), path) for path in files
    ):
        content = path.read_bytes() if path.stat().st_size <= LARGEST_FILE else b""
        if not content or digest(content) in seen:
            continue
        seen.add(digest(content))
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if left < len(content):
            return
        left -= len(content)
        yield text


def train(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, as GPT-2's is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def write(texts: list[str], tokenizer: Tokenizer, out: Path) -> dict[str, int]:
    """Encode the files, each followed by an end, into the part that its content draws."""
    end = tokenizer.token_to_id(END)
    counts = {"train.bin": 0, "val.bin": 0}
    streams = {name: (out / name).open("wb") for name in counts}
    batches = iter(texts)
    for _ in track(range(0, len(texts), 256), description="encoding"):
        several = list(islice(batches, 256))
        for text, encoding in zip(several, tokenizer.encode_batch(several), strict=True):
            held_out = int(digest(text.encode())[:8], 16) % 100 < HELD_OUT_PCT
            name = "val.bin" if held_out else "train.bin"
            np.array([*encoding.ids, end], dtype="<u2").tofile(streams[name])
            counts[name] += len(encoding.ids) + 1
    for stream in streams.values():
        stream.close()
    return counts


def digest(content: bytes) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
