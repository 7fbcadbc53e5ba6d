"""Training text as one array of tokens: Python's own sources, text files, or a token file.

    corpus = load_corpus()                              # the standard library, byte by byte
    corpus = load_corpus([Path("a.txt"), Path("b.txt")])
    corpus = load_corpus([Path("tokens.bin")])          # flat little-endian uint16
    corpus.sample(seq_len, seed=0, step=7)              # (1, seq_len) int64

A sample depends on the seed and the step alone, so every rank of every layout draws the same.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hybridcp.errors import InputError

BYTE_VOCAB = 256
# Installed packages differ by machine; tests hold odd bytes on purpose; encodings are tables.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclass(frozen=True)
class Corpus:
    """Tokens with their source.

    Attributes:
        tokens: (total,) uint8 or uint16, perhaps memory-mapped.
        vocab_size: every token is below it.
        source: what to call it in messages.
    """

    tokens: np.ndarray
    vocab_size: int
    source: str

    def check_length(self, seq_len: int) -> None:
        """Raise unless a sample of `seq_len` tokens can be drawn.

        Raises:
            InputError: the corpus is shorter.
        """
        if len(self.tokens) < seq_len:
            raise InputError(
                f"{self.source} has {len(self.tokens):,} tokens, fewer than the sequence length "
                f"{seq_len:,}; choose a smaller --seq-len or give more --data"
            )

    def sample(self, seq_len: int, *, seed: int, step: int) -> torch.Tensor:
        """(1, seq_len) int64: consecutive tokens from a random place."""
        last_start = len(self.tokens) - seq_len
        start = int(np.random.default_rng((seed, step)).integers(last_start + 1))
        return torch.from_numpy(self.tokens[start : start + seq_len].astype(np.int64))[None]


def load_corpus(paths: Sequence[Path] = (), vocab_size: int | None = None) -> Corpus:
    """Read and check a corpus.

    Args:
        paths: UTF-8 text files, whose bytes are the tokens, or one `.bin` file of little-endian
            uint16 tokens; none for Python's standard library.
        vocab_size: by default 256 for text, one more than the largest token of a `.bin` file.

    Raises:
        InputError: a file is missing, unreadable, empty or of another kind, or has a token that
            is not below `vocab_size`.
    """
    if any(path.suffix == ".bin" for path in paths):
        if len(paths) > 1:
            raise InputError(f"give one .bin token file alone, not {len(paths)} files")
        tokens, source = _read_token_file(paths[0]), str(paths[0])
        largest = _largest(tokens)
        vocab_size = vocab_size or largest + 1
    else:
        data = b"".join(map(_read_text, paths)) if paths else _standard_library()
        source = ", ".join(map(str, paths)) or "Python's standard library"
        tokens = np.frombuffer(data, dtype=np.uint8)
        largest = _largest(tokens)
        vocab_size = vocab_size or BYTE_VOCAB
    if largest >= vocab_size:
        raise InputError(
            f"{source} has token {largest}, which is not below the vocabulary size {vocab_size}; "
            f"give --vocab-size {largest + 1} or more"
        )
    return Corpus(tokens, vocab_size, source)


def _standard_library() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    ]
    if not sources:
        raise InputError(f"there are no Python sources in {root}; give text files with --data")
    return b"".join(path.read_bytes() for path in sources)


def _read_text(path: Path) -> bytes:
    remedy = "give UTF-8 text, or tokens as uint16 in a file that ends in .bin"
    try:
        data = path.read_bytes()
    except OSError as reason:
        raise InputError(f"cannot read {path}: {reason.strerror or reason}; {remedy}") from None
    if not data:
        raise InputError(f"{path} is empty; {remedy}")
    if b"\0" in data:
        raise InputError(f"{path} is not text: byte {data.index(0)} is NUL; {remedy}")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise InputError(
            f"{path} is not UTF-8 text: {reason.reason} at byte {reason.start}; {remedy}"
        ) from None
    return data


def _read_token_file(path: Path) -> np.ndarray:
    remedy = "give a flat file of little-endian uint16 tokens"
    try:
        size = path.stat().st_size
        if size == 0:
            raise InputError(f"{path} is empty; {remedy}")
        if size % 2:
            raise InputError(f"{path} has an odd number of bytes ({size:,}); {remedy}")
        return np.memmap(path, dtype="<u2", mode="r")
    except OSError as reason:
        raise InputError(f"cannot read {path}: {reason.strerror or reason}; {remedy}") from None


def _largest(tokens: np.ndarray) -> int:
    # In pieces: a memory-mapped file need not fit in memory.
    piece = 1 << 24
    return max(int(tokens[i : i + piece].max()) for i in range(0, len(tokens), piece))
