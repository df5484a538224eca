"""Floor 9. What the user of `batchyard run` asked for, after the words were understood."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchyard.cli.engines import EngineChoice
from batchyard.scheduling.canary import CanaryPolicy
from batchyard.scheduling.order import OrderName
from batchyard.service.intake.rows import RowPlan
from batchyard.service.join import Order


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the user asked for."""

    source: Path
    output: Path
    errors: Path | None
    choice: EngineChoice
    rows: RowPlan | None
    row_options_given: bool
    limit: int | None
    order: Order
    work_order: OrderName
    dedupe: bool | None
    deadline_s: float | None
    canary: CanaryPolicy | None
    dry_run: bool
    prices: str | None
    restart: bool
    json_events: bool

    @property
    def error_path(self) -> Path:
        """Where failed requests go."""
        return self.errors or self.output.with_name(self.output.stem + ".errors.jsonl")

    @property
    def state_path(self) -> Path:
        """The state folder, beside the output."""
        return self.output.with_name(self.output.name + ".batchyard")
