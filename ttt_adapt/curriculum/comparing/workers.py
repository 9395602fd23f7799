"""Runs in this process, or in spawned ones with one thread each; a stop that loses nothing.

Processes are spawned, never forked: torch hangs after a fork. They are out of reach of the
terminal's Ctrl-C: this process takes it and asks them to stop after the step under way.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from ttt_adapt.curriculum.comparing.arms import Job
from ttt_adapt.curriculum.comparing.results import ArmRun
from ttt_adapt.curriculum.comparing.running import run_job
from ttt_adapt.curriculum.comparing.settings import ComparisonSettings
from ttt_adapt.curriculum.settings import SandboxSettings, VerifierSettings
from ttt_adapt.curriculum.verifying import Verifier

JobProgress = Callable[[Job, str, int, int], None]
"""Gets a run, what is under way in it, how much of that is done, and in all."""
_POLL_S = 0.2


def run_jobs(
    out: Path,
    jobs: Sequence[Job],
    settings: ComparisonSettings,
    *,
    workers: int,
    verifying: VerifierSettings | None = None,
    sandbox: SandboxSettings | None = None,
    progress: JobProgress | None = None,
) -> Iterator[ArmRun]:
    """Yield runs as they finish.

    Args:
        workers: 0: one run after another in this process, with the threads it has.
    """
    verifying, sandbox = verifying or VerifierSettings(), sandbox or SandboxSettings()
    if workers < 1:
        with Verifier(verifying, sandbox=sandbox) as verifier:
            for job in jobs:
                yield run_job(
                    out, job, settings, verifier=verifier, progress=_progress_of(job, progress)
                )
        return
    context = multiprocessing.get_context("spawn")
    stop, reports = context.Event(), context.Queue()
    pool = ProcessPoolExecutor(
        min(workers, len(jobs)),
        mp_context=context,
        initializer=_start,
        initargs=(
            stop,
            reports,
            settings.model_dump_json(),
            verifying.model_dump_json(),
            sandbox.model_dump_json(),
        ),
    )
    try:
        waiting: set[Future[ArmRun]] = {pool.submit(_work, out, job) for job in jobs}
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_S, return_when="FIRST_COMPLETED")
            _pass_on(reports, progress)
            for future in done:
                yield future.result()
    except BaseException:
        # Runs under way end after their step, and save.
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        reports.close()


def _pass_on(reports: Any, progress: JobProgress | None) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            report = reports.get_nowait()
            if progress is not None:
                progress(*report)


def _progress_of(job: Job, progress: JobProgress | None) -> Callable[[str, int, int], None]:
    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(job, stage, done, total)

    return report


class _Worker:
    """What a process keeps between its runs."""

    def __init__(self, stop: Any, reports: Any, settings: ComparisonSettings, verifier: Verifier):
        self.stop, self.reports = stop, reports
        self.settings, self.verifier = settings, verifier
        self.asked = False


_worker: _Worker | None = None


def _start(stop: Any, reports: Any, settings: str, verifying: str, sandbox: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Reports that nobody takes any more must not keep this process from ending.
    reports.cancel_join_thread()
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    logging: Any = transformers_logging
    logging.disable_progress_bar()
    global _worker
    _worker = _Worker(
        stop,
        reports,
        ComparisonSettings.model_validate_json(settings),
        Verifier(
            VerifierSettings.model_validate_json(verifying),
            sandbox=SandboxSettings.model_validate_json(sandbox),
        ),
    )


def _end_with_parent() -> None:
    """A killed parent leaves nobody to take results: end, as if killed too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _work(out: Path, job: Job) -> ArmRun:
    worker = _worker
    assert worker is not None, "the pool's initializer ran"

    def report(stage: str, done: int, total: int) -> None:
        worker.reports.put((job, stage, done, total))
        if worker.stop.is_set() and not worker.asked:
            worker.asked = True
            # As Ctrl-C would: training ends after this step and saves.
            signal.raise_signal(signal.SIGINT)

    return run_job(out, job, worker.settings, verifier=worker.verifier, progress=report)
