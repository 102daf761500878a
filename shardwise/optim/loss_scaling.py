"""Dynamic loss scaling for float16 (Micikevicius et al., 2018).

float16 loses gradients below 6e-8, so the loss is multiplied by a large scale before backward and gradients
are divided by it before the update. A gradient that overflows means the scale was too large: that step is
skipped and the scale halves. After `scale_every` clean steps in a row the scale doubles, to return to the
largest one that works. The other precisions need no scale: theirs is always 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """The loss scale of a step; `after` returns that of the next step."""

    value: float
    grow_every: int
    """Number of clean steps in a row after which the scale doubles."""
    clean_steps: int = 0
    """Number of steps without overflow since the scale last changed."""
    dynamic: bool = True
    """Whether the scale may change, as it does in float16."""

    @staticmethod
    def first(precision: str, initial: float, grow_every: int) -> LossScale:
        """Return the scale that a run begins with."""
        if precision == "float16":
            return LossScale(initial, grow_every)
        return LossScale(1.0, grow_every, dynamic=False)

    def after(self, overflowed: bool) -> LossScale:
        """Return the scale of the next step."""
        if not self.dynamic:
            return self
        if overflowed:
            return replace(self, value=self.value * 0.5, clean_steps=0)
        if self.clean_steps + 1 >= self.grow_every:
            return replace(self, value=self.value * 2.0, clean_steps=0)
        return replace(self, clean_steps=self.clean_steps + 1)
