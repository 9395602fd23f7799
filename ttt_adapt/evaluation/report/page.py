"""The report as one HTML page."""

import json
import math
from collections.abc import Mapping

from ttt_adapt.evaluation.pile import PILE_WEIGHTS, pile_subset
from ttt_adapt.evaluation.report.charts import MAX_SUBSETS
from ttt_adapt.evaluation.report.digits import bits, count, percent
from ttt_adapt.evaluation.report.drawing import Chart
from ttt_adapt.evaluation.report.examples import ArmExample, Example, Learnt
from ttt_adapt.evaluation.report.headline import facts, result_sentence
from ttt_adapt.evaluation.report.markup import Child, Markup, clean, join, shorten, tag
from ttt_adapt.evaluation.report.pairing import Pairing
from ttt_adapt.evaluation.report.palette import Look, css_color
from ttt_adapt.evaluation.report.stylesheet import CSS
from ttt_adapt.evaluation.report.tables import (
    MAX_LISTED,
    problems_table,
    steps_table,
    subsets_table,
    summary_table,
)

SNIPPET = 260
"""Characters of a passage shown."""
PASSAGES_SHOWN, PASSAGES_FOLDED = 3, 7


def render(
    pairing: Pairing,
    charts: Mapping[str, Chart | None],
    examples: list[Example],
    looks: list[Look],
    *,
    title: str,
) -> str:
    """The whole document: nothing in it points outside, nothing in it runs."""
    body = tag(
        "body",
        tag(
            "main",
            tag("header", tag("h1", title), *_header(pairing)),
            _results(pairing, looks),
            _section(
                "Bits per byte against steps",
                charts["steps"],
                "Each line is corpus-level bits per byte over the compared texts. Bands are 95% "
                "intervals from a paired bootstrap over texts: the interval of the ratio to base, "
                "drawn at the base’s height, so they show what adaptation changes and not how "
                "much texts differ. Percentages are of base.",
                "No run here has scores after learning.",
                tag("h3", "At every step") if pairing.query_ids else None,
                steps_table(pairing, looks) if pairing.query_ids else None,
                tag(
                    "p",
                    "In each cell: bits per byte; % of base; its 95% interval; wins–losses "
                    "against base, in texts.",
                    class_="note",
                )
                if pairing.query_ids
                else None,
            ),
            _section(
                "By subset",
                charts["subsets"],
                "After all steps; in parentheses the number of texts; thin lines are 95% "
                "intervals (paired bootstrap within the subset). Sorted by the arm that is best "
                "overall." + _cut(pairing),
                "No run here adapts and has base scores to compare with.",
                tag(
                    "details",
                    tag("summary", "The numbers: % of base, with 95% intervals"),
                    subsets_table(pairing, looks),
                )
                if charts["subsets"]
                else None,
            ),
            _examples(examples, looks, pairing),
            _section(
                "Does uncertainty foretell the gain?",
                charts["certainty"],
                "One point a text. σₙ is the square root of the posterior variance that the "
                "selection leaves: small when the passages cover the query. ρ is Spearman’s rank "
                "correlation; a clearly negative one means that gains can be foretold before "
                "learning.",
                "No run here has both passages with a posterior variance and base scores.",
            ),
            _section(
                "Cost",
                charts["cost"],
                "Mean wall-clock seconds per compared text. Scoring covers every evaluation "
                "point, not only the last.",
                "The runs recorded no times.",
            ),
            _problems(pairing),
            _settings(pairing),
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


def _header(pairing: Pairing) -> list[Markup]:
    return [
        tag("p", result_sentence(pairing), class_="result"),
        facts(pairing),
        *(tag("p", note, class_="note warning") for note in pairing.notes),
    ]


def _results(pairing: Pairing, looks: list[Look]) -> Markup:
    return tag(
        "section",
        tag("h2", "Results"),
        summary_table(pairing, looks),
        tag(
            "p",
            "Bits per byte: −Σ ln p / (ln 2 · Σ bytes) over all compared texts; less is better. "
            "Intervals: paired bootstrap over texts "
            f"({pairing.texts.num_resamples:,} resamples within subsets), in % of base. Wins and losses count "
            "texts that need fewer or more bits than with base. Failures count all of a run’s "
            "texts; those without a score in some arm are left out of the comparison in all.",
            class_="note",
        ),
        tag(
            "p",
            "pile_all: the mean over subsets with the Pile’s weights, "
            f"{_covered(pairing)} of which are in the subsets here.",
            class_="note",
        )
        if pairing.pile_weights is not None
        else None,
    )


def _cut(pairing: Pairing) -> str:
    number = len(set(pairing.subsets))
    if number <= MAX_SUBSETS:
        return ""
    return f" The {MAX_SUBSETS} most improved of {number} subsets are drawn; the table has all."


def _covered(pairing: Pairing) -> str:
    present = {pile_subset(name) for name in pairing.subsets}
    return f"{sum(weight for name, weight in PILE_WEIGHTS.items() if name in present):.0f}%"


def _section(
    heading: str, chart: Chart | None, caption: str, missing: str, *extra: Child
) -> Markup:
    if chart is None:
        shown = tag("p", missing, class_="note")
    else:
        shown = tag("figure", tag("div", chart.svg, class_="scroll"), tag("figcaption", caption))
    return tag("section", tag("h2", heading), shown, *extra)


def _examples(examples: list[Example], looks: list[Look], pairing: Pairing) -> Markup:
    look_of = dict(zip((arm.label for arm in pairing.arms), looks, strict=True))
    shown: list[Child] = [
        tag(
            "p",
            "Passages in the order they were learned from. Similarity is with the query; gain is "
            "the fall of the posterior variance when the passage was picked.",
            class_="note",
        )
        if examples
        else tag("p", "No run here adapts and has base scores to choose by.", class_="note")
    ]
    for example in examples:
        where = f"{example.query_id} · {example.subset} · {count(example.num_bytes, 'byte')}"
        shown.append(
            join(
                tag("h3", f"{example.heading}: ", shorten(where, 200)),
                tag("p", f"Base: {bits(example.base_bits_per_byte)} bits per byte", class_="note"),
                tag(
                    "div",
                    *(_arm(entry, look_of[entry.arm.label]) for entry in example.arms),
                    class_="arms",
                ),
            )
        )
    return tag("section", tag("h2", "What was learned from"), *shown)


def _arm(entry: ArmExample, look: Look) -> Markup:
    change = ""
    if math.isfinite(entry.reduction):
        change = f", {percent(1.0 - entry.reduction)} of base"
    passages = entry.passages
    parts: list[Child] = [
        tag("h4", entry.arm.label),
        tag("div", f"{bits(entry.bits_per_byte)} bits per byte{change}", class_="where"),
        tag("div", _tally(entry), class_="where"),
    ]
    if passages:
        parts.append(_passages(passages[:PASSAGES_SHOWN], 0))
    folded = passages[PASSAGES_SHOWN : PASSAGES_SHOWN + PASSAGES_FOLDED]
    if folded:
        rest = len(passages) - PASSAGES_SHOWN - len(folded)
        parts.append(
            tag(
                "details",
                tag("summary", f"{len(folded)} more", class_="where"),
                _passages(folded, PASSAGES_SHOWN),
                tag("div", f"and {rest} not shown", class_="where") if rest else None,
            )
        )
    return tag("div", *parts, class_="arm", style=f"border-color:{css_color(look.color)}")


def _tally(entry: ArmExample) -> str:
    if not entry.passages:
        return "no passages"
    text = count(len(entry.passages), "passage")
    if entry.num_repeats:
        text += f", {entry.num_repeats} of them repeating an earlier one"
    return text


def _passages(passages: tuple[Learnt, ...], first: int) -> Markup:
    items = []
    for number, passage in enumerate(passages, start=first + 1):
        source = passage.source
        numbers = []
        if math.isfinite(source.score):
            numbers.append(f"similarity {source.score:.3f}")
        if math.isfinite(source.gain):
            numbers.append(f"gain {source.gain:.3g}")
        repeat = None
        if passage.repeats is not None:
            same = "same text as" if passage.exact else "nearly the same as"
            repeat = tag("span", f"{same} {passage.repeats + 1}", class_="repeat")
        items.append(
            tag(
                "li",
                tag(
                    "div",
                    tag("b", f"{number}. {shorten(source.passage_id, 90)}"),
                    " ",
                    ", ".join(numbers),
                    " ",
                    repeat,
                    class_="where",
                ),
                tag("blockquote", _snippet(source.text), dir="auto"),
            )
        )
    return tag("ol", *items, class_="passages")


def _snippet(text: str) -> str:
    text = clean(text).strip()
    return text if len(text) <= SNIPPET else text[:SNIPPET].rstrip() + "…"


def _problems(pairing: Pairing) -> Markup:
    number, table = problems_table(pairing)
    if not number:
        shown = join(tag("p", "No text failed and no learning stopped early.", class_="note"))
    else:
        more = f" The first {MAX_LISTED} are listed." if number > MAX_LISTED else ""
        shown = join(tag("p", f"{count(number, 'case')} in all arms.{more}", class_="note"), table)
    return tag("section", tag("h2", "Failures and early stops"), shown)


def _settings(pairing: Pairing) -> Markup:
    blocks = []
    for arm in pairing.arms:
        run = arm.run
        info = json.dumps(run.info, indent=1, ensure_ascii=False, sort_keys=True)
        blocks.append(
            tag(
                "details",
                tag("summary", f"{run.label}: {count(len(run.results), 'text')}"),
                tag("h4", "settings.toml"),
                tag("pre", run.settings_text.strip() or "(none)"),
                tag("h4", "run.json"),
                tag("pre", info if run.info else "(none)"),
            )
        )
    return tag("section", tag("h2", "Settings"), *blocks)
