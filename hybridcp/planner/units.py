"""Numbers for people: seconds, bytes and token counts as short text."""


def format_seconds(seconds: float) -> str:
    """`59.7 ms`, `412 us`, `1.23 s`: three digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return "0 ms" if seconds < 1e-9 else f"{three_digits(seconds * 1e6)} us"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: `1.23`, `12.3`, `123`, `1234`."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_bytes(count: int) -> str:
    """`496 MiB`: three digits and a power-of-two unit."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{three_digits(count / (1 << power))} {unit}"
    return f"{count} B"


def format_tokens(tokens: int) -> str:
    """`1M` and `128k` where exact, as `parse_tokens` reads them; digits otherwise."""
    for power, unit in ((30, "G"), (20, "M"), (10, "k")):
        if tokens % (1 << power) == 0:
            return f"{tokens >> power}{unit}"
    return str(tokens)


def count_of(number: int, noun: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
