"""What was chosen, in numbers: for machines (JSON values) and for people (Markdown)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT_VERSION = 1
MAX_TARGETS = 20
MAX_TASKS = 10


@dataclass(frozen=True, slots=True)
class TargetCoverage:
    """What the curriculum holds for one target.

    Attributes:
        target_id: the target's.
        similarity: cosine with the most similar task chosen.
        best_similarity: cosine with the most similar task there was to choose.
        nearest_id: the most similar task chosen.
        num_tasks: tasks chosen that are closer to this target than to any other.
        variance_left: share of the target's prior variance that the curriculum leaves.
    """

    target_id: str
    similarity: float
    best_similarity: float
    nearest_id: str
    num_tasks: int
    variance_left: float


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """How a curriculum was chosen and what it is like. Similarities are cosines.

    Attributes:
        method: see the settings.
        embedder: one line for people.
        embedder_fingerprint: SHA-256 of what vectors depend on.
        dimension: D.
        num_tasks: of the corpus.
        num_evaluation_only: of these, left out because ``meta.evaluation_only`` marks them.
        num_dissimilar: tasks that SIFT did not consider: too dissimilar to every target.
        num_targets: M.
        num_selected: N.
        noise_var: λ that was used.
        suggested_noise_var: λ that these embeddings and this N ask for.
        noise_reason: how that was derived.
        mean_similarity: of the chosen tasks with the targets, over all pairs.
        corpus_similarity: the same for the whole corpus: what chance would give.
        diversity: 1 − mean cosine of two chosen tasks.
        corpus_diversity: the same for the corpus.
        variance_left: share of the targets' prior variance left after all picks.
        variance_curve: (number of picks, share left) along the way.
        effective_rank: of the chosen tasks' vectors.
        target_rank: of the targets' vectors.
        corpus_rank: of the corpus' vectors (a sample of at most 8,192).
        by_source: source: tasks in the corpus, chosen.
        targets: one entry a target, in their order.
        warnings: what a user should know before training.
        seconds: by stage: ``embed``, ``select``, ``report``.
    """

    method: str
    embedder: str
    embedder_fingerprint: str
    dimension: int
    num_tasks: int
    num_evaluation_only: int
    num_dissimilar: int
    num_targets: int
    num_selected: int
    noise_var: float
    suggested_noise_var: float
    noise_reason: str
    mean_similarity: float
    corpus_similarity: float
    diversity: float
    corpus_diversity: float
    variance_left: float
    variance_curve: tuple[tuple[int, float], ...]
    effective_rank: float
    target_rank: float
    corpus_rank: float
    by_source: dict[str, tuple[int, int]]
    targets: tuple[TargetCoverage, ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float]


def report_to_json(report: SelectionReport) -> dict[str, Any]:
    """The report as JSON values; :func:`report_from_json` reads them."""
    values = {"format_version": FORMAT_VERSION, **asdict(report)}
    values["targets"] = [asdict(target) for target in report.targets]
    for key in ("variance_curve", "warnings"):
        values[key] = [list(item) if isinstance(item, tuple) else item for item in values[key]]
    values["by_source"] = {key: list(counts) for key, counts in report.by_source.items()}
    return values


def report_from_json(values: dict[str, Any]) -> SelectionReport:
    """What :func:`report_to_json` wrote.

    Raises:
        KeyError, TypeError, ValueError: it was not.
    """
    rest = dict(values)
    if rest.pop("format_version") != FORMAT_VERSION:
        raise ValueError("another format")
    rest["variance_curve"] = tuple((int(n), float(left)) for n, left in rest["variance_curve"])
    rest["by_source"] = {key: (int(a), int(b)) for key, (a, b) in rest["by_source"].items()}
    rest["targets"] = tuple(TargetCoverage(**target) for target in rest["targets"])
    rest["warnings"] = tuple(rest["warnings"])
    return SelectionReport(**rest)


def report_as_markdown(report: SelectionReport, examples: Sequence[tuple[str, str]] = ()) -> str:
    """The report for people.

    Args:
        examples: id and text of tasks chosen, first ones first.
    """
    left_out = (
        f" ({report.num_evaluation_only:,} more are for evaluation only and were left out)"
        if report.num_evaluation_only
        else ""
    )
    dissimilar = (
        f"; {report.num_dissimilar:,} were not considered, being similar to no target"
        if report.num_dissimilar
        else ""
    )
    lines = [
        f"# {report.num_selected:,} tasks chosen for {report.num_targets:,} targets",
        "",
        (
            f"By {report.method}, from {report.num_tasks - report.num_evaluation_only:,} tasks"
            f"{left_out}{dissimilar}. Vectors: {report.embedder}, {report.dimension} wide."
        ),
        "",
    ]
    lines += [f"**{warning}**\n" for warning in report.warnings]
    lines += [
        "| | chosen | whole corpus |",
        "|---|---|---|",
        (
            f"| mean similarity to the targets | {report.mean_similarity:.3f} "
            f"| {report.corpus_similarity:.3f} |"
        ),
        f"| diversity (1 − mean cosine) | {report.diversity:.3f} | {report.corpus_diversity:.3f} |",
        f"| effective rank | {report.effective_rank:.1f} | {report.corpus_rank:.1f} |",
        "",
        (
            f"Effective rank of the targets: {report.target_rank:.1f}. λ = {report.noise_var:g} "
            f"(suggested: {report.suggested_noise_var:g}; {report.noise_reason})."
        ),
        "",
        "Share of the targets' variance left after so many tasks:",
        "",
        "| tasks | " + " | ".join(f"{count:,}" for count, _ in report.variance_curve) + " |",
        "|---|" + "---|" * len(report.variance_curve),
        "| left | " + " | ".join(f"{left:.3f}" for _, left in report.variance_curve) + " |",
        "",
        *_sources(report),
        *_targets(report),
    ]
    if examples:
        lines += ["## Chosen first", ""]
        lines += [f"- `{_cell(name)}` {_cell(text, 200)}" for name, text in examples[:MAX_TASKS]]
    return "\n".join(lines).rstrip() + "\n"


def _sources(report: SelectionReport) -> list[str]:
    rows = sorted(report.by_source.items(), key=lambda item: (-item[1][1], item[0]))
    return [
        "## By source",
        "",
        "| source | corpus | chosen | share of chosen |",
        "|---|---|---|---|",
        *(
            f"| {_cell(source) or '(none)'} | {there:,} | {chosen:,} "
            f"| {chosen / max(report.num_selected, 1):.1%} |"
            for source, (there, chosen) in rows
        ),
        "",
    ]


def _targets(report: SelectionReport) -> list[str]:
    worst = sorted(report.targets, key=lambda target: (-target.variance_left, target.target_id))
    shown = worst[:MAX_TARGETS]
    title = (
        "## Targets" if len(shown) == len(worst) else f"## The {len(shown)} targets served least"
    )
    return [
        title,
        "",
        "| target | variance left | similarity | best there was | tasks nearest to it | nearest |",
        "|---|---|---|---|---|---|",
        *(
            f"| {_cell(target.target_id)} | {target.variance_left:.3f} | {target.similarity:.3f} "
            f"| {target.best_similarity:.3f} | {target.num_tasks:,} | {_cell(target.nearest_id)} |"
            for target in shown
        ),
        "",
    ]


def _cell(text: str, limit: int = 80) -> str:
    """Text that stays in its cell."""
    flat = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
