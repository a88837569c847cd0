"""Parameter groups of pipeline stages, of which DeepSpeed leaves out those that are empty on a stage."""

from __future__ import annotations

from samerun.formats.zero import groups as zero_groups

A, B, C = ({"lr": rate} for rate in (1.0, 2.0, 3.0))


def test_a_stage_that_lacks_a_group_is_laid_over_by_settings() -> None:
    merged, own = zero_groups._lay_over([], [B])
    assert merged == own
    merged, own = zero_groups._lay_over(merged, [A, B, C])
    assert [group.settings for group in merged] == [A, B, C]
    _, own = zero_groups._lay_over(merged, [C])
    assert own == [merged[2]]


def test_stages_with_the_same_groups_go_by_number_even_where_one_setting_differs() -> None:
    merged, _ = zero_groups._lay_over([], [A, B])
    found, own = zero_groups._lay_over(merged, [A, C])
    assert own == found == merged
