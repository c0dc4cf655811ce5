"""Boxes of no elements: there is nothing in them that could be left out."""

from rl_bridge.manifest.coverage import box_of, find_gap


def test_nothing_is_missing_of_a_tensor_without_elements() -> None:
    assert find_gap(box_of((0, 0), (0, 4)), []) is None
    assert find_gap(box_of((0, 0), (2, 4)), []) == box_of((0, 0), (2, 4))
