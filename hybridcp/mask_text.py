"""Masks and token counts as people type them on a command line.

    parse_mask("documents:128k*8 & window:4095")    parse_tokens("1M") == 1_048_576

`k`, `M` and `G` are powers of two (1024, 1024², 1024³), as in "a 128k context".
"""

import re

from hybridcp.errors import HybridCPError, MaskError
from hybridcp.masks import (
    AttentionMask,
    causal,
    chunked,
    documents,
    full,
    prefix_lm,
    sliding_window,
)

MOST_TOKENS = 1 << 40
"""Far above any sequence; larger counts are typing errors."""

MASK_GRAMMAR = (
    "a mask is `causal`, `full`, `window:LEFT[,RIGHT]`, `prefix:LENGTH`, `chunked:SIZE` or "
    "`documents:LENGTH[*COUNT],…`, joined by `&`, e.g. `causal & documents:128k*8`"
)


def parse_tokens(text: str | int, what: str, error: type[HybridCPError]) -> int:
    """A number of tokens ≥ 1: `1048576`, `1_048_576`, `1M`, `128k`, `1.5M`; powers of two.

    Args:
        text: what was typed, or a whole number.
        what: its name, for messages ("seq_len").
        error: the class to raise.

    Raises:
        HybridCPError: of class `error`, if it is no whole number ≥ 1.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise error(f"{what} must be a whole number or text such as 128k or 1M, got {text!r}")
    tokens = text if isinstance(text, int) else _read_tokens(text)
    if tokens is None:
        raise error(
            f"{what} must be a whole number of tokens such as 1048576, 128k or 1M (k and M are "
            f"powers of two), got {text!r}"
        )
    if not 1 <= tokens <= MOST_TOKENS:
        raise error(f"{what} must be from 1 to 2^40 tokens, got {text!r}")
    return tokens


def _read_tokens(text: str) -> int | None:
    match = re.fullmatch(r"(\d[\d_]{0,20})(?:\.(\d{1,12}))?([kmg]?)", text.strip(), re.I | re.A)
    if match is None:
        return None
    whole, decimals, unit = match[1].replace("_", ""), match[2] or "", match[3].lower()
    scaled = int(whole + decimals) << {"": 0, "k": 10, "m": 20, "g": 30}[unit]
    tokens, rest = divmod(scaled, 10 ** len(decimals))
    return None if rest else tokens


def parse_mask(text: str) -> AttentionMask:
    """The mask that a text describes; see `MASK_GRAMMAR`.

    Raises:
        MaskError: the text does not follow the grammar, which the message quotes.
    """
    masks = [_parse_part(part.strip(), text) for part in text.split("&")]
    combined = masks[0]
    for mask in masks[1:]:
        combined &= mask
    return combined


def _parse_part(part: str, whole: str) -> AttentionMask:
    name, colon, arguments = part.partition(":")
    name = name.strip().lower()
    if name in ("causal", "full") and not colon:
        return causal() if name == "causal" else full()
    if name == "window" and colon:
        return _parse_window(arguments, part)
    if name == "documents" and colon:
        return documents(_parse_lengths(arguments, part))
    if name in ("prefix", "chunked") and colon:
        tokens = parse_tokens(arguments, f"the number in {part!r}", MaskError)
        return prefix_lm(tokens) if name == "prefix" else chunked(tokens)
    raise MaskError(f"cannot read {part!r} in the mask {whole!r}: {MASK_GRAMMAR}")


def _parse_window(arguments: str, part: str) -> AttentionMask:
    sides = [side.strip() for side in arguments.split(",")]
    if len(sides) > 2:
        raise MaskError(f"cannot read {part!r}: a window has at most two sides; {MASK_GRAMMAR}")
    left, right = (_parse_side(side, part) for side in [*sides, "0"][:2])
    return sliding_window(left, right)


def _parse_side(side: str, part: str) -> int:
    if side in ("0", "-1"):
        return int(side)
    return parse_tokens(side, f"each side of {part!r} (-1: no limit)", MaskError)


def _parse_lengths(arguments: str, part: str) -> list[int]:
    lengths: list[int] = []
    for item in arguments.split(","):
        length, star, count = item.partition("*")
        repeat = parse_tokens(count, f"COUNT in {part!r}", MaskError) if star else 1
        if len(lengths) + repeat > 1 << 24:
            raise MaskError(f"{part!r} has more than {1 << 24} documents")
        lengths += [parse_tokens(length, f"LENGTH in {part!r}", MaskError)] * repeat
    return lengths
