"""A script that is run ends with its own exit code and its last words, whatever a process group is still at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOGETHER = {
    "is done": (0, ""),
    "leaves the group itself": (0, ""),
    "exits with 3": (3, ""),
    "exits with a text": (1, "a text"),
    "fails": (1, "ValueError: a failure"),
    "has no memory": (1, "ort_accel: rank 0 of 1 processes ran out of memory"),
    "is refused": (2, "ort_accel.run: a refusal"),
}
ALONE = {"exits with 3 alone": 3}


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endings")
    subprocess.run(
        [sys.executable, "-m", "tests.cli.ending", folder, *TOGETHER, *ALONE], cwd=ROOT, timeout=600, check=True
    )
    return folder, json.loads((folder / "codes.json").read_text())


@pytest.mark.parametrize("how", TOGETHER)
def test_a_process_of_a_group_ends_as_its_script_does(endings, how):
    folder, codes = endings
    code, words = TOGETHER[how]
    said = (folder / how / "err").read_text()
    assert codes[how] == code, said
    assert words in said
    assert ("Traceback" in said) == (how in {"fails", "has no memory"})
    assert not (folder / how / "interpreter").exists(), "the interpreter's own end is what threads can break"


@pytest.mark.parametrize("how", [*TOGETHER, *ALONE])
def test_threads_are_waited_for_goodbyes_are_said_and_files_are_written(endings, how):
    folder, _ = endings
    assert (folder / how / "thread").exists()
    assert (folder / how / "goodbye").exists()
    assert (folder / how / "kept").read_text() == "all of it"


@pytest.mark.parametrize("how", ALONE)
def test_a_process_without_a_group_ends_as_python_does(endings, how):
    folder, codes = endings
    assert codes[how] == ALONE[how]
    assert (folder / how / "interpreter").exists()
