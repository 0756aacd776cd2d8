"""The example that builds token files from the source on this machine."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from batchscape.config import TokenFiles
from batchscape.data.corpus import prepare

BUILD = Path(__file__).parents[2] / "examples" / "gpt2_tokens" / "build.py"


def build(out):
    options = ["--megabytes", "1.5", "--vocabulary", "1000"]
    subprocess.run([sys.executable, str(BUILD), str(out), *options], check=True, timeout=200)
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_files_are_whole_and_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = tmp_path / "one"
    assert build(one) == build(tmp_path / "two")
    config = TokenFiles(
        name="tokens", path=str(one / "train.bin"), held_out_path=str(one / "val.bin")
    )
    identity = prepare(config)
    assert identity.classes <= 1000
    assert identity.train_samples * 1024 > 200_000
    assert identity.held_out_samples > 0
    tokenizer = AutoTokenizer.from_pretrained(str(one / "tokenizer"))
    tokens = np.fromfile(one / "train.bin", dtype="<u2")
    (ends,) = np.nonzero(tokens == tokenizer.eos_token_id)
    assert ends[-1] == len(tokens) - 1
    # What stands between two ends is a file of this machine.
    documents = {
        tokenizer.decode(tokens[begin + 1 : end].tolist()).encode()
        for begin, end in pairwise([-1, *ends])
    }
    assert len(documents) == len(ends) > 50
    lengths = set(map(len, documents))
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    paths = (path for root in roots for path in root.rglob("*.py"))
    assert documents <= {path.read_bytes() for path in paths if path.stat().st_size in lengths}
