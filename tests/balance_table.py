"""The table of docs/how-it-works.md: how level zigzag and balanced are, counted exactly.

python -m tests.balance_table
"""

from hybridcp.balance import balanced
from hybridcp.sharding import zigzag
from tests.test_balance import MILLION, SETS, loads

RING_DEGREE = 32


def main() -> None:
    """Print one row a mask."""
    columns = ["mask", *(f"{name}: {what}" for name in ("zigzag", "balanced") for what in KINDS)]
    print(f"| {' | '.join(columns)} | ranges a position |")
    print("| --- " * (len(columns) + 1) + "|")
    for name, mask in SETS.items():
        shardings = zigzag(MILLION, RING_DEGREE, 1), balanced(MILLION, RING_DEGREE, 1, mask)
        figures = [f"{x:.2f}" for pair in loads(mask, *shardings) for x in pair]
        ranges = max(map(len, shardings[1].ring_ranges))
        print(f"| {name} | {' | '.join(figures)} | {ranges} |")


KINDS = ("total", "summed over steps")

if __name__ == "__main__":
    main()
