"""Helpers of the configuration's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from ort_accel.config import ConfigError
from ort_accel.config.load import load_config_text

settings.register_profile("config", deadline=None, max_examples=200)
settings.load_profile("config")


@pytest.fixture
def errors() -> Callable[[str | bytes], list[str]]:
    """The problems of a text, one a line, as a user reads them."""

    def of(text: str | bytes) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config_text(text, "x.yaml")
        return str(caught.value).splitlines()

    return of
