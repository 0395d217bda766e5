"""Usage: what each key holds, and all keys together."""

import pytest

from headwater.model.work.usage import Usage


def test_usage_of_a_key_is_the_sum_of_its_counts_and_the_total_that_of_all_keys() -> None:
    usage: Usage[str] = Usage()
    assert (usage.add("a"), usage.add("a", 3), usage.add("b", 2)) == (1, 4, 2)
    usage.remove("a", 2)
    assert (usage["a"], usage["b"], usage["c"], usage.total) == (2, 2, 0, 4)


def test_key_with_zero_usage_has_no_entry() -> None:
    usage: Usage[str] = Usage()
    usage.add("a", 2)
    usage.add("b")
    usage.remove("a", 2)
    assert (usage["a"], usage["c"], len(usage), usage.total) == (0, 0, 1, 1)


def test_count_of_a_block_is_removed_when_the_block_fails() -> None:
    usage: Usage[str] = Usage()
    with pytest.raises(KeyError), usage.held("a", 5):
        assert usage["a"] == usage.total == 5
        raise KeyError
    assert not usage and not usage.total
