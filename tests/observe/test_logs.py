"""`observe.log_level`: who speaks, how much, and that no other logger is touched."""

import logging
import subprocess
import sys

import pytest

from ort_accel.observe import logs

LEVELS = ["verbose", "devinfo", "info", "warning", "error", "fatal"]


@pytest.fixture(autouse=True)
def as_before():
    level, handlers = logs.LOG.level, list(logs.LOG.handlers)
    yield
    logs.LOG.setLevel(level)
    logs.LOG.handlers[:] = handlers


@pytest.mark.parametrize(
    ("log_level", "said"),
    [
        ("verbose", [10, 20, 30, 40, 50]),
        ("devinfo", [10, 20, 30, 40, 50]),
        ("info", [20, 30, 40, 50]),
        ("warning", [30, 40, 50]),
        ("error", [40, 50]),
        ("fatal", [50]),
    ],
)
def test_the_first_rank_says_what_the_level_allows(log_level, said):
    logs.configure(log_level)
    assert [level for level in (10, 20, 30, 40, 50) if logs.LOG.isEnabledFor(level)] == said


@pytest.mark.parametrize(("log_level", "speaks"), [(level, level in ("verbose", "devinfo")) for level in LEVELS])
@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_other_ranks_speak_below_info_only(log_level, speaks, variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    logs.configure(log_level)
    assert logs.LOG.isEnabledFor(logging.CRITICAL) is speaks
    assert (logs.severity(log_level) < 4) is speaks


def test_the_rank_of_a_process_group_counts_before_the_environment(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert logs.rank() == 0


def test_onnxruntime_grows_quieter_with_the_level():
    assert [logs.severity(level) for level in LEVELS] == [0, 1, 2, 3, 3, 4]


def test_configuring_twice_adds_nothing_and_leaves_other_loggers_alone():
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("torch").level)
    logs.configure("info")
    logs.configure("warning")
    assert sum(isinstance(handler, logs._ToStandardError) for handler in logs.LOG.handlers) == 1
    assert (root.level, list(root.handlers), logging.getLogger("torch").level) == before


SCRIPT = """
import logging
{setup}
from ort_accel.observe.logs import LOG, configure
configure("info")
LOG.info("the message")
"""


@pytest.mark.parametrize(
    ("setup", "lines"),
    [("", ["ort_accel: INFO: the message"]), ("logging.basicConfig(format='own %(message)s')", ["own the message"])],
)
def test_a_message_is_written_once_and_as_the_program_has_set_it_up(setup, lines):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(setup=setup)], capture_output=True, text=True)
    assert (done.stdout, done.stderr.splitlines()) == ("", lines)
