"""What a run has seen so far, as a table and as the curves of its inner loops."""

import csv
from pathlib import Path
from typing import Any

from ttt_adapt.storage import atomic_write, write_json

COLUMNS = (
    "step",
    "epoch",
    "train_loss_nats",
    "validation_loss_nats",
    "top1",
    "top5",
    "average_top1",
    "learning_rate",
    "elapsed_s",
)
HISTORY_FILE, INNER_FILE = "history.csv", "inner_losses.json"


class History:
    """Rows of ``history.csv``, and ``inner_losses.json`` where those are recorded.

    Attributes:
        rows: at logged steps; the training loss is the mean since the row before.
        inner_losses: at validations, ``{"step": n, "layers": [layer][inner step or token]}``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, float]] = []
        self.inner_losses: list[dict[str, Any]] = []

    def last(self, column: str) -> float:
        """The newest value of a column; NaN before one."""
        for row in reversed(self.rows):
            if column in row:
                return row[column]
        return float("nan")

    def write(self) -> None:
        with atomic_write(self.folder / HISTORY_FILE, "w") as stream:
            writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({k: v if k == "step" else f"{v:.6g}" for k, v in row.items()})
        if self.inner_losses:
            write_json(self.folder / INNER_FILE, self.inner_losses)
