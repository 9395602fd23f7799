"""A comparison as one self-contained HTML page, with a PNG of each figure beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ttt_adapt.curriculum.comparing.arms import BASE
from ttt_adapt.curriculum.comparing.charts import (
    arms_chart,
    choices_chart,
    cost_chart,
    curves_chart,
    others_chart,
    subsets_chart,
)
from ttt_adapt.curriculum.comparing.comparison import Comparison
from ttt_adapt.curriculum.comparing.files import read_comparison
from ttt_adapt.curriculum.comparing.inputs import SETTINGS_NAME
from ttt_adapt.curriculum.comparing.target_rows import (
    PracticedTask,
    TargetRow,
    practised,
    target_rows,
)
from ttt_adapt.curriculum.comparing.wording import (
    conclusions,
    has_subsets,
    rate,
    signed,
    with_interval,
)
from ttt_adapt.evaluation.report.digits import NONE, count, seconds
from ttt_adapt.evaluation.report.drawing import Chart, drawing, require_matplotlib
from ttt_adapt.evaluation.report.markup import Child, Markup, join, shorten, tag
from ttt_adapt.evaluation.report.palette import Look, css_color, looks
from ttt_adapt.evaluation.report.stylesheet import CSS
from ttt_adapt.storage import atomic_write

TITLE = "Curricula compared"
MAX_TARGETS = 200
SNIPPET = 200
"""Characters of a task shown."""


def write_comparison_report(folder: Path, out: Path, *, title: str = TITLE) -> list[Path]:
    """Draw the comparison in ``folder``.

    Args:
        out: a folder, made if need be, for ``report.html`` and the pictures; or a path ending in
            ``.html``.

    Returns:
        the files written, the page first.

    Raises:
        UserError: the folder holds no comparison.
        MissingDependencyError: matplotlib, of the ``report`` extra, is not installed.
    """
    require_matplotlib()
    comparison = read_comparison(folder)
    styles = looks([arm.name == BASE for arm in comparison.arms])
    look_of = {arm.name: look for arm, look in zip(comparison.arms, styles, strict=True)}
    with drawing():
        charts = {
            "arms": arms_chart(comparison, look_of),
            "curves": curves_chart(comparison, look_of),
            "kinds": subsets_chart(comparison, look_of),
            "choices": choices_chart(comparison, look_of),
            "others": others_chart(comparison, look_of),
            "cost": cost_chart(comparison),
        }
    settings = folder / SETTINGS_NAME
    page = _page(
        comparison,
        charts,
        look_of,
        target_rows(folder, comparison),
        practised(folder, comparison),
        title=title,
        settings=settings.read_text(encoding="utf-8") if settings.is_file() else "",
    )
    single = out.suffix.lower() in (".html", ".htm")
    path = out if single else out / "report.html"
    with atomic_write(path, "w") as stream:
        stream.write(page)
    prefix = f"{out.stem}-" if single else ""
    drawn = [chart for chart in charts.values() if chart is not None]
    return [path, *(chart.write_png(path.parent / f"{prefix}{chart.name}.png") for chart in drawn)]


def _page(
    comparison: Comparison,
    charts: Mapping[str, Chart | None],
    look_of: Mapping[str, Look],
    rows: Sequence[TargetRow],
    tasks: Mapping[str, Sequence[PracticedTask]],
    *,
    title: str,
    settings: str,
) -> str:
    said = conclusions(comparison)
    body = tag(
        "body",
        tag(
            "main",
            tag(
                "header",
                tag("h1", title),
                tag("p", said[0], " ", said[1] if len(said) > 1 else "", class_="result"),
                *(tag("p", sentence) for sentence in said[2:]),
                _facts(comparison),
                *(tag("p", note, class_="note warning") for note in comparison.notes),
            ),
            _section(
                "Arms",
                charts["arms"],
                f"Thin lines are {comparison.level:.0%} intervals over tasks and seeds.",
                _arms_table(comparison, look_of),
            ),
            _section(
                "Learning",
                charts["curves"],
                "Right completions among those drawn in training, at its temperature, smoothed over "
                "a few steps; bold: mean over seeds. Arms practise different tasks, so heights "
                "compare what they practised, too.",
            ),
            _section("Kinds of targets", charts["kinds"], "Mean over tasks and seeds."),
            _targets(rows, comparison, look_of),
            _section(
                "What was practised",
                charts["choices"],
                "Share of each kind in a curriculum, of the first seed.",
                _choices_table(comparison, look_of),
                _examples(tasks, look_of),
            ),
            _section(
                "What was forgotten",
                charts["others"],
                "Tasks of kinds that are no target. Less than base: forgotten; more: practised "
                "along, or of use for these too.",
            ),
            _section(
                "Cost",
                charts["cost"],
                "Wall-clock on a machine that runs may have shared. Embeddings are made once, by "
                "the first arm that needs them.",
            ),
            tag("section", tag("h2", "Settings"), tag("pre", settings.strip() or "(none)")),
        ),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        Markup(f"<style>{CSS}</style>"),
    )
    return "<!DOCTYPE html>\n" + tag("html", "\n", head, "\n", body, "\n", lang="en") + "\n"


def _facts(comparison: Comparison) -> Markup:
    matched = "the same for every arm" if comparison.matched else "not the same for every arm"
    rows = [
        ("model", comparison.model),
        ("targets", count(comparison.num_targets, "task")),
        ("compared on", count(comparison.num_evaluation, "task")),
        ("corpus", count(comparison.num_corpus, "task")),
        ("seeds", ", ".join(map(str, comparison.seeds))),
        ("completions", f"{comparison.num_samples} a task"),
        ("rollouts", matched),
    ]
    cells = [join(tag("dt", name), tag("dd", value)) for name, value in rows]
    return tag("dl", *cells, class_="facts")


def _section(heading: str, chart: Chart | None, caption: str, *extra: Child) -> Markup | None:
    if chart is None and not any(extra):
        return None
    figure = (
        tag("figure", tag("div", chart.svg, class_="scroll"), tag("figcaption", caption))
        if chart is not None
        else None
    )
    return tag("section", tag("h2", heading), figure, *extra)


def _arms_table(comparison: Comparison, look_of: Mapping[str, Look]) -> Markup:
    several = has_subsets(comparison)
    ks = [k for k in comparison.rates_at if k > 1]
    header = ["arm"]
    header += ["by targets’ shares"] if several else []
    header += ["mean over kinds" if several else f"avg@{comparison.num_samples}", "against base"]
    header += [name for k in ks for name in (f"pass@{k}", f"maj@{k}")]
    header += ["other kinds", "groups without signal", "rollouts", "tokens", "s a run"]
    rows = []
    for arm in comparison.arms:
        against = comparison.difference(arm.name, BASE)
        rates = [r.get(k) for k in ks for r in (arm.rates.pass_at, arm.rates.majority_at)]
        total_s = arm.cost.select_s + arm.cost.train_s + arm.cost.evaluate_s
        cells: list[Child] = [with_interval(arm.by_target)] if several else []
        cells += [
            with_interval(arm.by_subset),
            signed(against.by_subset) if against else NONE,
            *(with_interval(found) for found in rates),
            with_interval(arm.others),
            f"{arm.zero_signal:.0%}" if arm.curve else NONE,
            f"{arm.cost.num_rollouts:,}",
            f"{arm.cost.num_train_tokens:,}",
            seconds(total_s),
        ]
        rows.append(_row(arm.name, look_of, cells))
    return _table(header, rows)


def _choices_table(comparison: Comparison, look_of: Mapping[str, Look]) -> Markup:
    header = ["arm", "tasks", "of the targets’ kinds", "similarity with the targets", "diversity"]
    header += ["variance left", "effective rank", "λ"]
    rows = []
    for arm in comparison.arms:
        choice = arm.choice
        if choice is None:
            continue
        cells = [
            f"{choice.num_tasks:,}",
            f"{choice.on_target:.0%}",
            f"{choice.similarity:.3f}",
            f"{choice.diversity:.3f}",
            f"{choice.variance_left:.1%}",
            f"{choice.effective_rank:.1f}",
            f"{choice.noise_var:g}" if arm.name.startswith("sift") else NONE,
        ]
        rows.append(_row(arm.name, look_of, cells))
    return _table(header, rows)


def _examples(
    tasks: Mapping[str, Sequence[PracticedTask]], look_of: Mapping[str, Look]
) -> Markup | None:
    if not tasks:
        return None
    shown = [
        tag(
            "div",
            tag("h4", name),
            tag(
                "ol",
                *(
                    tag(
                        "li",
                        tag("div", tag("b", shorten(f"{n}. {item.task_id}", 90)), class_="where"),
                        tag("blockquote", shorten(item.text, SNIPPET), dir="auto"),
                    )
                    for n, item in enumerate(found, start=1)
                ),
                class_="passages",
            ),
            class_="arm",
            style=f"border-color:{css_color(look_of[name].color)}",
        )
        for name, found in tasks.items()
    ]
    return join(tag("h3", "The first picks"), tag("div", *shown, class_="arms"))


def _targets(
    rows: Sequence[TargetRow], comparison: Comparison, look_of: Mapping[str, Look]
) -> Markup | None:
    if not rows:
        return None
    cut = f" The first {MAX_TARGETS} are listed." if len(rows) > MAX_TARGETS else ""
    names = [arm.name for arm in comparison.arms]
    listed = [
        tag(
            "tr",
            tag("th", shorten(row.task_id, 60), scope="row"),
            tag("td", row.subset, class_="text"),
            *(tag("td", rate(row.rates.get(name))) for name in names),
        )
        for row in rows[:MAX_TARGETS]
    ]
    return tag(
        "section",
        tag("h2", "Each task"),
        tag(
            "details",
            tag("summary", f"Mean reward of {count(len(rows), 'task')}"),
            tag(
                "p",
                "Mean over seeds and completions; those that gained most over base, by the best arm,"
                f" come first.{cut}",
                class_="note",
            ),
            _table(["task", "kind", *names], listed),
        ),
    )


def _row(name: str, look_of: Mapping[str, Look], cells: Sequence[Child]) -> Markup:
    swatch = tag("span", class_="swatch", style=f"background:{css_color(look_of[name].color)}")
    return tag("tr", tag("th", swatch, name, scope="row"), *(tag("td", cell) for cell in cells))


def _table(header: Sequence[str], rows: Sequence[Markup]) -> Markup:
    cells = [
        tag("th", name, scope="col", class_="text" if place == 0 else None)
        for place, name in enumerate(header)
    ]
    table = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *rows))
    return tag("div", table, class_="scroll", tabindex="0")
