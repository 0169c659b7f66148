"""A file is there whole or not at all."""

import errno
from pathlib import Path

import pytest

from ort_accel.files import write_aside


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"before")
    write_aside(file, b"content")
    assert file.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [file]


def test_others_may_read_what_they_may_read_of_any_file(tmp_path):
    (tmp_path / "usual").touch()
    write_aside(tmp_path / "file", b"content")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def killed(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(OSError, match="broken"):
        write_aside(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []
