"""The rows that stand for all."""

from __future__ import annotations

from itertools import combinations, product

from ranks.pairs import every_pair


def test_few_rows_have_every_pair_that_is_in_any() -> None:
    table = [
        row for row in product(range(12), "abcd", (None, 0.5, "full"), (False, True)) if row[:2] != (3, "c")
    ]
    kept = every_pair(table)
    assert len(kept) < len(table) / 2
    assert [row for row in table if row in kept] == kept
    for one, other in combinations(range(4), 2):
        assert {(row[one], row[other]) for row in kept} == {(row[one], row[other]) for row in table}
