"""Lets engine and eager mode take turns in training steps, and decides which is faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

MOST_PAIRS = 12
"""Pairs of steps after which the sums of their times decide in any case."""
TIE_RATIO = 1.01
"""The engine goes on while its steps take at most this many times eager's."""
CLEAR_RATIOS = {1: 2.5, 2: 1.5, 3: 1.25, 4: 1.08}
"""For a number of pairs, the factor that decides if every pair differs by more, in the same direction."""
ENGINE_PAIRS = 2
"""Pairs that the engine must have won: other load can lengthen one step, and a second eager one loses nothing."""
LEAD_PAIRS = 4
"""Otherwise one of the two must have won this many pairs more than the other."""
PAIRS_KEPT = 9
"""Pairs whose times are added up. Beside other load some steps take many times as long, and sums count those."""
MIN_INTERVAL_STEPS = 16
"""The least number of steps between comparisons."""
COST_SHARE = 0.01
"""Share of the time that later comparisons may cost."""
CONTRADICTION_RATIO = 1.05
"""A later pair that differs by more than this factor from a tie, against the decision, opens the comparison again."""
PACE_CHANGE_RATIO = 1.3
"""The change of the pace after which the two are compared anew."""
PACE_STEPS = 8
"""Steps over which the pace is measured."""


class Turns:
    """Lets engine and eager mode take turns, and decides which is faster."""

    def __init__(self) -> None:
        self.is_decided, self.prefers_eager = False, False
        self.pairs = 0
        self.ratio = 1.0
        self._pending: list[bool] = []
        """The next steps of the present pair, True for eager mode."""
        self._compares = True
        self._is_open = True
        """True until a clear decision; after one, a single pair is enough to confirm it."""
        self._last: dict[bool, float] = {}
        """The pace of the step that waits for its counterpart, under True if eager mode ran it."""
        self._kept: deque[tuple[float, float]] = deque(maxlen=PAIRS_KEPT)
        """The paces of the last pairs, the engine's first."""
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._pace_before: float | None = None
        self._wait = 0
        """Steps until the next pair."""
        self._paid_wait = 0
        """Steps until a change of pace may bring the next pair sooner."""
        self._pairs_before = 0
        """The number of pairs at the last decision."""

    def begin_anew(self) -> None:
        """Forget the decision, since the engine's steps have become faster."""
        self.is_decided, self._is_open, self._compares = False, True, True
        self._pending, self._last = [], {}
        self._kept.clear()
        self._pairs_before = self.pairs
        self._pace.clear()
        self._pace_before = None

    @property
    def is_eager_settled(self) -> bool:
        """True while eager mode runs the steps, and no pair is under way."""
        return self.is_decided and self.prefers_eager and not self._compares

    @property
    def is_due(self) -> bool:
        """True if the next step begins a pair."""
        return self._compares and not self._pending

    def next_is_eager(self) -> bool:
        """True if eager mode runs the next step."""
        if not self._compares:
            self._wait, self._paid_wait = self._wait - 1, self._paid_wait - 1
            self._compares = self._wait <= 0 or (self._paid_wait <= 0 and self._has_changed())
            return self.prefers_eager
        if not self._pending:
            eager_first = bool(self.pairs % 2)
            self._pending = [eager_first, not eager_first]
        return self._pending.pop(0)

    def took(self, pace: float, in_eager: bool) -> bool:
        """Add a step with its seconds for each element; True if that decides who runs the next ones."""
        if not self._compares:
            if in_eager == self.prefers_eager:
                self._pace.append(pace)
                if self._pace_before is None and len(self._pace) == PACE_STEPS:
                    self._pace_before = median(self._pace)
            return False
        self._last[in_eager] = pace
        if len(self._last) < 2:
            return False
        pair = self._last[False], self._last[True]
        self._last = {}
        if not self._is_open and self._contradicts(pair[0] / pair[1]):
            self._kept.clear()
            self._is_open = True
        self._kept.append(pair)
        self.pairs += 1
        engine, eager = zip(*self._kept, strict=True)
        self.ratio = sum(engine) / sum(eager)
        if self._is_open and not self._is_clear():
            return False
        self.prefers_eager = self.ratio > TIE_RATIO
        self.is_decided, self._is_open, self._compares = True, False, False
        self._pending = []
        cost = self._pairs_since * (max(self.ratio, 1 / self.ratio) - 1)
        self._wait, self._pairs_before = max(MIN_INTERVAL_STEPS, round(cost / COST_SHARE)), self.pairs
        self._paid_wait = self._wait // 2 if self.prefers_eager else 0
        return True

    @property
    def _pairs_since(self) -> int:
        """Pairs since the last decision."""
        return self.pairs - self._pairs_before

    def _is_clear(self) -> bool:
        """True if the pairs show who is faster, one by one and added up, or if there are enough of them."""
        ratios = [engine / eager for engine, eager in self._kept]
        is_agreed = (median(ratios) > 1) == (self.ratio > 1)
        return (is_agreed and is_clear(ratios)) or self._pairs_since >= MOST_PAIRS

    def _contradicts(self, ratio: float) -> bool:
        """True if a pair clearly contradicts the decision."""
        return ratio * CONTRADICTION_RATIO < 1 if self.prefers_eager else ratio > CONTRADICTION_RATIO

    def _has_changed(self) -> bool:
        """True if steps have become much faster or slower since the last comparison."""
        if self._pace_before is None:
            return False
        if 1 / PACE_CHANGE_RATIO < median(self._pace) / self._pace_before < PACE_CHANGE_RATIO:
            return False
        self._kept.clear()
        self._pace.clear()
        self._pace_before, self._is_open = None, True
        return True


def is_clear(ratios: Sequence[float]) -> bool:
    """True if pairs of steps show who is faster."""
    wins = sum(1 if ratio < 1 else -1 for ratio in ratios)
    factor = min(CLEAR_RATIOS[count] for count in CLEAR_RATIOS if len(ratios) >= count)
    is_engine_clear = len(ratios) >= ENGINE_PAIRS and max(ratios) < 1 / factor
    return min(ratios) > factor or is_engine_clear or abs(wins) >= LEAD_PAIRS
