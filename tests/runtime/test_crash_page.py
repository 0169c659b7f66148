"""Which models run is told by what a process left: those of all threads, and those of no other process."""

import os
import threading

from ort_accel.runtime import crash_page
from ort_accel.runtime.crash_page import RunningModel, models_at_crash, orphaned_pages, page_in
from tests.forked import START

KEYS = [digit * 64 for digit in "abc"]


def die_with_two_threads(folder):
    """Ends while two threads run a model each; a third has done so before."""
    page, together = page_in(folder), threading.Barrier(3)

    def run(key):
        with RunningModel(page, key, 2):
            together.wait()
            together.wait()

    with RunningModel(page, KEYS[2], 1):
        pass
    for key in KEYS[:2]:
        threading.Thread(target=run, args=(key,), daemon=True).start()
    together.wait()
    os._exit(3)


def test_the_page_names_the_models_of_all_threads(tmp_path):
    process = START.Process(target=die_with_two_threads, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 3
    (page,) = orphaned_pages(tmp_path)
    assert sorted(models_at_crash(page)) == [(KEYS[0], 2), (KEYS[1], 2)]


def test_the_slot_of_an_ended_thread_is_reused(tmp_path):
    page = page_in(tmp_path)
    slots = []
    for _ in range(2 * crash_page.PAGE_BYTES // crash_page.SLOT_BYTES):
        thread = threading.Thread(target=lambda: slots.append(page.slot()))
        thread.start()
        thread.join()
    assert crash_page.OVERFLOW_SLOT not in slots


def test_a_forked_process_has_nothing_to_do_with_its_parents_page(tmp_path):
    page = page_in(tmp_path)
    with RunningModel(page, KEYS[0], 1):
        child = os.fork()
        if not child:
            with RunningModel(page, KEYS[1], 1):
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        (path,) = tmp_path.iterdir()
        assert list(models_at_crash(path)) == [(KEYS[0], 1)]
    assert list(models_at_crash(path)) == []
    assert orphaned_pages(tmp_path) == [], "its process lives"


def test_on_an_unsafe_file_system_no_page_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(crash_page, "SAFE_FILE_SYSTEMS", {"none"})
    with RunningModel(page_in(tmp_path), KEYS[0], 1):
        assert list(tmp_path.iterdir()) == []
