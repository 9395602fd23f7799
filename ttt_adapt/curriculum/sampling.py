"""Attempts at tasks: completions drawn, verified, and kept so that nothing is drawn twice.

What is drawn for a task depends on its prompt, the seed and the sample's number; not on the tasks
beside it, the order, or where a run was interrupted (in half precision rounding may differ with
the batch; batches are the same whenever the same tasks are asked for).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.curriculum.decoding import (
    end_token_ids,
    padding_token_id,
    sample_token_ids,
    uniform_numbers,
)
from ttt_adapt.curriculum.padding import check_padding_invariance
from ttt_adapt.curriculum.prompts import Prompts, fitting_prompts
from ttt_adapt.curriculum.sampling_settings import SamplingSettings
from ttt_adapt.curriculum.tasks import Task, to_json
from ttt_adapt.curriculum.verdicts import Verdict
from ttt_adapt.curriculum.verifiers.extraction import final_answer, normalized
from ttt_adapt.curriculum.verifying import Verifier
from ttt_adapt.errors import ModelError
from ttt_adapt.evaluation.solving import SOLVED, Attempts
from ttt_adapt.models.language_model import wrap_language_model
from ttt_adapt.storage import stable_hash

ATTEMPTS_NAME = "attempts.jsonl"
_ONE_RIGHT_ANSWER = ("math", "choice", "exact", "grid")

ReportSampling = Callable[[int, int], None]
"""Told how many tasks are done, of how many."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One attempt.

    Attributes:
        text: without special tokens.
        reward: ``None`` where it could not be verified.
        reason: of the verdict.
        answer: the final answer to vote with, so written that equal ones have the same text.
        num_tokens: with the end token.
        ended: by an end token; else it was cut off.
    """

    text: str
    reward: float | None
    reason: str
    answer: str | None
    num_tokens: int
    ended: bool


@dataclass(frozen=True, slots=True)
class SolvedTask:
    """The attempts at one task.

    Attributes:
        completions: none where the prompt was too long for the model or the settings.
        prompt_tokens: of the prompt.
        votes: whether its answers can be voted on (programs can't).
    """

    task_id: str
    completions: tuple[Completion, ...]
    prompt_tokens: int
    votes: bool = True

    def attempts(self, seed: int = 0, subset: str = "") -> Attempts:
        """What ``ttt_adapt.evaluation.solve_rates`` takes.

        Args:
            seed: of the run that these belong to.
            subset: for reporting by family or data set.
        """
        return Attempts(
            task_id=self.task_id,
            rewards=tuple(completion.reward for completion in self.completions),
            answers=tuple(c.answer for c in self.completions) if self.votes else (),
            seed=seed,
            subset=subset,
        )


def sample_attempts(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    settings: SamplingSettings,
    verifier: Verifier,
    *,
    progress: ReportSampling | None = None,
    ledger: Path | None = None,
    fingerprint: str | None = None,
) -> list[SolvedTask]:
    """Draw ``settings.num_samples`` completions of each task and verify them; in the tasks' order.

    Args:
        model: a ``transformers`` causal language model, on its device.
        ledger: a folder where finished tasks are kept; those kept there under the same model,
            settings and task are not drawn again.
        fingerprint: of the model, for the ledger; ``None``: a hash of its weights.

    Raises:
        TaskError: no tasks, one id twice, a kind that can't be verified, or no prompt that fits.
        ModelError: no room for a prompt, or NaN predicted.
    """
    verifier.require(tasks)
    prompts = fitting_prompts(
        model, tokenizer, tasks, settings, max_completion_tokens=settings.max_new_tokens
    )
    keys = {}
    found: dict[str, SolvedTask] = {}
    if ledger is not None:
        ledger.mkdir(parents=True, exist_ok=True)
        name = fingerprint or wrap_language_model(model, tokenizer, name="model").fingerprint
        keys = _keys(name, prompts.tasks, settings, verifier)
        found = _kept(ledger / ATTEMPTS_NAME, keys, settings.num_samples)
    for task_id, num_tokens in prompts.too_long.items():
        found[task_id] = SolvedTask(task_id, (), num_tokens)
    done = len(found)
    if progress is not None:
        progress(done, len(tasks))
    for batch in _batches(prompts, settings, _needs_equal_lengths(model, tokenizer)):
        if all(prompts.tasks[position].id in found for position in batch):
            continue
        solved = _solve(model, tokenizer, prompts, batch, settings, verifier)
        fresh = [item for item in solved if item.task_id not in found]
        found |= {item.task_id: item for item in fresh}
        if ledger is not None:
            _keep(ledger / ATTEMPTS_NAME, fresh, keys)
        done += len(fresh)
        if progress is not None:
            progress(done, len(tasks))
    return [found[task.id] for task in tasks]


def _needs_equal_lengths(model: Any, tokenizer: Any) -> bool:
    """Whether padding would change what this model draws."""
    try:
        check_padding_invariance(model, tokenizer)
    except ModelError:
        return True
    return False


def _batches(
    prompts: Prompts, settings: SamplingSettings, equal_lengths: bool
) -> Iterator[list[int]]:
    """Positions of tasks whose completions are drawn at once: prompts of like length together."""
    lengths = [len(ids) for ids in prompts.token_ids]
    per_batch = max(1, settings.batch_size // settings.num_samples)
    batch: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda p: (lengths[p], p)):
        is_other = bool(batch) and equal_lengths and lengths[batch[0]] != lengths[position]
        if len(batch) == per_batch or is_other:
            yield batch
            batch = []
        batch.append(position)
    if batch:
        yield batch


def _solve(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    batch: Sequence[int],
    settings: SamplingSettings,
    verifier: Verifier,
) -> list[SolvedTask]:
    ends = end_token_ids(model, tokenizer)
    tasks = [prompts.tasks[position] for position in batch]
    uniforms_PNT = torch.stack(
        [
            uniform_numbers(settings.seed, task.id, settings.num_samples, settings.max_new_tokens)
            for task in tasks
        ]
    )
    drawn: list[list[list[int]]] = [[] for _ in batch]
    for start in range(0, settings.num_samples, settings.batch_size):
        part = sample_token_ids(
            model,
            [prompts.token_ids[position] for position in batch],
            uniforms_PNT[:, start : start + settings.batch_size],
            temperature=settings.temperature,
            top_p=settings.top_p,
            end_ids=ends,
            pad_id=padding_token_id(tokenizer),
        )
        for rows, more in zip(drawn, part, strict=True):
            rows.extend(more)
    texts = tokenizer.batch_decode(
        [ids for rows in drawn for ids in rows], skip_special_tokens=True
    )
    verdicts = verifier.verify_all(
        [task for task in tasks for _ in range(settings.num_samples)],
        texts,
        num_workers=settings.num_verifiers,
    )
    solved = []
    for number, (task, rows) in enumerate(zip(tasks, drawn, strict=True)):
        first = number * settings.num_samples
        solved.append(
            SolvedTask(
                task.id,
                tuple(
                    Completion(
                        text=texts[first + sample],
                        reward=verdicts[first + sample].reward,
                        reason=verdicts[first + sample].reason,
                        answer=_answer(
                            task, texts[first + sample], verdicts[first + sample], verifier
                        ),
                        num_tokens=len(ids),
                        ended=bool(ids) and ids[-1] in ends,
                    )
                    for sample, ids in enumerate(rows)
                ),
                len(prompts.token_ids[batch[number]]),
                votes=task.kind != "code",
            )
        )
    return solved


def _answer(task: Task, text: str, verdict: Verdict, verifier: Verifier) -> str | None:
    """A final answer as it is counted in a vote: right ones are equal, however they are written."""
    if task.kind == "code":
        return None
    is_right = verdict.reward is not None and verdict.reward >= SOLVED
    if is_right and task.kind in _ONE_RIGHT_ANSWER:
        return normalized(str(task.answer))
    found = verdict.answer
    if found is None:
        last = final_answer(text, verifier.settings.final_answer)
        found = last.text if last is not None else None
    return normalized(found) or None if found is not None else None


def _keys(
    fingerprint: str, tasks: Sequence[Task], settings: SamplingSettings, verifier: Verifier
) -> dict[str, str]:
    """By task id, what its attempts depend on, hashed; the number of samples apart, as the first
    ones are the same however many there are."""
    shared = {
        "model": fingerprint,
        "settings": settings.model_dump(
            mode="json", exclude={"num_samples", "batch_size", "num_verifiers"}
        ),
        "verifier": verifier.settings.model_dump(mode="json"),
    }
    return {task.id: stable_hash({**shared, "task": to_json(task)}) for task in tasks}


def _keep(path: Path, solved: Sequence[SolvedTask], keys: dict[str, str]) -> None:
    """Add lines; when this returns they are on disk."""
    lines = [json.dumps({"key": keys[item.task_id], **asdict(item)}) for item in solved]
    # A line that a kill cut off has no end: it must not swallow the next one.
    with path.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(("\n".join(lines) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())


def _kept(path: Path, keys: dict[str, str], num_samples: int) -> dict[str, SolvedTask]:
    """Attempts kept under these keys, at least ``num_samples`` of each task, cut to so many."""
    found: dict[str, SolvedTask] = {}
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        task_id = values["task_id"]
        if values["key"] != keys.get(task_id) or len(values["completions"]) < num_samples:
            continue
        completions = tuple(Completion(**item) for item in values["completions"][:num_samples])
        found[task_id] = SolvedTask(task_id, completions, values["prompt_tokens"], values["votes"])
    return found
