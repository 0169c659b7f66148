"""`.ci/watch.py`: a terminal and a log show how far a command is, and a failure shows all that it said."""

import os
import pty
import subprocess
import sys
from pathlib import Path

WATCH = [sys.executable, str(Path(__file__).parents[1] / ".ci" / "watch.py")]
TALK = [sys.executable, "-uc", "import time; print('one'); time.sleep(1); print('two')"]


def test_a_log_has_a_line_at_the_begin_and_one_at_the_end():
    done = subprocess.run([*WATCH, "talk", *TALK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "talk ..."
    assert done.stdout.splitlines()[-1].startswith("talk: done in ")
    assert "\x1b" not in done.stdout


def test_a_terminal_shows_the_last_line_and_clears_it():
    master, slave = pty.openpty()
    done = subprocess.run([*WATCH, "talk", *TALK], stdout=slave, check=True)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 0
    assert "\r\x1b[2Ktalk, 0 s: one" in shown
    assert shown.rstrip().endswith(("talk: done in 1 s", "talk: done in 2 s"))
    assert shown.count("\n") == 1


def test_a_failure_shows_everything_and_has_the_commands_code():
    command = [sys.executable, "-c", "print('what went wrong'); raise SystemExit(7)"]
    done = subprocess.run([*WATCH, "fail", *command], capture_output=True, text=True)
    assert done.returncode == 7
    assert "fail: failed in 0 s" in done.stdout
    assert done.stderr == "what went wrong\n"
