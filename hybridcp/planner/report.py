"""A plan as plain text, at most 100 columns."""

import textwrap
from collections.abc import Iterable, Sequence

from hybridcp.planner.result import PlanResult
from hybridcp.planner.search import MODEL_ERROR, Candidate, Rejected
from hybridcp.planner.units import count_of, format_bytes, format_seconds

WIDTH = 100
REMARK_WIDTH = 36
DEFAULT_ROWS = 8


def report(result: PlanResult, rows: int = DEFAULT_ROWS) -> str:
    """The best layout, a table of the splits, rejections, assumptions and notes.

    Args:
        result: the plan.
        rows: lines of the table at most.
    """
    parts = [_headline(result), _table(result, rows)] if result.candidates else [_no_layout(result)]
    parts += _paragraphs(result)
    return "\n".join(part for part in parts if part)


def best_of_splits(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best order and sharding of each (U, R), in rank order."""
    seen: dict[int, Candidate] = {}
    for candidate in candidates:
        seen.setdefault(candidate.layout.ulysses_degree, candidate)
    return list(seen.values())


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns two spaces apart, right-aligned but for the last."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
        text.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(text)


def wrapped(label: str, text: str) -> str:
    """A labelled paragraph within the width, continued under its own start."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{label} ",
        subsequent_indent=" " * (len(label) + 1),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _headline(result: PlanResult) -> str:
    best = result.best
    layout, price = best.layout, best.price
    name = f"Best: ulysses {layout.ulysses_degree} x ring {layout.ring_degree}"
    if layout.ring_degree > 1:
        name += f", {layout.sharding}"
    if layout.order == "ring_inner":
        name += ", ring inside"
    sent, memory = price.sent, best.memory
    sends = sent.all_to_all_forward + sent.all_to_all_backward
    return "\n".join(
        [
            name,
            f"      {format_seconds(best.total_s)} a layer: forward "
            f"{format_seconds(price.forward.total_s)}, backward "
            f"{format_seconds(price.backward.total_s)}",
            f"      each rank sends {format_bytes(sends)} by All-to-All, "
            f"{format_bytes(sent.ring_forward + sent.ring_backward)} by ring; attention peaks at "
            f"{format_bytes(memory.peak_bytes)}",
            "",
        ]
    )


def _table(result: PlanResult, rows: int) -> str:
    header = ("  ulysses", "ring", "compute", "all-to-all", "ring exposed", "total", "")
    splits = best_of_splits(result.candidates)
    lines = []
    for i, candidate in enumerate(splits[:rows]):
        layout, price = candidate.layout, candidate.price
        passes = (price.forward, price.backward)
        lines.append(
            (
                f"{'>' if i == 0 else '=' if candidate.tie else ' '} {layout.ulysses_degree:7d}",
                str(layout.ring_degree),
                format_seconds(sum(p.compute_s for p in passes)),
                format_seconds(sum(p.all_to_all_s for p in passes)),
                format_seconds(sum(p.ring_exposed_s for p in passes)),
                format_seconds(candidate.total_s),
                remark(candidate, splits[0]),
            )
        )
    text = format_table(header, lines) + "\n"
    if len(splits) > rows:
        text += f"  … and {count_of(len(splits) - rows, 'slower split')}\n"
    return text


def remark(candidate: Candidate, best: Candidate) -> str:
    """A few words on what sets a candidate apart."""
    layout, price = candidate.layout, candidate.price
    words = []
    if layout.order == "ring_inner":
        words.append("ring inside")
    if layout.ring_degree > 1 and layout.sharding != "zigzag":
        words.append(layout.sharding)
    slower = [p for p in (price.forward, price.backward) if p.ring_exposed_s > 0.02 * p.total_s]
    if slower:
        step = slower[0].compute_s / layout.ring_degree
        words.append(f"hop {format_seconds(slower[0].hop_s)}, step {format_seconds(step)}")
    elif not candidate.ulysses_inside:
        words.append(f"Ulysses over {price.all_to_all_level}")
    elif price.busiest_share > 1.1:
        words.append(f"busiest position {price.busiest_share:.2f} x mean")
    elif candidate is best and price.all_to_all_level is not None:
        words.append(f"Ulysses inside a {price.all_to_all_level}")
    while len(", ".join(words)) > REMARK_WIDTH:
        words.pop(0)
    return ", ".join(words)


def _no_layout(result: PlanResult) -> str:
    return f"No layout of {count_of(result.problem.ranks, 'rank')} fits.\n"


def _paragraphs(result: PlanResult) -> list[str]:
    paragraphs = []
    groups: dict[str, list[Rejected]] = {}
    for rejected in result.rejected:
        groups.setdefault(rejected.text, []).append(rejected)
    for text, members in groups.items():
        degrees = ", ".join(str(r.ulysses_degree) for r in members)
        paragraphs.append(wrapped("Rejected:", f"ulysses {degrees}: {text}."))
    if sum(candidate.tie for candidate in best_of_splits(result.candidates)) > 1:
        paragraphs.append(
            wrapped(
                "Ties:    ",
                f"splits marked = differ by less than the model's error, {MODEL_ERROR:.0%}; first "
                "is the one that loses least if links are slower than described.",
            )
        )
    warnings = result.candidates[0].warnings if result.candidates else ()
    paragraphs += [wrapped("Warning: ", f"{warning}.") for warning in warnings]
    paragraphs += [wrapped("Note:    ", f"{note}.") for note in result.notes]
    paragraphs.append(wrapped("Assumed: ", "; ".join(result.assumptions) + "."))
    return paragraphs
