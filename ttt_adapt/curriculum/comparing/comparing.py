"""All arms under all seeds at the same number of rollouts, and what they come to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum.comparing.arms import Job, arm_selection, parse_arm
from ttt_adapt.curriculum.comparing.comparison import Comparison, summarize
from ttt_adapt.curriculum.comparing.files import write_comparison
from ttt_adapt.curriculum.comparing.inputs import (
    ComparisonTasks,
    read_settings,
    require_unseen,
    settle,
)
from ttt_adapt.curriculum.comparing.running import finished_run
from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
from ttt_adapt.curriculum.comparing.workers import run_jobs
from ttt_adapt.curriculum.selecting import (
    Curriculum,
    TaskEmbedder,
    load_task_embedder,
    read_curriculum,
    select_curriculum,
    write_curriculum,
)
from ttt_adapt.curriculum.settings import SandboxSettings, VerifierSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.verifying import Verifier
from ttt_adapt.models.loading import load_language_model

EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """How far a comparison is.

    Attributes:
        stage: what is under way: ``embed corpus``, ``select``, ``training``, ``sampling``.
        arm: and for which arm and seed.
        done: of that stage, and in all.
        runs_done: runs finished, of ``num_runs``.
    """

    stage: str
    arm: str
    done: int
    total: int
    runs_done: int
    num_runs: int


ReportComparison = Callable[[ComparisonProgress], None]


def compare_curricula(
    corpus: Sequence[Task],
    targets: Sequence[Task],
    settings: ComparisonSettings,
    out: Path,
    *,
    evaluation: Sequence[Task] | None = None,
    others: Sequence[Task] = (),
    workers: int = 0,
    verifying: VerifierSettings | None = None,
    sandbox: SandboxSettings | None = None,
    progress: ReportComparison | None = None,
) -> Comparison:
    """Choose, practise and evaluate for every arm and seed; the same call continues.

    Every arm practises as many completions as another, from the same model, and is evaluated on
    the same tasks with the same random numbers. What is finished is not done again; arms and seeds
    may be added later.

    Args:
        corpus: what curricula are chosen from; must not hold what is evaluated.
        targets: what they are chosen for. Their answers are not looked at.
        settings: arms, seeds, selection, training, sampling.
        out: the comparison's folder: ``comparison.json``, ``comparison.md``, ``curricula/``,
            ``runs/``.
        evaluation: tasks that arms are compared on; ``None``: the targets.
        others: tasks of other kinds, to see what was forgotten.
        workers: processes of one thread each that runs are shared among; 0: this one alone.
        verifying, sandbox: how completions are verified.
        progress: see :class:`ComparisonProgress`.

    Raises:
        TaskError: the corpus gives away what is evaluated, or tasks cannot be verified here.
        FingerprintMismatchError: ``out`` holds another comparison.
        UserError: as the parts raise.
    """
    tasks = ComparisonTasks(
        tuple(targets), tuple(targets if evaluation is None else evaluation), tuple(others)
    )
    require_unseen(corpus, tasks)
    with Verifier(verifying, sandbox=sandbox) as verifier:
        verifier.require([*corpus, *tasks.evaluation, *tasks.others])
    jobs = comparison_jobs(settings)
    out.mkdir(parents=True, exist_ok=True)
    loaded = load_language_model(
        ModelSettings(
            name=settings.model, dtype=settings.training.dtype, device=settings.training.device
        )
    )
    settle(out, corpus, tasks, settings, loaded.fingerprint)
    num_done = sum(finished_run(out, job) is not None for job in jobs)
    _choose(out, jobs, corpus, targets, settings, progress, num_done)
    del loaded
    running = _Counting(progress, num_done, len(jobs))
    left = [job for job in jobs if finished_run(out, job) is None]
    if left:
        for _ in run_jobs(
            out,
            left,
            settings,
            workers=workers,
            verifying=verifying,
            sandbox=sandbox,
            progress=running.report,
        ):
            running.finish()
    found = finished_comparison(out, corpus_size=len(corpus), targets=targets, settings=settings)
    write_comparison(out, found)
    return found


def comparison_jobs(settings: ComparisonSettings) -> list[Job]:
    """Every arm under every seed, seeds first: an interrupted comparison has whole seeds."""
    arms = [parse_arm(name) for name in settings.arms]
    return [Job(arm, seed) for seed in settings.seeds for arm in arms]


def finished_comparison(
    out: Path,
    *,
    corpus_size: int,
    targets: Sequence[Task],
    settings: ComparisonSettings | None = None,
) -> Comparison:
    """What the finished runs in ``out`` come to.

    Raises:
        UserError: not all of them are finished.
    """
    settings = settings or read_settings(out)
    jobs = comparison_jobs(settings)
    runs = [finished_run(out, job) for job in jobs]
    curricula: dict[str, Curriculum] = {}
    for job in jobs:
        if job.curriculum is not None and job.arm.name not in curricula:
            curricula[job.arm.name] = read_curriculum(out / job.curriculum)
    return summarize(
        [run for run in runs if run is not None],
        targets,
        curricula,
        settings,
        num_corpus=corpus_size,
    )


def _choose(
    out: Path,
    jobs: Sequence[Job],
    corpus: Sequence[Task],
    targets: Sequence[Task],
    settings: ComparisonSettings,
    progress: ReportComparison | None,
    num_done: int,
) -> None:
    """Write every curriculum that is not there yet; embeddings are made once for all."""
    embedder: TaskEmbedder | None = None
    for job in jobs:
        if job.curriculum is None or (out / job.curriculum / "selection.json").is_file():
            continue
        selection = arm_selection(job.arm, settings.selection, job.seed)
        if embedder is None:
            embedder = _embedder(settings)

        def report(stage: str, done: int, total: int, arm: str = job.arm.name) -> None:
            if progress is not None:
                progress(ComparisonProgress(stage, arm, done, total, num_done, len(jobs)))

        chosen = select_curriculum(
            corpus,
            targets,
            selection,
            embedder=embedder,
            cache=out / EMBEDDINGS,
            progress=report,
        )
        write_curriculum(out / job.curriculum, chosen)


def _embedder(settings: ComparisonSettings) -> TaskEmbedder:
    own = settings.selection
    if own.embedder.startswith("policy") and own.model is None:
        own = own.model_copy(update={"model": settings.model})
    return load_task_embedder(own)


class _Counting:
    """Progress of runs with the number of those finished."""

    def __init__(self, progress: ReportComparison | None, num_done: int, num_runs: int) -> None:
        self.progress, self.num_done, self.num_runs = progress, num_done, num_runs

    def report(self, job: Job, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            label = f"{job.arm.name}, seed {job.seed}"
            self.progress(
                ComparisonProgress(stage, label, done, total, self.num_done, self.num_runs)
            )

    def finish(self) -> None:
        self.num_done += 1
        if self.progress is not None:
            self.progress(ComparisonProgress("finished", "", 1, 1, self.num_done, self.num_runs))
