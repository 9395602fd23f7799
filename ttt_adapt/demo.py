"""The demonstration: the whole pipeline on text that every machine has, its own Python source.

Corpus and held-out modules are files of the running interpreter's standard library and installed
packages: real text with the redundancy of real corpora, since packages vendor copies of others. A
held-out module is kept out of the corpus in all its copies. The learning rate and λ are chosen on
validation modules; the table is about other, test modules.
"""

import json
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt import pipeline
from ttt_adapt.config import (
    AdaptationSettings,
    CorpusSettings,
    EvaluationSettings,
    ExperimentSettings,
    SelectionSettings,
)
from ttt_adapt.errors import CorpusError
from ttt_adapt.evaluation.report import write_report
from ttt_adapt.runtime import derived_seed, num_cpus
from ttt_adapt.storage import atomic_write, sha256_bytes
from ttt_adapt.types import Report

CORPUS_BYTES = 2_400_000
QUERY_BYTES = 1500
NUM_VALIDATION, NUM_TEST = 6, 12
STEPS = (0, 1, 5, 10, 20)
RATES = (1e-4, 3e-4)
NOISE_VARS = (0.1, 1.0, 3.0)

PACKAGES = (
    "pip/_vendor/rich", "rich", "pip/_vendor/urllib3", "urllib3", "pip/_vendor/requests",
    "requests", "pip/_vendor/packaging", "packaging", "setuptools/_vendor/packaging",
    "pip/_vendor/idna", "idna", "pip/_vendor/platformdirs", "platformdirs",
)  # fmt: skip
"""Folders of site-packages to read where present: some hold copies of others."""

LIBRARY = (
    "asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "unittest", "xml",
)  # fmt: skip
"""Packages of the standard library to read."""

TABLES = ("_unicode_data", "idnadata", "uts46data", "_emoji_codes", "entities", "_sysconfigdata")
"""Parts of names of modules that hold data rather than programs."""


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found.

    Attributes:
        arms: bits per byte at each of ``steps``, by arm.
        learning_rate: chosen on validation modules.
        noise_var: λ chosen on validation modules.
        report: the HTML page.
    """

    arms: dict[str, list[float]]
    steps: tuple[int, ...]
    learning_rate: float
    noise_var: float
    num_passages: int
    num_queries: int
    report: Path
    elapsed_s: float


@dataclass(frozen=True)
class SourceFile:
    """A Python file: ``module`` is equal for the copies of one module."""

    id: str
    module: str
    subset: str
    text: str


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    workers: int | None = None,
    report: Report = print,
    progress: Callable[[int, int | None, str | None], None] | None = None,
) -> DemoResult:
    """Index, choose settings on validation modules, evaluate test modules, write the report."""
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    processes = min(4, num_cpus()) if workers is None else workers
    for name, files in split_files(seed).items():
        _write(out / f"{name}.jsonl", files)
    report("1/4  indexing Python source")
    info = pipeline.build_index(
        out / "corpus.jsonl", out / "index", progress=pipeline.build_progress(progress)
    )
    report(f"     {info.num_passages:,} passages of {info.num_documents:,} files")
    opened = pipeline.open_index(out / "index")

    def evaluate(
        settings: ExperimentSettings, folder: Path, arms: Sequence[str]
    ) -> dict[str, list[float]]:
        summaries = pipeline.evaluate(
            settings, opened, folder, arms=arms, workers=processes, progress=progress
        )
        return {
            name: [step.bits_per_byte for step in summary.steps]
            for name, summary in summaries.items()
        }

    report("2/4  choosing the learning rate and λ on validation modules")
    rates = {
        rate: evaluate(
            _settings(out / "validation.jsonl", rate, 1.0, (0, 10), seed),
            out / "choose" / f"rate-{rate:g}",
            ["nearest"],
        )["nearest"][-1]
        for rate in RATES
    }
    rate = min(rates, key=lambda key: rates[key])
    names = [f"sift@{noise_var:g}" for noise_var in NOISE_VARS]
    found = evaluate(
        _settings(out / "validation.jsonl", rate, 1.0, (0, 10), seed), out / "choose", names
    )
    noise_var = NOISE_VARS[min(range(len(names)), key=lambda i: found[names[i]][-1])]
    report(f"     learning rate {rate:g}, λ {noise_var:g}")
    report("3/4  adapting to each test module")
    settings = _settings(out / "test.jsonl", rate, noise_var, STEPS, seed)
    arms = evaluate(settings, out / "runs", pipeline.DEFAULT_ARMS)
    report("4/4  drawing the report")
    folders = [out / "runs" / name for name in arms]
    page = write_report(folders, out / "report", title="ttt-adapt demo: Python source")[0]
    return DemoResult(
        arms=arms,
        steps=STEPS,
        learning_rate=rate,
        noise_var=noise_var,
        num_passages=info.num_passages,
        num_queries=NUM_TEST,
        report=page,
        elapsed_s=time.monotonic() - started,
    )


def plan_demo(seed: int = 0) -> dict[str, Any]:
    """What the demonstration would read and do, without doing it."""
    parts = split_files(seed)
    num_choosing = NUM_VALIDATION * 10 * (len(RATES) + len(NOISE_VARS))
    return {
        **{f"num_{name}_files": len(files) for name, files in parts.items()},
        "num_corpus_bytes": sum(len(file.text.encode()) for file in parts["corpus"]),
        "num_training_steps": num_choosing + NUM_TEST * STEPS[-1] * 3,
    }


def split_files(seed: int) -> dict[str, list[SourceFile]]:
    """Files of the corpus, and one file of each held-out validation and test module."""
    files = list(python_files())
    by_module: dict[str, list[SourceFile]] = {}
    for file in files:
        by_module.setdefault(file.module, []).append(file)
    names = sorted(by_module, key=lambda name: derived_seed(seed, name))
    fitting = [name for name in names if len(by_module[name][0].text) >= 2 * QUERY_BYTES]
    if len(fitting) < NUM_VALIDATION + NUM_TEST:
        raise CorpusError(
            f"expected at least {NUM_VALIDATION + NUM_TEST} Python modules of "
            f"{2 * QUERY_BYTES} characters beside this interpreter, found {len(fitting)}"
        )
    validation, test = fitting[:NUM_VALIDATION], fitting[NUM_VALIDATION:][:NUM_TEST]
    held_out = {*validation, *test}
    # By module in the same seeded order: copies of a module are in together, or out together.
    corpus, used = [], 0
    for name in names:
        for file in by_module[name] if name not in held_out else ():
            if used + len(file.text) <= CORPUS_BYTES:
                corpus.append(file)
                used += len(file.text)
    return {
        "corpus": sorted(corpus, key=lambda file: file.id),
        "validation": [by_module[name][0] for name in validation],
        "test": [by_module[name][0] for name in test],
    }


def python_files() -> Iterator[SourceFile]:
    """Readable Python files, sorted, tests and generated tables left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    roots = [(library / name, library, "standard library") for name in LIBRARY]
    roots += [(packages / name, packages, "packages") for name in PACKAGES]
    paths: list[tuple[Path, Path, str]] = []
    for folder, root, subset in roots:
        paths += [(path, root, subset) for path in folder.rglob("*.py")]
    seen: set[str] = set()
    for path, root, subset in sorted(set(paths)):
        relative = path.relative_to(root).as_posix()
        if "/test" in relative or any(name in relative for name in TABLES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        key = f"{relative}:{sha256_bytes(text.encode())}"
        if len(text) < 400 or len(text) > 60_000 or key in seen:
            continue
        seen.add(key)
        module = relative.removeprefix("pip/_vendor/").removeprefix("setuptools/_vendor/")
        yield SourceFile(f"{subset}/{relative}", module, subset, text)


def _settings(
    data: Path, rate: float, noise_var: float, steps: tuple[int, ...], seed: int
) -> ExperimentSettings:
    return ExperimentSettings(
        data=CorpusSettings(path=str(data)),
        selection=SelectionSettings(noise_var=noise_var, num_select=steps[-1]),
        adaptation=AdaptationSettings(learning_rate=rate),
        evaluation=EvaluationSettings(steps=steps, max_bytes=QUERY_BYTES),
        seed=seed,
    )


def _write(path: Path, files: Sequence[SourceFile]) -> None:
    with atomic_write(path, "w") as stream:
        for file in files:
            row = {"id": file.id, "text": file.text, "meta": {"pile_set_name": file.subset}}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
