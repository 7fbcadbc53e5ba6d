"""The mutations of `tests/mutations.py` still fit the code; running them is its own command."""

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_code(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1 and mutation.new not in (mutation.old, None)
    for path in mutation.tests.split():
        assert (ROOT / path).exists()
