"""Loaded first by processes that tests start: DeepSpeed would compile a helper, for minutes, and gloo is enough."""

import sys
from importlib.abc import MetaPathFinder


class WithoutHelper(MetaPathFinder):
    """Lets no operator of DeepSpeed seem fit to be compiled when the only file that asks is imported."""

    def find_spec(self, name, *_):
        if name == "deepspeed.comm.torch":
            sys.modules["deepspeed.ops"].__compatible_ops__ = {}


sys.meta_path.insert(0, WithoutHelper())
