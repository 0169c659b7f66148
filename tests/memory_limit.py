"""A process that may take little more memory than it has."""

import resource
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limit(mebibytes):
    """Let this process take so much more memory, and no more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + mebibytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
