"""Run plans in this process, or in spawned ones with one thread each: same results either way.

Processes are spawned, never forked: FAISS and torch hang after a fork.
"""

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from ttt_adapt.config import ExperimentSettings
from ttt_adapt.models import LanguageModel, load_language_model
from ttt_adapt.pipeline.running import Plan, Runner
from ttt_adapt.types import Prediction

_runner: Runner | None = None


def run_plans(
    plans: Iterable[tuple[str, Plan]],
    lm: LanguageModel,
    settings: ExperimentSettings,
    workers: int,
) -> Iterator[tuple[str, Prediction]]:
    """Yield each plan's label and prediction, as they finish (in order with ``workers=0``).

    At most four plans a worker are in flight, so that plans are made no faster than used.
    """
    if workers < 1:
        with Runner(lm, settings.scoring) as runner:
            for label, plan in plans:
                yield label, runner.run(plan)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(settings.model_dump_json(),),
    )
    try:
        waiting: dict[Future[Prediction], str] = {}
        remaining = iter(plans)
        for label, plan in itertools.islice(remaining, 4 * workers):
            waiting[pool.submit(_work, plan)] = label
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), future.result()
            for label, plan in itertools.islice(remaining, len(done)):
                waiting[pool.submit(_work, plan)] = label
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(settings_json: str) -> None:
    import signal

    import torch

    # Ctrl-C reaches the whole group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    settings = ExperimentSettings.model_validate_json(settings_json)
    global _runner
    _runner = Runner(load_language_model(settings.model), settings.scoring)


def _work(plan: Plan) -> Prediction:
    assert _runner is not None, "the pool's initializer ran"
    return _runner.run(plan)
