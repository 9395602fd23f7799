"""What was left out of a corpus, in writing: for machines and for people."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttt_adapt.curriculum.decontamination import Decontamination
from ttt_adapt.curriculum.duplicates import Deduplication
from ttt_adapt.storage import atomic_write, write_json

JSON_NAME = "decontamination.json"
TEXT_NAME = "decontamination.txt"
FORMAT_VERSION = 1
MAX_SHOWN = 20


def write_decontamination(
    folder: Path, found: Decontamination, duplicates: Deduplication | None = None
) -> tuple[Path, Path]:
    """Write ``decontamination.json`` (every task left out) and ``.txt`` (examples) into ``folder``.

    Returns their paths, in this order.
    """
    report, text = folder / JSON_NAME, folder / TEXT_NAME
    write_json(report, as_json(found, duplicates))
    with atomic_write(text, "w") as stream:
        stream.write(as_text(found, duplicates))
    return report, text


def as_json(found: Decontamination, duplicates: Deduplication | None = None) -> dict[str, Any]:
    """The whole report as JSON values."""
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "settings": found.settings.model_dump(),
        "num_targets": found.num_targets,
        "num_tasks": found.num_tasks,
        "num_kept": len(found.kept),
        "num_left_out": len(found.left_out),
        "by_rule": dict(sorted(Counter(item.rule for item in found.left_out).items())),
        "by_source": {
            source: {"tasks": tasks, "left_out": left_out}
            for source, (tasks, left_out) in found.by_source.items()
        },
        "left_out": [asdict(item) for item in found.left_out],
    }
    if duplicates is not None:
        report["num_duplicates"] = len(duplicates.left_out)
        report["duplicates"] = [asdict(item) for item in duplicates.left_out]
    return report


def as_text(found: Decontamination, duplicates: Deduplication | None = None) -> str:
    """The report for people: counts, then the first examples of each rule."""
    settings = found.settings
    counts = (
        f"{found.num_tasks:,} tasks held against {found.num_targets:,} targets: "
        f"{len(found.left_out):,} left out, {len(found.kept):,} kept"
    )
    rules = (
        f"rules: {settings.min_shared_ngrams} shared n-gram(s) of {settings.ngram_size} words; of "
        f"shorter texts {settings.short_overlap:.0%} of their 3-grams; {settings.max_similarity:.0%}"
        " of the words in order"
    )
    lines = [counts, rules, "", "source: tasks, left out"]
    for source, (tasks, left_out) in found.by_source.items():
        lines.append(f"  {source or '(none)'}: {tasks:,}, {left_out:,}")
    for rule in ("equal", "ngram", "similar"):
        items = [item for item in found.left_out if item.rule == rule]
        if items:
            lines += ["", f"{rule}: {len(items):,}"]
            lines += [
                f"  {item.task_id} gives away {item.target_id} ({item.amount:g}): {item.evidence}"
                for item in items[:MAX_SHOWN]
            ]
        if len(items) > MAX_SHOWN:
            lines.append(f"  … and {len(items) - MAX_SHOWN:,} more in {JSON_NAME}")
    if duplicates is not None:
        lines += ["", f"duplicates within the corpus: {len(duplicates.left_out):,}"]
        lines += [
            f"  {item.task_id} repeats {item.kept_id} ({item.coverage:.0%} of words)"
            for item in duplicates.left_out[:MAX_SHOWN]
        ]
    return "\n".join(lines) + "\n"
