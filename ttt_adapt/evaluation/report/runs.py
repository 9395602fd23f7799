"""Run folders as the report reads them: numbers in memory, passages left on disk."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.report.markup import clean, shorten
from ttt_adapt.evaluation.serialization import loads
from ttt_adapt.types import Prediction, Source

RESULTS, RUN, SETTINGS = "results.jsonl", "run.json", "settings.toml"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """One query of one run, without the text of its passages.

    Attributes:
        nats: −Σ ln p at each of ``steps``; NaN where there is none.
        num_bytes: UTF-8 bytes of the scored text; 0 for a query that failed.
        sigma: the square root of the posterior variance after the last pick; NaN without picks.
        stopped: why learning ended early; empty when it did not.
        offset: where the query's line begins in ``results.jsonl``, in bytes.
    """

    query_id: str
    subset: str
    steps: tuple[int, ...]
    nats: tuple[float, ...]
    num_bytes: int
    num_steps: int
    sigma: float
    stopped: str
    seconds: Mapping[str, float]
    failure: str
    offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder.

    Attributes:
        label: what the arm is called; unique within a report.
        info: ``run.json``; empty when there is none.
        settings_text: ``settings.toml`` as written; empty when there is none.
        settings: the same, parsed; empty when it does not parse.
        results: by query id, in the order of the file.
    """

    folder: Path
    label: str
    info: Mapping[str, Any]
    settings_text: str
    settings: Mapping[str, Any] = field(repr=False)
    results: Mapping[str, QueryResult] = field(repr=False)

    @property
    def model(self) -> str:
        """The model's name, for people; empty when the run does not say."""
        entry = self.info.get("model") or self.settings.get("model") or ""
        return _name_of(entry)

    @property
    def model_key(self) -> str:
        """What tells models apart: the fingerprint, or else the name."""
        return self.model_fingerprint or self.model

    @property
    def model_fingerprint(self) -> str:
        entry = self.info.get("model")
        nested = entry.get("fingerprint") if isinstance(entry, Mapping) else None
        return str(nested or self.info.get("model_fingerprint") or "")

    @property
    def protocol(self) -> str:
        evaluation = self.settings.get("evaluation")
        nested = evaluation.get("protocol") if isinstance(evaluation, Mapping) else None
        return str(self.info.get("protocol") or nested or "")

    def setting(self, table: str, key: str) -> str:
        """A value of ``settings.toml`` for people; empty when it is not there."""
        entry = self.settings.get(table)
        value = entry.get(key) if isinstance(entry, Mapping) else None
        return "" if value is None else clean(str(value))

    def sources(self, query_id: str) -> tuple[Source, ...]:
        """The passages a query learned from, read from disk."""
        with (self.folder / RESULTS).open("rb") as stream:
            stream.seek(self.results[query_id].offset)
            return _load(stream.readline(), str(self.folder / RESULTS)).sources


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders, in the order given; equal labels are told apart by their folders' names.

    Raises:
        UserError: no folder, the same folder twice, or one that holds no complete results.
    """
    if not folders:
        raise UserError("a report needs at least one run folder, none was given")
    resolved = [folder.resolve() for folder in folders]
    for position, folder in enumerate(resolved):
        if folder in resolved[:position]:
            raise UserError(f"{folders[position]}: given twice; name each run folder once")
    runs = [_read_run(folder) for folder in folders]
    labels = [run.label for run in runs]
    taken: set[str] = set()
    unique = []
    for run in runs:
        label = run.label
        if labels.count(label) > 1:
            label = f"{label} ({run.folder.resolve().name})"
        number = 2
        while label in taken:
            label = f"{run.label} ({number})"
            number += 1
        taken.add(label)
        unique.append(label)
    return [
        Run(run.folder, label, run.info, run.settings_text, run.settings, run.results)
        for run, label in zip(runs, unique, strict=True)
    ]


def _read_run(folder: Path) -> Run:
    path = folder / RESULTS
    if not path.is_file():
        raise UserError(
            f"{folder}: no {RESULTS} in it; expected the folder of a finished evaluation "
            "(run the evaluation again: it does only what is missing)"
        )
    info = _read_info(folder / RUN)
    settings_text, settings = _read_settings(folder / SETTINGS)
    label = next((info[key] for key in ("arm", "name", "label") if info.get(key)), None)
    results: dict[str, QueryResult] = {}
    with path.open("rb") as stream:
        offset = 0
        for number, line in enumerate(stream, start=1):
            if line.strip():
                result = _read_result(line, offset, f"{path}:{number}")
                if result.query_id in results:
                    raise UserError(
                        f"{path}:{number}: query {result.query_id!r} is there twice; expected one "
                        "line a query (export the run again)"
                    )
                results[result.query_id] = result
            offset += len(line)
    if not results:
        raise UserError(f"{path}: holds no query; run the evaluation first")
    name = shorten(str(label or folder.resolve().name), 60) or "run"
    return Run(folder, name, info, settings_text, settings, results)


def _read_info(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); run the evaluation again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_settings(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "", {}
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text, {}


def _read_result(line: bytes, offset: int, where: str) -> QueryResult:
    prediction = _load(line, where)
    scores, learned = prediction.scores, prediction.learned
    if scores and len(scores) != len(prediction.steps):
        raise UserError(
            f"{where}: {len(prediction.steps)} steps but {len(scores)} scores; expected one score "
            "a step (export the run again)"
        )
    # Passages come in training order, where the variance need not fall; the state after the last
    # pick is the smallest.
    variances = [s.posterior_var for s in prediction.sources if s.posterior_var >= 0.0]
    seconds = {clean(stage): value for stage, value in prediction.seconds.items()}
    return QueryResult(
        query_id=prediction.query_id,
        subset=clean(prediction.subset),
        steps=prediction.steps,
        nats=tuple(score.nats for score in scores),
        num_bytes=scores[0].num_bytes if scores else 0,
        num_steps=prediction.num_steps,
        sigma=math.sqrt(min(variances)) if variances else math.nan,
        stopped=learned.stopped if learned else "",
        seconds={stage: value for stage, value in seconds.items() if math.isfinite(value)},
        failure=prediction.failure,
        offset=offset,
    )


def _load(line: bytes, where: str) -> Prediction:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8, so not a results file") from None
    return loads(Prediction, text, where=where)


def _name_of(entry: Any) -> str:
    if isinstance(entry, Mapping):
        entry = entry.get("name") or ""
    text = clean(str(entry))
    # A bundled or local model is a path; its last part is what people call it.
    return Path(text).name if text.startswith(("/", "~", ".")) else text
