"""Runs a command and shows how far it is: its last line and the time, on one line of a terminal, or in lines of a log.

python .ci/watch.py "installing packages" pip install ...

All that the command says is shown if it fails. The exit code is that of the command.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

FRAME_SECONDS, LOG_SECONDS = 0.2, 15.0
"""The time between two lines, on a terminal and in a log."""


def main() -> int:
    """Run the command."""
    title, *command = sys.argv[1:]
    said: list[str] = []
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, said), daemon=True)
    reader.start()
    is_terminal = sys.stdout.isatty()
    if not is_terminal:
        print(f"{title} ...", flush=True)
    while reader.is_alive():
        reader.join(FRAME_SECONDS if is_terminal else LOG_SECONDS)
        if reader.is_alive():
            _show(f"{title}, {time.monotonic() - begin:.0f} s: {said[-1] if said else ''}", is_terminal)
    code = process.wait()
    print(f"{_CLEAR if is_terminal else ''}{title}: {'failed' if code else 'done'} in {time.monotonic() - begin:.0f} s")
    if code:
        print("\n".join(said), file=sys.stderr)
    return code


_CLEAR = "\r\x1b[2K"
"""Moves to the begin of the line, and clears it."""


def _read(lines: Iterable[str], said: list[str]) -> None:
    for line in lines:
        if text := line.strip():
            said.append(text)


def _show(text: str, is_terminal: bool) -> None:
    columns = shutil.get_terminal_size().columns - 1 if is_terminal else 120
    cut = text if len(text) <= columns else f"{text[: columns - 3]}..."
    print(f"{_CLEAR}{cut}" if is_terminal else cut, end="" if is_terminal else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
