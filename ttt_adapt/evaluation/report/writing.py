"""From run folders to files."""

from collections.abc import Sequence
from pathlib import Path

from ttt_adapt.errors import UserError
from ttt_adapt.evaluation.report.charts import (
    certainty_chart,
    cost_chart,
    steps_chart,
    subsets_chart,
)
from ttt_adapt.evaluation.report.drawing import drawing, require_matplotlib
from ttt_adapt.evaluation.report.examples import choose_examples
from ttt_adapt.evaluation.report.page import render
from ttt_adapt.evaluation.report.pairing import pair_runs
from ttt_adapt.evaluation.report.palette import looks
from ttt_adapt.evaluation.report.runs import read_runs
from ttt_adapt.storage import atomic_write

TITLE = "Test-time training: bits per byte before and after"


def write_report(
    run_folders: Sequence[Path],
    out: Path,
    *,
    title: str = TITLE,
    num_resamples: int = 2000,
    seed: int = 0,
) -> list[Path]:
    """Compare runs over the same texts in one self-contained HTML page, with PNGs beside it.

    Equal run folders give equal bytes (with the same matplotlib and fonts).

    Args:
        run_folders: each with ``results.jsonl``; ``run.json`` and ``settings.toml`` add names.
            Arms keep this order. Only texts in every run are compared, and counts are stated.
        out: a folder, made if need be, for ``report.html`` and one PNG a figure; or a path that
            ends in ``.html``: then that file, and PNGs whose names begin as it does.
        num_resamples, seed: of the paired bootstrap.

    Returns:
        The files written, the page first.

    Raises:
        UserError: a folder holds no results or unreadable ones, the runs share no text, or they
            scored different texts under the same ids.
        MissingDependencyError: matplotlib, of the ``report`` extra, is not installed.
    """
    if num_resamples < 1:
        raise UserError(f"num_resamples must be at least 1, found {num_resamples}")
    require_matplotlib()
    pairing = pair_runs(
        read_runs([Path(folder) for folder in run_folders]),
        num_resamples=num_resamples,
        seed=seed,
    )
    styles = looks([arm.is_base for arm in pairing.arms])
    with drawing():
        charts = {
            "steps": steps_chart(pairing, styles),
            "subsets": subsets_chart(pairing, styles),
            "certainty": certainty_chart(pairing, styles),
            "cost": cost_chart(pairing),
        }
    page = render(pairing, charts, choose_examples(pairing), styles, title=title)
    single = out.suffix.lower() in (".html", ".htm")
    path = out if single else out / "report.html"
    with atomic_write(path, "w") as stream:
        stream.write(page)
    prefix = f"{out.stem}-" if single else ""
    drawn = [chart for chart in charts.values() if chart is not None]
    return [
        path,
        *(chart.write_png(path.parent / f"{prefix}{chart.name}.png") for chart in drawn),
    ]
