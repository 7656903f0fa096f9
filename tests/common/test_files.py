"""A directory is there whole or not at all."""

from pathlib import Path

import pytest

from es_cookbook.common.files import whole_directory


def test_a_directory_has_its_name_once_it_is_filled(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "out") as beside:
        (beside / "file").write_text("all")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "all"


def test_what_failed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "old").write_text("of one that died")
    with pytest.raises(ValueError, match="no"), whole_directory(tmp_path / "out") as beside:
        assert not list(beside.iterdir())
        (beside / "file").write_text("half")
        raise ValueError("no")
    assert not list(tmp_path.iterdir())
