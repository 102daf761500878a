"""Any element-wise class of torch.optim as the optimizer of a job: `name = "torch.optim.NAdam"`, or a class
of another package or of a file of the user's own.

A torch optimizer changes whole parameters in place, and keeps what it wants in `state`. A rank has pieces of
parameters. So an update makes an optimizer of the class for its pieces, gives it the state that the run
holds, calls `step()`, and takes the state back. That is right if the class treats each number of a weight
independently and keeps nothing elsewhere. Both are tried before a job is accepted
(optimizers/try_torch_class.py), and the trial also finds which states there are, so that plans count them and
checkpoints name them.

In the first step of a parameter the class makes its state by itself, as it would in plain torch.

The number of steps is a Python number for most classes, so the host waits for the device before an update,
once for all parameters (optimizers/class_step.py makes the steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from shardwise.errors import UserError
from shardwise.optimizers.base import NORM_NUMBERS, Optimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardwise.optimizers.base import Slots, Updated
    from shardwise.optimizers.class_step import Piece
    from shardwise.optimizers.try_torch_class import Trial


class TorchClass(Optimizer):
    """A class of torch.optim, of another package or of your own file. Its keywords are keys of this table."""

    model_config = ConfigDict(extra="allow")

    title: ClassVar[str] = "a torch.optim class"
    fused: ClassVar[bool] = True
    reads_step: ClassVar[bool] = True

    name: str = Field(
        description="an element-wise optimizer: `torch.optim.NAdam`, `package.module.Class`, or "
        "`file.py:Class` of your own; its keywords, such as `eps`, are further keys of this table",
        examples=["torch.optim.NAdam"],
    )
    weight_decay: float = Field(
        0.0, ge=0, description="as the class defines it, on matrices only; left out: the default of the class"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, values: object, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Return the optimizer with the weight decay that the class has by default, which does not count as a
        key that was given."""
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            return make(values)
        from shardwise.optimizers.try_torch_class import complete_settings

        made = make(complete_settings(values, cls.model_fields))
        if "weight_decay" not in values:
            made.model_fields_set.discard("weight_decay")
        return made

    @model_validator(mode="after")
    def _try(self) -> TorchClass:
        """Refuse a class that cannot be sharded."""
        trial = self.trial
        if any("weight_decay" in group for group in self.groups.values()):
            trial.check_decay(self.name)
        return self

    @property
    def trial(self) -> Trial:
        """What the trial found out about the class with these settings."""
        from shardwise.optimizers.try_torch_class import tried

        return tried(self.name, self.weight_decay, self.__pydantic_extra__ or {})

    @property
    def slots(self) -> tuple[str, ...]:
        """The states of a weight's shape, under the names that the class gives them."""
        return tuple(self.trial.step.states.slots)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The states that are single numbers, such as `mu_product` of NAdam."""
        return tuple(self.trial.step.states.scalars)

    @property
    def from_zeros(self) -> bool:
        """Whether all states begin as zeros, which those of Rprop do not."""
        return self.trial.from_zeros

    def slot_dtype(self, slot: str) -> str | None:
        """Return the dtype of a state that the class always keeps in the same dtype."""
        return self.trial.step.states.slots[slot]

    def state_bytes(self, width: float) -> float:
        """Return the bytes per parameter that all states take."""
        import torch

        dtypes = self.trial.step.states.slots.values()
        return sum(width if dtype is None else getattr(torch, dtype).itemsize for dtype in dtypes)

    @property
    def numbers_moved(self) -> float:
        """Numbers per parameter that an update moves: those of its operators, which the trial has counted,
        and those of the gradient norm and division."""
        return self.trial.numbers_moved + NORM_NUMBERS

    def update(
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the update of a piece, of which the class gets copies."""
        from shardwise.optimizers.class_step import Piece

        count = len(self.slots)
        tensors = [slot.clone() for slot in slots[:count]]
        scalars = [float(number) for number in slots[count:]]
        piece = Piece(weight.clone(), gradient.clone(), tensors, scalars, int(step) - 1)
        (new,) = self.trial.step.update([piece], lr, decay)
        numbers = [old.new_tensor(number) for old, number in zip(slots[count:], new, strict=True)]
        return piece.weight, (*tensors, *numbers)

    def update_fused(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        steps: list[Tensor],
        *,
        lr: float,
        decay: float,
        divide_by: Tensor,
        skip: Tensor,
    ) -> None:
        """Let the class update the pieces of all parameters in place."""
        import torch

        from shardwise.optimizers.class_step import Piece

        count, names = len(self.slots), self.scalars
        tensors, scalars = list(zip(*slots[:count], strict=True)), list(zip(*slots[count:], strict=True))
        wanted = [torch.stack([skip, *steps]).double(), *(torch.stack(numbers) for numbers in scalars)]
        skipped, *numbers = torch.cat(wanted).tolist()  # the only wait for the device
        if skipped:
            return
        torch._foreach_div_(gradients, divide_by)
        done, values = numbers[: len(steps)], iter(numbers[len(steps) :])
        pieces = [
            Piece(
                weight.detach(),
                gradient,
                tensors[index] if tensors else (),
                [next(values) for _ in names],
                int(done[index]),
            )
            for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True))
        ]
        for index, new in enumerate(self._update_in_chunks(pieces, lr, decay)):
            for tensor, value in zip(scalars[index] if scalars else (), new, strict=True):
                tensor.fill_(value)
        torch._foreach_add_(steps, 1)

    def _update_in_chunks(self, pieces: list[Piece], lr: float, decay: float) -> list[list[float]]:
        """Update pieces in place, some million elements at a time, and return the new scalars of each."""
        from shardwise.optimizers.class_step import chunks

        new: list[list[float]] = [[] for _ in pieces]
        for chunk in chunks(pieces):
            results = self.trial.step.update([part for _, part in chunk], lr, decay)
            for (index, _), numbers in zip(chunk, results, strict=True):
                new[index] = numbers
        return new

    def describe(self, rounds: bool) -> str:
        """Return the class, its settings and what it keeps."""
        decay = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        given = {**self.model_extra, **decay}  # type: ignore[dict-item]
        settings = ", ".join(f"{key}={value}" for key, value in given.items())
        kept = ", ".join((*self.slots, *self.scalars)) or "no state"
        how = " on bfloat16 weights and states, rounded stochastically" if rounds else ""
        return f"{self.name}({settings}){how}, keeps {kept}"

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return an optimizer of the class, which gets whole weights."""
        return self.trial.step.made(groups)


def address_of(kind: object) -> str:
    """Return the name by which a job finds an optimizer's class: `torch.optim.NAdam`, `package.module.Class`
    or `file.py:Class`."""
    import sys

    import torch

    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        made = isinstance(kind, torch.optim.Optimizer)
        what = f"an optimizer that is made already ({type(kind).__name__})" if made else repr(kind)
        raise UserError(
            f"engine.optimizer: got {what}; give the name of an optimizer or a class, as in "
            "engine.optimizer('adamw', lr=3e-4) or engine.optimizer(torch.optim.NAdam, lr=1e-3)"
        )
    name, module = kind.__name__, sys.modules.get(kind.__module__)
    if getattr(torch.optim, name, None) is kind:
        return f"torch.optim.{name}"
    if module is None or getattr(module, name, None) is not kind or getattr(module, "__file__", None) is None:
        raise UserError(
            f"engine.optimizer: {kind.__qualname__} is at the top of no file, so workers cannot find it; "
            "put the class at the top of a Python file"
        )
    if "." in kind.__module__ or "site-packages" in str(module.__file__):
        return f"{kind.__module__}.{name}"
    return f"{module.__file__}:{name}"
