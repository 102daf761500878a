"""Dynamic loss scaling for float16 (Micikevicius et al., 2018).

float16 loses gradients below 6e-8, so the loss is multiplied by a large scale before backward and gradients
are divided by it before the update. A gradient that overflows means the scale was too large: that step is
skipped and the scale halves. After `scale_every` clean steps in a row the scale doubles, to creep back
towards the largest that works.

The other precisions need none of it: their scale is 1 and never moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """The scale and the run of clean steps behind it. A value: each step returns the next one."""

    value: float
    grow_every: int
    clean_steps: int = 0
    dynamic: bool = True

    @staticmethod
    def first(precision: str, initial: float, grow_every: int) -> LossScale:
        """Return the scale that a run begins with."""
        if precision == "float16":
            return LossScale(initial, grow_every)
        return LossScale(1.0, grow_every, dynamic=False)

    def after(self, overflowed: bool) -> LossScale:
        """The scale of the next step."""
        if not self.dynamic:
            return self
        if overflowed:
            return replace(self, value=self.value * 0.5, clean_steps=0)
        if self.clean_steps + 1 >= self.grow_every:
            return replace(self, value=self.value * 2.0, clean_steps=0)
        return replace(self, clean_steps=self.clean_steps + 1)
