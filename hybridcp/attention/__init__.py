"""The executor: Ulysses transposes around a ring of blockwise attention."""
