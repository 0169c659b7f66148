"""Only files that were signed with the user's key are read."""

import os
import threading

import pytest

from ort_accel.reporting.report import Report
from ort_accel.runtime import signed_files
from ort_accel.runtime.signed_files import SignedFiles, UntrustedKeyError, user_key


@pytest.fixture
def files(tmp_path):
    return SignedFiles(tmp_path / "cache", "graph", Report(), tmp_path / "home" / "key")


def test_a_written_file_is_read(files):
    files.put("one", b"content")
    assert files.get("one") == b"content"
    assert files.get("other") is None


def test_a_key_is_made_once_and_is_its_users_alone(tmp_path):
    path, found = tmp_path / "home" / "key", []
    threads = [threading.Thread(target=lambda: found.append(user_key(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_key_behind_a_link_or_in_an_open_folder_is_refused(tmp_path):
    real = tmp_path / "home" / "key"
    user_key(real)
    link = tmp_path / "links" / "key"
    link.parent.mkdir(mode=0o700)
    link.symlink_to(real)
    with pytest.raises(OSError, match="symbolic"):
        user_key(link)
    real.parent.chmod(0o777)
    with pytest.raises(UntrustedKeyError, match="other users"):
        user_key(real)


def test_a_short_key_is_refused(tmp_path):
    path = tmp_path / "home" / "key"
    user_key(path)
    path.write_bytes(b"short")
    with pytest.raises(UntrustedKeyError, match="32 bytes"):
        user_key(path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(files, tmp_path):
    files.put("one", b"content")
    path = tmp_path / "cache" / "one.graph"
    path.unlink()
    os.mkfifo(path)
    assert files.get("one") is None


def test_a_file_that_is_too_large_is_not_read(files, monkeypatch):
    files.put("one", b"content")
    monkeypatch.setattr(signed_files, "MAX_FILE_BYTES", 10)
    assert files.get("one") is None


def test_without_a_key_nothing_is_read_or_written(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("in the way of the folder")
    report = Report()
    files = SignedFiles(tmp_path / "cache", "graph", report, blocked / "key")
    assert not files.put("one", b"content")
    assert files.get("one") is None
    assert not (tmp_path / "cache").exists()
    assert any("no key" in note for note in report.notes)
