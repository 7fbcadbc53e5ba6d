import pytest

from hybridcp.errors import MaskError, PlanError
from hybridcp.mask_text import parse_mask, parse_tokens
from hybridcp.masks import causal, chunked, documents, full, prefix_lm, sliding_window


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("1_048_576", 1 << 20),
        ("1M", 1 << 20),
        ("1m", 1 << 20),
        ("128k", 128 * 1024),
        (" 128K ", 128 * 1024),
        ("1.5M", 3 << 19),
        ("0.5k", 512),
        ("2G", 1 << 31),
        (7, 7),
    ],
)
def test_token_counts(text, tokens):
    assert parse_tokens(text, "seq_len", PlanError) == tokens


@pytest.mark.parametrize(
    "text",
    ["", "foo", "0", "-1", "1.3", "1.0001k", "1e6", "1MB", "k", "9" * 40, "٣", 0, -5, True, 1.5],
)
def test_wrong_token_counts(text):
    with pytest.raises(PlanError, match="seq_len must be"):
        parse_tokens(text, "seq_len", PlanError)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", causal()),
        ("Full", full()),
        ("window:4095", sliding_window(4095, 0)),
        ("window:4,2", sliding_window(4, 2)),
        ("window:-1,1k", sliding_window(-1, 1024)),
        ("window:0", sliding_window(0, 0)),
        ("documents:3,5", documents([3, 5])),
        ("documents:1k*3,5", documents([1024, 1024, 1024, 5])),
        ("causal & documents:3,5", causal() & documents([3, 5])),
        ("documents:2*4&window:1,0", documents([2] * 4) & sliding_window(1, 0)),
        ("prefix:1k", prefix_lm(1024)),
        ("causal & chunked: 8", causal() & chunked(8)),
    ],
)
def test_masks(text, mask):
    parsed = parse_mask(text)
    assert parsed == mask
    assert parsed.document_lengths == mask.document_lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "casual",
        "causal:3",
        "window",
        "window:",
        "window:1,2,3",
        "window:x",
        "window:-2",
        "documents",
        "documents:",
        "documents:3,,5",
        "documents:0",
        "documents:3*0",
        "documents:1*99999999",
        "prefix",
        "prefix:",
        "prefix:0",
        "prefix:3,4",
        "chunked:0",
        "chunked:x",
        "causal &",
        "& causal",
    ],
)
def test_wrong_masks(text):
    with pytest.raises(MaskError):
        parse_mask(text)


def test_the_message_states_the_grammar():
    with pytest.raises(MaskError, match=r"'casual'.*window:LEFT\[,RIGHT\].*documents:LENGTH"):
        parse_mask("casual")
