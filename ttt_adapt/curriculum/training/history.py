"""What happened in each step, one JSON line each, and how far a run has come."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ttt_adapt.storage import atomic_write

HISTORY_NAME = "history.jsonl"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a run.

    Attributes:
        step: from 1.
        reward: mean of the rewards that are known; ``None`` if none is.
        pass_rate: share of the known rewards that are 1 or more.
        num_groups: tasks practised in this step.
        zero_signal_groups: those whose known rewards are all equal.
        absent_rewards: completions in this step that could not be verified.
        skipped_updates: updates that had nothing to learn from and left the weights alone.
        num_rollouts: completions so far.
        num_tokens: of prompts and completions so far.
        completion_tokens: mean length of a completion in this step.
        truncated: share of completions cut off at their maximal length.
        loss: mean over the step's updates.
        gradient_norm: of the step's last update, before it is clipped.
        entropy: mean of the policy's over completion tokens, in nats.
        clipped: share of tokens whose ratio was clipped.
        kl: from the model as it was, in nats a token; ``None`` unless it has a weight.
        elapsed_s: seconds of training so far, over all sessions.
    """

    step: int
    reward: float | None
    pass_rate: float | None
    num_groups: int
    zero_signal_groups: int
    absent_rewards: int
    skipped_updates: int
    num_rollouts: int
    num_tokens: int
    completion_tokens: float
    truncated: float
    loss: float
    gradient_norm: float | None
    entropy: float | None
    clipped: float | None
    kl: float | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a run is.

    Attributes:
        record: of the step just done.
        num_steps: in the whole run.
        left_s: seconds that the rest will take, at this session's pace.
    """

    record: StepRecord
    num_steps: int
    left_s: float

    def line(self) -> str:
        """For people."""
        record = self.record
        rates = "no reward known"
        if record.reward is not None:
            rates = f"reward {record.reward:.3f}  pass rate {record.pass_rate:.3f}"
        absent = f"  absent {record.absent_rewards}" if record.absent_rewards else ""
        minutes, seconds = divmod(round(self.left_s), 60)
        return (
            f"step {record.step}/{self.num_steps}  {rates}  without signal "
            f"{record.zero_signal_groups}/{record.num_groups}{absent}  "
            f"{minutes}:{seconds:02d} left"
        )


ReportProgress = Callable[[TrainingProgress], None]


def append_record(folder: Path, record: StepRecord) -> None:
    """Add a line; when this returns it is on disk."""
    with (folder / HISTORY_NAME).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(record)) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_history(folder: Path) -> list[StepRecord]:
    """The records of a run's folder; a line that was cut off by a kill is left out."""
    path = folder / HISTORY_NAME
    names = {field.name for field in fields(StepRecord)}
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            records.append(StepRecord(**{k: v for k, v in values.items() if k in names}))
    return records


def cut_history(folder: Path, step: int) -> list[StepRecord]:
    """Drop the lines of steps after ``step``, which a run that continues there will do again."""
    records: Sequence[StepRecord] = read_history(folder)
    kept = [record for record in records if record.step <= step]
    with atomic_write(folder / HISTORY_NAME, "w") as stream:
        stream.writelines(json.dumps(asdict(record)) + "\n" for record in kept)
    return kept
