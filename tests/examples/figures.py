"""Reads the table that an example prints after a comparison."""

import re

ROW = re.compile(r"^(?P<label>[a-z].*?) {2,}(?P<eager>[\d,.]+%?) +(?P<ours>[\d,.]+%?)(?: +[\d.]+)? *$", re.MULTILINE)


def figures(output: str) -> dict[str, tuple[float, float]]:
    """Both figures of each row, eager PyTorch's first."""
    return {row["label"]: (_number(row["eager"]), _number(row["ours"])) for row in ROW.finditer(output)}


def _number(text: str) -> float:
    return float(re.sub("[,%]", "", text))
