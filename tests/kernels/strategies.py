"""Hypothesis strategies over bands."""

from hypothesis import strategies as st

from hybridcp.masks import UNBOUNDED, Band


@st.composite
def trimmed_bands(draw: st.DrawFn, largest: int = 14) -> Band:
    """A small trimmed band anywhere, with any of its diagonals cutting."""
    q0, k0 = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    q_len, k_len = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    diagonals = st.integers(k0 - q0 - q_len, k0 - q0 + k_len)
    lo = draw(st.one_of(st.just(-UNBOUNDED), diagonals))
    hi = draw(st.one_of(st.just(UNBOUNDED), diagonals.map(lambda hi: max(hi, lo))))
    band = Band(q0, q0 + q_len, k0, k0 + k_len, lo, hi).trimmed()
    return band if band is not None else Band(q0, q0 + q_len, k0, k0 + k_len)


def pairs_of(band: Band) -> set[tuple[int, int]]:
    return {(q, k) for q in range(band.q0, band.q1) for k in band.keys_of(q)}
