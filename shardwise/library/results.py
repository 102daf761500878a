"""What the functions of the library return: values to read, to print, and to show in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from io import StringIO

    from rich.console import Console

    from shardwise.files import Json
    from shardwise.proof.drill import DrillResult
    from shardwise.proof.prove import ProofResult

PAGE_HEIGHT = 900
"""Height of a page in a notebook, in pixels."""


def _text_console(text: StringIO, markup: bool = True) -> Console:
    """Return a console that writes plain text. In a notebook rich would show what is printed instead of
    writing it, and would colour it."""
    from rich.console import Console

    return Console(
        file=text, width=100, highlight=False, markup=markup, force_jupyter=False, force_terminal=False
    )


@dataclass(frozen=True)
class PlanAnswer:
    """The planner's answer. Printing it shows the best layout and why; a notebook shows it as a page."""

    answer: dict[str, Any]

    @property
    def best(self) -> dict[str, Any]:
        """The best layout: `layout`, `micro_batch`, `memory_gib`, `step_seconds` and more."""
        best: dict[str, Any] = self.answer["best"]
        return best

    @property
    def layout(self) -> dict[str, Any]:
        """The best layout by axis, as a job's `[layout]` table has it."""
        layout: dict[str, Any] = self.best["layout"]
        return layout

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """Other layouts that fit, the best first."""
        candidates: list[dict[str, Any]] = self.answer["candidates"]
        return candidates

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardwise plan --json` prints."""
        return self.answer

    def __str__(self) -> str:
        from io import StringIO

        from shardwise.library.plan_show import show

        text = StringIO()
        show(self.answer, _text_console(text, markup=False))
        return text.getvalue()

    def _repr_html_(self) -> str:
        """Return the answer as a page, which a notebook shows in a frame."""
        from shardwise.library.plan_page import render_page

        page = escape(render_page(self.answer), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="{PAGE_HEIGHT}" style="border: 0"></iframe>'


@dataclass(frozen=True)
class Run:
    """A run that has ended, or was stopped."""

    folder: Path
    """The run folder, with the records, the logs and the checkpoints."""
    status: int
    """0 if the run is done; 75 or 130 if it was stopped, and saved: launch the same job to continue it."""

    @property
    def metrics(self) -> list[Json]:
        """Records of the steps, the oldest first: loss, gradient norm, speed, memory and more."""
        from shardwise.observe import read_metrics

        return list(read_metrics(self.folder))

    @property
    def events(self) -> list[Json]:
        """Starts, saves, faults and recoveries, the oldest first."""
        from shardwise.observe import read_events

        return list(read_events(self.folder))

    def __str__(self) -> str:
        from io import StringIO

        from shardwise.observe import render, summarise

        text = StringIO()
        render(summarise(self.folder), _text_console(text))
        return text.getvalue()

    def _repr_html_(self) -> str:
        """Return the report of the run for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class Proof:
    """The result of a proof. Printing it shows the worst errors and the verdict."""

    result: ProofResult

    @property
    def passes(self) -> bool:
        """Whether the layout computes what one device computes."""
        return self.result.verdict.passes

    def to_json(self) -> Json:
        """Return the object that `shardwise verify --json` prints."""
        return self.result.to_json()

    def __str__(self) -> str:
        from shardwise.library.prove_job import proof_lines

        return "\n".join(proof_lines(self.result))

    def _repr_html_(self) -> str:
        """Return the result for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True)
class Drill:
    """The result of a drill. Printing it shows each fault and the verdict."""

    result: DrillResult

    @property
    def passes(self) -> bool:
        """Whether every fault was survived, and the run is the undisturbed one."""
        return self.result.passes

    def to_json(self) -> Json:
        """Return the object that `shardwise drill --json` prints."""
        return self.result.to_json()

    def __str__(self) -> str:
        from shardwise.library.drill_job import drill_lines

        return "\n".join(drill_lines(self.result))

    def _repr_html_(self) -> str:
        """Return the result for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"
