"""The training text: what it holds, how samples are drawn, and every file it refuses."""

import numpy as np
import pytest
import torch
from text_corpus import load_corpus

from hybridcp.errors import InputError


def token_file(folder, tokens):
    path = folder / "tokens.bin"
    path.write_bytes(np.array(tokens, dtype="<u2").tobytes())
    return path


def test_default_is_the_standard_library():
    corpus = load_corpus()
    assert corpus.vocab_size == 256
    assert len(corpus.tokens) > 4_000_000
    assert b"import " in corpus.tokens[:100_000].tobytes()


def test_text_files_are_joined_byte_by_byte(tmp_path):
    (tmp_path / "a.txt").write_text("né", encoding="utf-8")
    (tmp_path / "b.txt").write_text("xy", encoding="utf-8")
    corpus = load_corpus([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert corpus.tokens.tobytes() == b"n\xc3\xa9xy"


def test_token_file(tmp_path):
    corpus = load_corpus([token_file(tmp_path, [3, 40_000, 5])])
    assert corpus.vocab_size == 40_001
    sample = corpus.sample(3, seed=0, step=0)
    assert sample.dtype == torch.int64
    assert sample.tolist() == [[3, 40_000, 5]]
    assert load_corpus([tmp_path / "tokens.bin"], 50_000).vocab_size == 50_000


def test_a_sample_depends_on_seed_and_step_alone():
    corpus = load_corpus()
    first = corpus.sample(64, seed=1, step=5)
    torch.manual_seed(99)
    np.random.default_rng(99).random()
    assert torch.equal(corpus.sample(64, seed=1, step=5), first)
    assert not torch.equal(corpus.sample(64, seed=1, step=6), first)
    assert not torch.equal(corpus.sample(64, seed=2, step=5), first)


def test_samples_reach_both_ends(tmp_path):
    corpus = load_corpus([token_file(tmp_path, range(6))])
    starts = {corpus.sample(4, seed=0, step=step)[0, 0].item() for step in range(50)}
    assert starts == {0, 1, 2}


def missing(folder):
    return [folder / "missing.txt"], None


def a_folder(folder):
    return [folder], None


def empty(folder):
    (folder / "empty.txt").write_bytes(b"")
    return [folder / "empty.txt"], None


def with_nul(folder):
    (folder / "nul.txt").write_bytes(b"ab\0c")
    return [folder / "nul.txt"], None


def not_utf8(folder):
    (folder / "latin.txt").write_bytes("né".encode("latin-1"))
    return [folder / "latin.txt"], None


def odd_bytes(folder):
    (folder / "odd.bin").write_bytes(b"abc")
    return [folder / "odd.bin"], None


def empty_tokens(folder):
    return [token_file(folder, [])], None


def missing_tokens(folder):
    return [folder / "missing.bin"], None


def large_token(folder):
    return [token_file(folder, [1, 500])], 500


def large_byte(folder):
    (folder / "a.txt").write_bytes(b"az")
    return [folder / "a.txt"], 100


def two_token_files(folder):
    return [token_file(folder, [1]), folder / "a.txt"], None


BAD_FILES = [
    (missing, "cannot read .*missing.txt: No such file"),
    (a_folder, "cannot read .*: Is a directory"),
    (empty, "empty.txt is empty; give UTF-8 text"),
    (with_nul, "nul.txt is not text: byte 2 is NUL; give UTF-8 text, or tokens as uint16"),
    (not_utf8, "latin.txt is not UTF-8 text: unexpected end of data at byte 1; give UTF-8"),
    (odd_bytes, r"odd.bin has an odd number of bytes \(3\); give a flat file"),
    (empty_tokens, "tokens.bin is empty; give a flat file"),
    (missing_tokens, "cannot read .*missing.bin: No such file"),
    (large_token, "tokens.bin has token 500, .* size 500; give --vocab-size 501 or more"),
    (large_byte, "a.txt has token 122, .* size 100; give --vocab-size 123 or more"),
    (two_token_files, "give one .bin token file alone"),
]


@pytest.mark.parametrize(("make", "message"), BAD_FILES, ids=[f.__name__ for f, _ in BAD_FILES])
def test_refuses(tmp_path, make, message):
    with pytest.raises(InputError, match=message):
        load_corpus(*make(tmp_path))


def test_refuses_a_sequence_longer_than_the_text(tmp_path):
    corpus = load_corpus([token_file(tmp_path, range(6))])
    corpus.check_length(6)
    with pytest.raises(
        InputError, match="tokens.bin has 6 tokens, fewer than .* 7; choose a small"
    ):
        corpus.check_length(7)
