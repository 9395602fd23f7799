"""Bits per byte on held-out text of many domains: base, random, nearest, SIFT, in-context.

    python benchmarks/minipile.py DATA -o runs/minipile [--workers 2]

DATA holds Pile-format files ``train-*.jsonl.zst``, ``validation.jsonl.zst`` and
``test.jsonl.zst``. Passages come from train; the learning rate and λ are chosen on validation
texts; the table is about test texts. Interrupted at any point, the same command continues.
``--write`` puts the table and the report's pictures into ``benchmarks/results/``.

``--adapter fast-weights --model ttt-linear-7m`` asks the same of a model of TTT layers that reads the
passages instead of being trained on them; its half-life is chosen in the place of the learning rate.
"""

import argparse
import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from ttt_adapt import pipeline
from ttt_adapt.config import (
    AdaptationSettings,
    CorpusSettings,
    EvaluationSettings,
    ExperimentSettings,
    ModelSettings,
    RetrievalSettings,
    SelectionSettings,
)
from ttt_adapt.corpus import ReadProblems
from ttt_adapt.evaluation import Summary, compare, read_results, write_report
from ttt_adapt.storage import write_json
from ttt_adapt.types import Prediction

STEPS = "0,1,5,10,20,50"
RATES = (5e-5, 1e-4, 2e-4, 5e-4)
HALF_LIVES = (512, 2048, 8192, 0)
NOISE_VARS = (0.03, 0.1, 0.3, 1.0, 3.0)
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Build, choose, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the data set")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/minipile"))
    parser.add_argument("--model", default="llama-7m")
    parser.add_argument("--adapter", default="full", choices=["full", "fast-weights"])
    parser.add_argument("--steps", type=whole_numbers, default=STEPS, help="passages, ascending")
    parser.add_argument("--per-subset", type=int, default=20, help="test texts per domain")
    parser.add_argument("--choose-per-subset", type=int, default=2, help="validation texts")
    parser.add_argument("--max-bytes", type=int, default=2000, help="scored of each text")
    parser.add_argument("--max-documents", type=int, help="train documents to index")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--protocol", default="full", choices=["full", "split"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()

    steps, reads = options.steps, options.adapter == "fast-weights"
    chosen_setting, kind = ("half_life", "half-life") if reads else ("learning_rate", "rate")
    index = options.out / "index"
    corpus = CorpusSettings(
        path=str(options.data / "train-*.jsonl.zst"), max_documents=options.max_documents
    )
    say("indexing the train split")
    info = pipeline.build_index(corpus, index, problems=ReadProblems())
    opened = pipeline.open_index(index)

    def run(
        split: str, per_subset: int, at: tuple[int, ...], value: float, out: Path, *arms: str
    ) -> dict[str, Summary]:
        settings = ExperimentSettings(
            model=ModelSettings(name=options.model),
            data=CorpusSettings(path=str(options.data / f"{split}.jsonl.zst")),
            retrieval=RetrievalSettings(num_candidates=max(200, at[-1])),
            selection=SelectionSettings(num_select=at[-1]),
            adaptation=AdaptationSettings.model_validate(
                {"method": options.adapter, chosen_setting: value}
            ),
            evaluation=EvaluationSettings(
                steps=at,
                per_subset=per_subset,
                max_bytes=options.max_bytes,
                protocol=options.protocol,
            ),
            seed=options.seed,
        )
        return pipeline.evaluate(
            settings, opened, out, arms=arms, workers=options.workers, progress=tick
        )

    choose = options.out / "choose"
    few, ends = options.choose_per_subset, (0, steps[-1])
    say(f"choosing {chosen_setting} on validation texts")
    tried: dict[float, float] = {}
    for one in HALF_LIVES if reads else RATES:
        there = run("validation", few, ends, one, choose / f"{kind}-{one:g}", "nearest")["nearest"]
        tried[one] = there.steps[-1].bits_per_byte
    value = min(tried, key=lambda key: tried[key])
    say("choosing λ on validation texts")
    names = [f"sift@{noise_var:g}" for noise_var in NOISE_VARS]
    swept = run("validation", few, ends, value, choose / f"{kind}-{value:g}", *names)
    noise_vars = {name: swept[name].steps[-1].bits_per_byte for name in names}
    best = min(names, key=lambda name: noise_vars[name])
    say(f"{chosen_setting} {value:g}, {best}; evaluating on test texts")
    arms = ["base", "random", "nearest", best, "in-context"]
    run("test", options.per_subset, steps, value, options.out / "test", *arms)

    folders = {name: options.out / "test" / name for name in arms}
    pages = write_report(
        list(folders.values()), options.out / "report", title="mini-Pile test texts"
    )
    results = {name: read_results(folder / "results.jsonl") for name, folder in folders.items()}
    found = compare(results, baseline="nearest")
    result: dict[str, Any] = {
        "model": options.model,
        "adapter": options.adapter,
        "num_texts": found.num_shared,
        "num_failed": dict(found.num_failed),
        "num_passages": info.num_passages,
        "max_bytes": options.max_bytes,
        "protocol": options.protocol,
        chosen_setting: value,
        "chosen_on_validation": {
            "num_texts": there.num_successful,
            "base": there.steps[0].bits_per_byte,
            "half_lives" if reads else "rates": tried,
            "noise_vars": noise_vars,
        },
        "rows": [
            {
                "arm": row.run,
                "step": row.step,
                "bits_per_byte": row.bits_per_byte,
                **({} if row.against_base is None else interval("base", row.against_base)),
                **(
                    {}
                    if row.against_baseline is None
                    else interval("nearest", row.against_baseline)
                ),
            }
            for row in found.rows
        ],
        "domains": shares_by_domain(results),
    }
    table = to_table(result)
    print(json.dumps(result, indent=1) if options.json else table)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        name = "minipile-fast-weights" if reads else "minipile"
        write_json(RESULTS / f"{name}.json", result)
        (RESULTS / f"{name}.md").write_text(table, encoding="utf-8")
        for page in pages:
            if page.suffix == ".png":
                shutil.copy(page, RESULTS / f"{name}-{page.name}")
    return 0


def shares_by_domain(results: dict[str, list[Prediction]]) -> dict[str, dict[str, float]]:
    """Bits after the last step as a share of those before the first, by domain and arm."""
    found: dict[str, dict[str, float]] = {}
    for arm, predictions in results.items():
        before, after = defaultdict[str, float](float), defaultdict[str, float](float)
        for prediction in predictions:
            before[prediction.subset] += prediction.scores[0].nats
            after[prediction.subset] += prediction.scores[-1].nats
        for domain in sorted(before):
            found.setdefault(domain, {})[arm] = after[domain] / before[domain]
    return found


def interval(name: str, found: Any) -> dict[str, float]:
    """A paired comparison's figures, named after what was compared with."""
    return {
        f"ratio_to_{name}": found.ratio,
        f"low_to_{name}": found.low,
        f"high_to_{name}": found.high,
        f"wins_{name}": found.wins,
        f"losses_{name}": found.losses,
    }


def to_table(result: dict[str, Any]) -> str:
    """Arms by steps in Markdown."""
    steps = sorted({row["step"] for row in result["rows"]})
    if result["adapter"] == "fast-weights":
        how = (
            f"read by TTT layers, the nearest last, half-life {result['half_life']:,} tokens. It and λ "
            "were"
        )
    else:
        how = (
            f"full fine-tuning, Adam {result['learning_rate']:g}, one step a passage in the order "
            "of picking. Learning rate and λ were"
        )
    lines = [
        f"# {result['num_texts']} test texts, protocol {result['protocol']}",
        "",
        (
            f"Model {result['model']}; first {result['max_bytes']:,} bytes of each text; "
            f"{result['num_passages']:,} passages of the train split; {how} chosen on validation "
            "texts. Bits per byte are corpus-level; intervals are 95%, paired by text, of the last "
            "step's difference from the base."
        ),
        "",
        "| arm | " + " | ".join(map(str, steps)) + " | of base | 95% interval | won/lost |",
        "|---|" + "---|" * (len(steps) + 3),
    ]
    for arm in dict.fromkeys(row["arm"] for row in result["rows"]):
        rows = {row["step"]: row for row in result["rows"] if row["arm"] == arm}
        last = rows[max(rows)]
        cells = [f"{rows[step]['bits_per_byte']:.4f}" for step in steps]
        cells += [
            f"{last['ratio_to_base']:.1%}",
            f"{last['low_to_base']:+.4f} … {last['high_to_base']:+.4f}",
            f"{last['wins_base']}/{last['losses_base']}",
        ]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    lines += ["", "Difference from nearest, 95% interval, by step:", ""]
    lines += [f"| arm | {' | '.join(map(str, steps))} |", "|---|" + "---|" * len(steps)]
    for arm in dict.fromkeys(row["arm"] for row in result["rows"] if "low_to_nearest" in row):
        cells = [
            f"{row['low_to_nearest']:+.4f} … {row['high_to_nearest']:+.4f}"
            for row in result["rows"]
            if row["arm"] == arm
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    lines += ["", "By domain, of the base after the last step:", ""]
    lines += [f"| domain | {' | '.join(arms)} |", "|---|" + "---|" * len(arms)]
    for domain, shares in result["domains"].items():
        lines.append(f"| {domain} | {' | '.join(f'{shares[arm]:.1%}' for arm in arms)} |")
    failed = {name: count for name, count in result["num_failed"].items() if count}
    lines += ["", f"Failed queries: {failed or 'none'}.", "", choice(result)]
    return "\n".join(lines) + "\n"


def choice(result: dict[str, Any]) -> str:
    """What was tried on validation texts, and what it gave there."""
    chosen = result["chosen_on_validation"]
    tried = chosen.get("half_lives") or chosen["rates"]
    name = "half-life" if "half_lives" in chosen else "learning rate"

    def shares(values: dict[Any, float]) -> str:
        return ", ".join(f"{key}: {value / chosen['base']:.1%}" for key, value in values.items())

    return (
        f"Tried on {chosen['num_texts']} validation texts (base {chosen['base']:.4f}), of the base "
        f"after the last step: {name} {shares({f'{key:g}': bits for key, bits in tried.items()})}; "
        f"{shares(chosen['noise_vars'])}."
    )


def whole_numbers(text: str) -> tuple[int, ...]:
    """Steps such as ``0,1,5``."""
    numbers = tuple(map(int, text.split(",")))
    if numbers[0] != 0 or list(numbers) != sorted(set(numbers)):
        raise ValueError(text)
    return numbers


def say(line: str) -> None:
    """A line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def tick(done: int, total: int, arm: str) -> None:
    """Progress every ten queries."""
    if done % 10 == 0 or done == total:
        say(f"  {done}/{total} {arm}")


if __name__ == "__main__":
    sys.exit(main())
