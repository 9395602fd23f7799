"""Does choosing what to practise help, and which way to choose?

    OMP_NUM_THREADS=1 python benchmarks/curriculum.py [--quick] [--json] [--write] [--out FOLDER]

The demonstration of curricula (``ttt-adapt curriculum demo``): a small model of characters that can
do what twelve string families ask and usually does not; two sets of targets, of one family and of
three in the ratio 48 : 12 : 4; the model as it is and four ways to choose 256 of 6,000 tasks, each
practised for as many rollouts, under three seeds. Printed: avg@8 on held-out strings with 95 %
intervals over tasks and seeds, differences, and what became of the other families.

``--quick``: one seed, a corpus of 1,500 and few steps: the path, not the numbers. Runs are kept
in ``--out`` and not done again; without it they go to a temporary folder.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from ttt_adapt.curriculum.comparing import Comparison
from ttt_adapt.curriculum.comparing.files import comparison_to_json
from ttt_adapt.curriculum.comparing.wording import comparison_as_markdown
from ttt_adapt.curriculum.demonstration import (
    Demonstration,
    DemonstrationSettings,
    run_demonstration,
)
from ttt_adapt.runtime import num_cpus, versions
from ttt_adapt.storage import atomic_write, write_json

RESULTS = Path(__file__).parent / "results"
QUICK = {
    "seeds": (0,),
    "num_corpus": 1500,
    "num_steps": 12,
    "num_steps_single": 3,
    "num_evaluation": 48,
    "num_other": 4,
}


def as_markdown(found: Demonstration) -> str:
    """One table of arms a set of targets."""
    parts = []
    for name, comparison in found.comparisons.items():
        text = comparison_as_markdown(comparison).replace(
            comparison.model, "The model of characters"
        )
        parts.append(text.replace("# ", f"## Targets: {name}. ", 1))
    return "# Curricula: which way to choose?\n\n" + "\n".join(parts)


def as_json(found: Demonstration, settings: DemonstrationSettings, workers: int) -> dict[str, Any]:
    """Everything that was measured, and where."""
    comparisons = {}
    for name, comparison in found.comparisons.items():
        values = comparison_to_json(comparison)
        values["model"] = "model of characters"
        for arm in values["arms"]:
            del arm["curves"]
        comparisons[name] = values
    return {
        "settings": settings.model_dump(mode="json"),
        "seconds_of_runs": round(sum(seconds_of(c) for c in found.comparisons.values())),
        "workers": workers,
        "machine": {"processor": platform.machine(), "processors": num_cpus()},
        "versions": versions(),
        "comparisons": comparisons,
    }


def seconds_of(comparison: Comparison) -> float:
    """Of all runs, whenever they were done, as if one after another."""
    costs = [(arm.cost, arm.num_seeds) for arm in comparison.arms]
    return sum(num * (cost.train_s + cost.evaluate_s) for cost, num in costs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the path, in about a minute")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/curriculum.*"
    )
    parser.add_argument("--out", type=Path, help="keep runs here, and go on with those that are")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    options = parser.parse_args()
    settings = DemonstrationSettings(**QUICK) if options.quick else DemonstrationSettings()
    with tempfile.TemporaryDirectory() as temporary:
        found = run_demonstration(
            options.out or Path(temporary),
            settings,
            workers=options.workers,
            draw=False,
            report=lambda line: print(line, file=sys.stderr),
        )
    values = as_json(found, settings, options.workers)
    if options.write:
        write_json(RESULTS / "curriculum.json", values)
        with atomic_write(RESULTS / "curriculum.md", "w") as stream:
            stream.write(as_markdown(found))
    if options.json:
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        print(as_markdown(found))
        print(f"{found.elapsed_s:.0f} s with {options.workers} processes")


if __name__ == "__main__":
    main()
