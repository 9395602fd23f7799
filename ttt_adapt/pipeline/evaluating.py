"""A set of texts, several arms: retrieved once, adapted to query by query, kept in a ledger."""

import datetime
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttt_adapt.adaptation import listing_order
from ttt_adapt.config import ExperimentSettings, to_toml
from ttt_adapt.corpus import ReadProblems, read_documents
from ttt_adapt.errors import SelectionError, SettingsError
from ttt_adapt.evaluation import Ledger, Summary, choose_documents, make_query, summarize
from ttt_adapt.evaluation import Query as Parts
from ttt_adapt.indexes import Index
from ttt_adapt.models import LanguageModel, load_language_model
from ttt_adapt.pipeline.arms import Arm, make_arm
from ttt_adapt.pipeline.building import open_index
from ttt_adapt.pipeline.running import Plan, make_plan
from ttt_adapt.pipeline.selecting import Query, Retrieved, pick, retrieve
from ttt_adapt.pipeline.workers import run_plans
from ttt_adapt.runtime import versions
from ttt_adapt.storage import stable_hash, write_json
from ttt_adapt.types import Embedder, Prediction

BLOCK_QUERIES = 32
"""Queries embedded and retrieved together; what an interruption makes to be done again."""

DEFAULT_ARMS = ("base", "random", "nearest", "sift", "in-context")

Progress = Callable[[int, int, str], None]
"""Receives queries done, queries in all, and the arm."""


@dataclass(frozen=True, slots=True)
class Item:
    """A document under the protocol, named by id and content: another text is another row."""

    id: str
    parts: Parts


def evaluate(
    settings: ExperimentSettings,
    index: Path | tuple[Index, Embedder],
    out: Path,
    *,
    arms: Sequence[str] = DEFAULT_ARMS,
    lm: LanguageModel | None = None,
    workers: int = 0,
    retry_failures: bool = False,
    progress: Progress | None = None,
) -> dict[str, Summary]:
    """Bits per byte over a set of texts, for each arm; the same command again does what is missing.

    Args:
        settings: ``data`` says which texts; the rest how.
        index: a folder, or what :func:`ttt_adapt.pipeline.open_index` gave for it.
        out: one run folder an arm is made below it, named after the arm.
        arms: see :mod:`ttt_adapt.pipeline.arms`.
        lm: a loaded model, instead of the one ``settings`` names (only with ``workers=0``).
        workers: processes of one thread each that adapt and score; 0: this process, all threads.
        retry_failures: do queries again that failed before.
        progress: receives queries done and in all.

    Returns:
        A summary an arm, over all its queries, those of earlier runs of the command included.

    Raises:
        SettingsError: no data is named, an arm is unknown, or settings contradict each other.
        UserError: data, model or index cannot be used.
    """
    chosen = [make_arm(name, settings) for name in arms]
    if settings.adaptation.protocol == "tttlm" and workers > 1:
        raise SettingsError(
            "protocol=tttlm carries the optimizer from query to query, so it needs queries in "
            f"order: expected workers 0 or 1, found {workers}"
        )
    items = read_items(settings)
    opened = open_index(index) if isinstance(index, Path) else index
    model = lm or load_language_model(settings.model)
    ledgers = {
        arm.name: _open_ledger(out / arm.name, arm, settings, model, opened[0]) for arm in chosen
    }
    try:
        done = {
            name: ledger.done(retry_failures=retry_failures) for name, ledger in ledgers.items()
        }
        plans = _plans(items, chosen, done, settings, *opened)
        total = sum(len(items) - len(done[name] & {i.id for i in items}) for name in ledgers)
        results = run_plans(plans, model, settings, workers)
        for finished, (name, prediction) in enumerate(results, start=1):
            ledgers[name].add(prediction)
            if progress:
                progress(finished, total, name)
        summaries = {}
        for name, ledger in ledgers.items():
            order = [item.id for item in items]
            summaries[name] = _finish(ledger, out / name, order, settings)
        return summaries
    finally:
        for ledger in ledgers.values():
            ledger.close()


def read_items(settings: ExperimentSettings) -> list[Item]:
    """The texts of an evaluation, cut and split as the protocol says."""
    if settings.data is None:
        raise SettingsError("expected the texts to evaluate on (data), found none; name a file")
    evaluation = settings.evaluation
    documents = list(read_documents(settings.data, problems=ReadProblems()))
    chosen = choose_documents(documents, per_subset=evaluation.per_subset, seed=evaluation.seed)
    items = []
    for document in chosen:
        parts = make_query(document, evaluation)
        digest = hashlib.sha256(parts.whole.encode()).hexdigest()[:8]
        items.append(Item(f"{document.id}@{digest}", parts))
    return items


def plan_evaluation(settings: ExperimentSettings, arms: Sequence[str]) -> dict[str, Any]:
    """What an evaluation would do, without doing it: counts, and training steps in all."""
    chosen = [make_arm(name, settings) for name in arms]
    items = read_items(settings)
    subsets = sorted({item.parts.subset for item in items})
    learning = [arm for arm in chosen if arm.adaptation.method in ("full", "lora")]
    steps = min(settings.evaluation.steps[-1], settings.selection.num_select)
    return {
        "num_texts": len(items),
        "num_bytes": sum(len(item.parts.text.encode()) for item in items),
        "subsets": subsets,
        "arms": [arm.name for arm in chosen],
        "num_training_steps": len(items) * len(learning) * steps * settings.adaptation.epochs,
    }


def _plans(
    items: Sequence[Item],
    arms: Sequence[Arm],
    done: dict[str, set[str]],
    settings: ExperimentSettings,
    index: Index,
    embedder: Embedder,
) -> Iterator[tuple[str, Plan]]:
    todo = [item for item in items if any(item.id not in done[arm.name] for arm in arms)]
    for start in range(0, len(todo), BLOCK_QUERIES):
        block = todo[start : start + BLOCK_QUERIES]
        queries = [
            Query(item.parts.query, item.id, item.parts.id, item.parts.whole) for item in block
        ]
        found = retrieve(queries, index, embedder, settings.retrieval)
        # Arm by arm within a block, so that a worker seldom changes its adapter.
        for arm, (item, candidates) in itertools.product(arms, zip(block, found, strict=True)):
            if item.id not in done[arm.name]:
                yield arm.name, _plan(item, candidates, arm, settings, index)


def _plan(
    item: Item, found: Retrieved, arm: Arm, settings: ExperimentSettings, index: Index
) -> Plan:
    try:
        picked = pick(found, index, arm.selection, settings.retrieval, settings.seed)
    except SelectionError as error:
        return Plan(
            query_id=item.id,
            subset=item.parts.subset,
            text=item.parts.text,
            context=item.parts.context,
            texts=(),
            sources=(),
            steps=settings.evaluation.steps,
            adaptation=arm.adaptation,
            seed=0,
            seconds=dict(found.seconds),
            failure=str(error),
        )
    return make_plan(
        picked,
        text=item.parts.text,
        context=item.parts.context,
        subset=item.parts.subset,
        steps=settings.evaluation.steps,
        adaptation=arm.adaptation,
        seed=settings.seed,
    )


def _open_ledger(
    folder: Path, arm: Arm, settings: ExperimentSettings, lm: LanguageModel, index: Index
) -> Ledger:
    resolved = settings.model_copy(
        update={"selection": arm.selection, "adaptation": arm.adaptation}
    )
    depends = {
        "model": lm.fingerprint,
        "index": index.info.content_hash,
        "data": resolved.data.model_dump(mode="json") if resolved.data else None,
        "retrieval": resolved.retrieval.model_dump(mode="json"),
        "selection": arm.selection.model_dump(mode="json"),
        "adaptation": arm.adaptation.model_dump(mode="json"),
        "order": listing_order(arm.adaptation.method, arm.adaptation.order),
        "scoring": resolved.scoring.model_dump(mode="json"),
        "evaluation": resolved.evaluation.model_dump(
            mode="json", include={"protocol", "steps", "max_bytes"}
        ),
        "seed": settings.seed,
    }
    key = stable_hash(depends)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(to_toml(resolved) + "\n", encoding="utf-8")
    run = {
        "name": arm.name,
        "run_key": key,
        "model": {"name": lm.name, "fingerprint": lm.fingerprint},
        "index": {
            "content_hash": index.info.content_hash,
            "num_passages": index.info.num_passages,
            "factory": index.info.factory,
            "embedder": index.info.embedder_description,
        },
        "data": resolved.data.path if resolved.data else "",
        "protocol": resolved.evaluation.protocol,
        "seed": settings.seed,
        "versions": versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_json(folder / "run.json", run)
    return Ledger.open(folder, key)


def _finish(
    ledger: Ledger, folder: Path, order: Sequence[str], settings: ExperimentSettings
) -> Summary:
    by_id: dict[str, Prediction] = {p.query_id: p for p in ledger.predictions()}
    predictions = [by_id[query_id] for query_id in order if query_id in by_id]
    ledger.export(order)
    summary = summarize(
        predictions,
        num_resamples=settings.evaluation.num_resamples,
        seed=settings.evaluation.seed,
    )
    summary.write(folder / "summary.json")
    return summary
