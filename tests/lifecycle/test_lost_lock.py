"""A journal whose lock file something removed: a cleaner of old files, say."""

from pathlib import Path

import pytest

from rl_bridge.errors import WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.journal import Journal


def lock_in(directory: Path) -> Path:
    return directory / "publisher.lock"


def test_a_lock_that_was_removed_is_taken_again_with_the_next_version(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.reserve(1)
        lock_in(tmp_path).unlink()
        journal.reserve(2)
        with pytest.raises(WeightBridgeUnavailableError, match="another live publisher"):
            Journal(tmp_path)
    with Journal(tmp_path) as again:
        assert again.last_version == 2


def test_a_directory_that_was_emptied_is_filled_again(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.reserve(1)
        for path in tmp_path.iterdir():
            path.unlink()
        journal.reserve(2)
        publisher_id = journal.publisher_id
    with Journal(tmp_path) as again:
        assert (again.last_version, again.publisher_id) == (2, publisher_id)


def test_of_two_publishers_with_one_id_the_one_that_lost_its_lock_hands_out_nothing(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path) as first:
        first.reserve(1)
        lock_in(tmp_path).unlink()
        with Journal(tmp_path) as second:
            assert second.publisher_id == first.publisher_id
            with pytest.raises(WeightBridgeUnavailableError, match="another live publisher"):
                first.reserve(2)
            second.reserve(2)


def test_a_publisher_whose_journal_another_one_wrote_meanwhile_hands_out_nothing(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path) as first:
        first.reserve(1)
        lock_in(tmp_path).unlink()
        with Journal(tmp_path) as second:
            second.reserve(7)
        for version in (8, 2):
            with pytest.raises(WeightBridgeError, match=r"another publisher wrote there: .* 7"):
                first.reserve(version)
        assert first.last_version == 1
    with Journal(tmp_path) as third:
        assert third.last_version == 7
