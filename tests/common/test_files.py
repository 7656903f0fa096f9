"""A directory is there whole or not at all; only regular files of a stated size are opened."""

import os
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from es_cookbook.common import files
from es_cookbook.common.errors import RunDirectoryError


def test_a_directory_has_its_name_once_it_is_filled_and_leaves_nothing_if_it_fails(
    tmp_path: Path,
) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "old").write_text("of one that died")
    with pytest.raises(ValueError, match="no"), files.whole_directory(tmp_path / "out") as beside:
        assert not list(beside.iterdir())
        (beside / "file").write_text("half")
        raise ValueError("no")
    assert not list(tmp_path.iterdir())
    with files.whole_directory(tmp_path / "out") as beside:
        (beside / "file").write_text("all")
        (beside / "file").chmod(0o600)  # As a library's temporary file, which others cannot read.
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "all"
    assert len({(tmp_path / each).stat().st_mode & 0o444 for each in ("out", "out/file")}) == 1


def test_a_regular_file_is_read_and_appended_to(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "file"
    path.write_bytes(b"1234")
    assert files.read_file(path, 4, tmp_path) == b"1234"
    descriptor = files.opened_descriptor(path, os.O_WRONLY | os.O_APPEND, tmp_path)
    os.write(descriptor, b"5")
    os.close(descriptor)
    assert path.read_bytes() == b"12345"
    with pytest.raises(RunDirectoryError, match="file cannot be opened: it has 5 bytes, and may"):
        files.read_file(path, 4, tmp_path)
    with pytest.raises(FileNotFoundError):
        files.opened(tmp_path / "missing", 4, tmp_path)


_NOT_REGULAR = "it must be a regular file, not a directory, pipe or device"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _link_outside(path: Path) -> None:
    path.with_name("outside").write_bytes(b"secret")
    path.symlink_to("outside")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: os.mkfifo(path), _NOT_REGULAR),
        (Path.mkdir, _NOT_REGULAR),
        (_socket, _NOT_REGULAR),
        (_link_outside, "it is a link"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a link"),
    ],
)
def test_only_regular_files_of_the_directory_are_opened(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(RunDirectoryError) as refused:
        files.opened(path, files.ANY_SIZE, tmp_path)
    assert str(refused.value) == f"{path} cannot be opened: {reason}"
    assert refused.value.strerror == reason
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_where_links_are_followed_they_lead_to_regular_files(tmp_path: Path) -> None:
    _link_outside(tmp_path / "link")
    assert files.read_file(tmp_path / "link", 10, None) == b"secret"
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(RunDirectoryError, match=_NOT_REGULAR):
        files.check_file(tmp_path / "zero", files.ANY_SIZE, None)


def test_no_folder_on_the_way_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshots").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    for run in (tmp_path / "run", tmp_path / "latest"):  # The run itself may be one.
        with pytest.raises(RunDirectoryError, match="snapshots cannot be opened: it is a link"):
            files.opened(run / "snapshots" / "file", 10, run)
        with pytest.raises(RunDirectoryError, match="snapshots cannot be opened: it is a link"):
            files.opened_descriptor(run / "snapshots" / "new", os.O_WRONLY | os.O_CREAT, run)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["file"]


def test_a_line_that_is_too_long_is_refused_also_in_a_file_of_holes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\nxxxxx\ntwo")
    with files.opened(tmp_path / "file", files.ANY_SIZE, tmp_path) as file:
        assert list(files.lines(file, 6)) == [b"one\n", b"xxxxx\n", b"two"]
    os.truncate(tmp_path / "file", 20 * 2**30)
    too_long = pytest.raises(RunDirectoryError, match="/file has a line of more than 16777216 by")
    with files.opened(tmp_path / "file", files.ANY_SIZE, tmp_path) as file, too_long:
        list(files.lines(file))


@pytest.mark.parametrize(
    "text", [b"[" * 11, b"[" + b"1," * 11, b'{"a":' * 3, b'["",[],[],[],[],[]]']
)
def test_a_text_with_too_many_values_is_refused(text: bytes) -> None:
    files.check_values(text, 20)
    with pytest.raises(ValueError, match="it holds more than 10 values"):
        files.check_values(text, 10)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1, ", "is not JSON: Expecting value at character 4"),
        ('{"a": NaN}', "has a number that is not finite: NaN"),
        ("[-Infinity]", "has a number that is not finite: -Infinity"),
        ("[-1e999]", "has a number that is not finite: -1e999"),
        ('[{"a": 1, "b": 2, "b": 2}]', "has the key 'b' twice"),
        ("[" * 100_000, "is nested too deeply"),
        ('["\\ud83d"]', "holds '\\ud83d', which is half a character"),
    ],
)
def test_json_is_read_as_its_standard_has_it(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(what)}$"):
        files.strict_json(text, halves=False)


def test_json_may_hold_half_a_character_where_that_is_asked_for() -> None:
    assert files.strict_json('{"a": ["\\ud83d", 1e9]}') == {"a": ["\ud83d", 1e9]}
    assert files.strict_json('"\\ud83d\\ude00"', halves=False) == "😀"
