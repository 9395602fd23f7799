"""The ladder from linear attention to TTT-Linear, and loss by position in long documents.

    python benchmarks/ablation.py DATA -o runs/ablation [--seeds 2] [--tokens N] [--rungs 2,5-8]

Table 1 and figure 5 of Sun et al. 2024 (arXiv 2407.04620) with models of two million parameters.
DATA holds ``prose/`` and ``minipile/`` as ``configs/ablation_*.toml`` name them. Every rung is trained
with the same shape, data, budget and seeds; its perplexity is that of the same windows of held-out
text. Every run is a folder of ``ttt-adapt pretrain``: interrupted, the same command continues.

By position: a transformer, TTT-Linear and TTT-MLP of one size, trained on windows of 2,048 tokens,
read 8,192 consecutive tokens of held-out documents that are as long. TTT layers read on, with the
state they have. The transformer appears twice: as it is, with rotary positions that it has never
seen, and in sliding windows of its training length, which forget what lies before them.

``--quick`` takes tiny models and this repository's own text: it shows that everything runs, no more.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ttt_adapt.config import ModelSettings, PretrainSettings, load_settings, to_toml
from ttt_adapt.configs import config_path
from ttt_adapt.errors import TTTAdaptError
from ttt_adapt.evaluation.positions import losses_by_position, position_bins, segments_of
from ttt_adapt.evaluation.report.drawing import drawing, finish, new_figure
from ttt_adapt.evaluation.report.palette import looks
from ttt_adapt.models import load_language_model
from ttt_adapt.runtime import set_num_threads, versions
from ttt_adapt.storage import atomic_write, stable_hash, write_json
from ttt_adapt.training import pretrain
from ttt_adapt.training.building import obtain_tokenizer
from ttt_adapt.training.mixture import prepare_mixture, sampled_texts
from ttt_adapt.training.tokenizer import BEGINNING

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUICK: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "max_length": 64, "batch_size": 4,
    "micro_batch_size": 4, "num_tokens": 2048, "validation_batches": 1,
}  # fmt: skip


class Rung(NamedTuple):
    """A row of table 1: our recipe's name, the row's, and its perplexity there."""

    recipe: str
    title: str
    paper: float


LADDER = (
    Rung("1_linear_attention", "linear attention", 15.91),
    Rung("2_linear_attention_improved", "linear attention, improved", 15.23),
    Rung("3_ttt_equivalence", "TTT equivalence", 15.23),
    Rung("4_learnable_w0", "+ learnable W0", 15.27),
    Rung("5_inner_norm", "+ LN and residual in f", 14.05),
    Rung("6_mini_batch", "+ mini-batch TTT", 12.35),
    Rung("7_learnable_lr", "+ learnable η", 11.99),
    Rung("8_mamba_backbone", "+ Mamba backbone", 11.09),
)
CONTEXT = {
    "context_transformer": "Transformer",
    "context_ttt_linear": "TTT-Linear",
    "context_ttt_mlp": "TTT-MLP",
}


class Run(NamedTuple):
    """One model to train: a recipe under one seed, in a folder."""

    recipe: str
    seed: int
    settings: PretrainSettings
    folder: Path
    data: Path

    @property
    def is_finished(self) -> bool:
        written = self.folder / "pretrain.toml"
        return (self.folder / "model.safetensors").is_file() and (
            written.read_text(encoding="utf-8") == to_toml(self.settings) + "\n"
        )


def make_run(recipe: str, seed: int, options: argparse.Namespace) -> Run:
    """The recipe's settings with the command's budget."""
    settings = load_settings(PretrainSettings, config_path(f"ablation_{recipe}"))
    changes: dict[str, Any] = {"seed": seed}
    if options.quick:
        source = {"path": str(ROOT / "ttt_adapt"), "include": ("*.py",), "format": "tree"}
        changes |= QUICK | {"sources": (source,), "validation": ({**source, "fraction": 0.5},)}
        if recipe.startswith("context"):
            changes |= {"max_length": 128, "batch_size": 2}
        if settings.mini_batch_size > 16:
            changes |= {"mini_batch_size": QUICK["max_length"]}
    if options.tokens:
        changes["num_tokens"] = options.tokens
    settings = PretrainSettings(**{**settings.model_dump(), **changes})
    folder = options.out / f"{settings.num_tokens}-tokens" / f"seed-{seed}" / recipe
    return Run(recipe, seed, settings, folder, options.data)


def prepare_tokens(run: Run, out: Path) -> Path:
    """Tokenise a run's mixture unless a run with the same one did; the tokens go into its folder."""
    settings = run.settings
    key = stable_hash([settings.model_dump()[name] for name in ("sources", "validation", "seed")])
    shared = out / "mixtures" / key[:12]
    shared.mkdir(parents=True, exist_ok=True)
    tokenizer = obtain_tokenizer(settings, shared, run.data, say)
    prepare_mixture(settings, shared / "tokens", tokenizer, root=run.data, report=say)
    run.folder.mkdir(parents=True, exist_ok=True)
    if not (run.folder / "tokens" / "mixture.json").is_file():
        shutil.copytree(shared / "tokens", run.folder / "tokens", dirs_exist_ok=True)
    return shared


def train(run: Run) -> str:
    """One run, in a process of its own; its progress goes to its folder. What diverges is a result:
    it ends its own run only."""
    set_num_threads(1)
    name = f"{run.recipe} seed {run.seed}"
    with (run.folder / "log.txt").open("a", encoding="utf-8") as stream:
        try:
            result = pretrain(
                run.settings, run.folder, data_root=run.data,
                report=lambda line: print(line, file=stream, flush=True),
            )  # fmt: skip
        except (TTTAdaptError, RuntimeError) as error:
            return f"{name} failed: {error}"
    rate = result.num_tokens / result.elapsed_s
    return f"{name}: {result.elapsed_s / 60:.1f} min, {rate:,.0f} tokens/s"


def train_all(runs: list[Run], num_workers: int) -> None:
    """Train what is not finished, longest first."""
    missing = [run for run in runs if not run.is_finished]
    missing.sort(key=lambda run: "ttt_mlp" not in run.recipe)
    say(f"{len(runs) - len(missing)} of {len(runs)} runs are there; training {len(missing)}")
    if num_workers < 2:
        list(map(say, map(train, missing)))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        list(map(say, pool.map(train, missing)))


def ladder_losses(runs: list[Run], shared: Path, num_windows: int) -> dict[str, dict[str, float]]:
    """Mean nats a token by recipe and seed, over the same windows of held-out text for all."""
    tokens = np.fromfile(shared / "tokens" / "validation.bin", dtype="<u2")
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        windows = segments_of([tokens.tolist()], run.settings.max_length, num_windows)
        losses = losses_by_position(loaded(run), windows, precision="bfloat16")
        found.setdefault(run.recipe, {})[str(run.seed)] = float(losses.mean())
    return found


def context_bins(runs: list[Run], shared: Path, length: int, count: int) -> list[dict[str, Any]]:
    """Loss by position of each model, mean over seeds."""
    settings, trained = runs[0].settings, runs[0].settings.max_length
    tokenizer = Tokenizer.from_file(str(shared / "tokenizer.json"))
    texts = (t for source in settings.validation for t in sampled_texts(source, 0, runs[0].data))
    beginning = tokenizer.token_to_id(BEGINNING)
    documents = [[beginning, *tokenizer.encode(t, add_special_tokens=False).ids] for t in texts]
    segments = segments_of(documents, length, count)
    bounds = [0, *(trained >> k for k in (5, 4, 3, 2, 1)), trained, 2 * trained, 4 * trained]
    losses: dict[str, list[Any]] = {}
    for run in runs:
        model, title = loaded(run), CONTEXT[run.recipe]
        arms: dict[str, dict[str, int]] = {title: {}}
        if title == "Transformer":
            sliding = {"window": trained, "stride": trained // 4}
            arms = {f"{title}, sliding window": sliding, f"{title}, as it is": {}}
        for arm, options in arms.items():
            say(f"  {arm}, seed {run.seed}, {len(segments)} × {length} tokens")
            found = losses_by_position(model, segments, precision="bfloat16", **options)
            losses.setdefault(arm, []).append(found)
    return [
        {"arm": arm, "bins": list(map(asdict, position_bins(np.mean(found, 0), bounds)))}
        for arm, found in losses.items()
    ]


def loaded(run: Run) -> Any:
    return load_language_model(ModelSettings(name=str(run.folder), device="cpu")).model


def ladder_rows(losses: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Perplexities, each rung's difference from the one before, and what the paper says of it."""
    rows: list[dict[str, Any]] = []
    before: Rung | None = None
    for rung in (rung for rung in LADDER if rung.recipe in losses):
        nats = losses[rung.recipe]
        row: dict[str, Any] = {
            "rung": rung.title,
            "paper": rung.paper,
            "by_seed": {seed: math.exp(value) for seed, value in nats.items()},
            "perplexity": math.exp(statistics.mean(nats.values())),
        }
        if before is not None:
            then = losses[before.recipe]
            changes = [math.exp(nats[seed] - then[seed]) - 1 for seed in nats if seed in then]
            row |= {
                "before": before.title,
                "paper_change": rung.paper / before.paper - 1,
                "changes": changes,
                "verdict": verdict(rung.paper / before.paper - 1, changes),
            }
        rows.append(row)
        before = rung
    return rows


def verdict(paper: float, changes: list[float]) -> str:
    """Whether our seeds show what the paper has; half a percent is no difference to either."""

    def sign(change: float) -> int:
        return 0 if abs(change) < 5e-3 else (1 if change > 0 else -1)

    found = {sign(change) for change in changes}
    if not found:
        return "–"
    if found == {sign(paper)}:
        return "holds"
    return "open (seeds disagree)" if len(found) > 1 else "does not hold"


def as_markdown(report: dict[str, Any]) -> str:
    """Both tables, for people."""
    budget = f"{report['num_tokens']:,} tokens, {report['num_seeds']} seeds"
    budget += " (quick: noise)" if report["is_quick"] else ""
    lines = [
        f"# From linear attention to TTT-Linear: {budget}",
        "",
        "Table 1 of arXiv 2407.04620 with 1.9M parameters; perplexity per token of held-out windows.",
        "",
        "| rung | perplexity | by seed | change | in the paper | order |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["ladder"]:
        seeds = " ".join(f"{value:.2f}" for value in row["by_seed"].values())
        change = " ".join(f"{value:+.1%}" for value in row.get("changes", [])) or "–"
        paper = f"{row['paper']:.2f}"
        if "paper_change" in row:
            paper += f" ({row['paper_change']:+.1%})"
        lines.append(
            f"| {row['rung']} | {row['perplexity']:.2f} | {seeds} | {change} | {paper} "
            f"| {row.get('verdict', '–')} |"
        )
    if report["by_position"]:
        bins = report["by_position"][0]["bins"]
        heads = " | ".join(f"{b['first']:,}–{b['last']:,}" for b in bins)
        stretches = f"{report['num_segments']} stretches of held-out documents (± standard error)"
        lines += [
            "",
            f"Nats per token by position in {stretches}.",
            f"Trained on windows of {report['trained_length']:,} tokens.",
            "",
            f"| model | {heads} |",
            f"|---|{'---|' * len(bins)}",
        ]
        for arm in report["by_position"]:
            cells = [f"{b['loss_nats']:.3f} ± {b['stderr_nats']:.3f}" for b in arm["bins"]]
            lines.append(f"| {arm['arm']} | {' | '.join(cells)} |")
    lines += ["", f"Failed: {'; '.join(report['failed']) or 'none'}."]
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any]) -> Any:
    """Perplexities of the rungs beside the paper's, and loss by position."""
    with drawing():
        figure = new_figure(8.0)
        left, right = figure.subplots(2, 1, height_ratios=[1, 1.3])
        ours, paper = looks([False, False])
        rows = report["ladder"]
        for look, key, label in ((ours, "perplexity", "here"), (paper, "paper", "paper, 125M")):
            values = [row[key] / rows[0][key] for row in rows]
            left.plot(values, range(len(rows)), color=look.color, marker=look.marker, label=label)
        left.set_yticks(range(len(rows)), labels=[row["rung"] for row in rows])
        left.invert_yaxis()
        left.set_xlabel("perplexity, of the first row's")
        left.legend()
        arms = report["by_position"]
        for look, arm in zip(looks([False] * len(arms)), arms, strict=True):
            x, y = zip(*((b["last"], b["loss_nats"]) for b in arm["bins"]), strict=True)
            right.plot(x, y, color=look.color, marker=look.marker, label=arm["arm"])
        if arms:
            right.axvline(report["trained_length"], color="#6b7079", linestyle=":", linewidth=1)
            right.set_xscale("log", base=2)
            right.set_xticks(x, labels=[f"{last:,}" for last in x])
            tame = [b["loss_nats"] for a in arms if "as it is" not in a["arm"] for b in a["bins"]]
            right.set_ylim(min(tame) - 0.1, max(tame) + 0.3)  # what explodes leaves the picture
            right.legend()
        right.set(xlabel="tokens read, up to (dotted: trained on)", ylabel="nats per token")
        return finish(figure, "ablation", "Perplexity by rung, and loss by position")


def rungs(text: str) -> list[Rung]:
    """Rungs of ``1,3-5``."""
    numbers: set[int] = set()
    for part in text.split(",") if text != "none" else ():
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    if not numbers <= set(range(1, len(LADDER) + 1)):
        raise ValueError(text)
    return [LADDER[number - 1] for number in sorted(numbers)]


def say(line: str) -> None:
    """A line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Train what is missing, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder with prose/ and minipile/")
    parser.add_argument("-o", "--out", type=Path, help="folder of the runs [runs/ablation]")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="budget of each run [the recipes': 3 million]")
    parser.add_argument("--rungs", type=rungs, default="1-8", help="such as 2,5-8, or none")
    parser.add_argument("--no-context", action="store_true", help="leave loss by position out")
    parser.add_argument("--windows", type=int, default=256, help="held out, for each rung")
    parser.add_argument("--segments", type=int, default=24, help="long stretches held out")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--quick", action="store_true", help="tiny models, this repository's text")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()
    if options.seeds < 1 or (options.data is None and not options.quick):
        parser.error("expected DATA and at least one seed")
    if options.quick and options.write:
        parser.error("--quick shows nothing worth writing down; leave --write out")
    set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        if options.quick:
            options.data, options.seeds, options.workers = ROOT, 1, 1
            options.windows, options.segments = 8, 2
        options.out = options.out or Path(temporary if options.quick else "runs/ablation")
        report = measure(options)
    table = as_markdown(report)
    print(json.dumps(report, indent=1) if options.json else table)
    if options.write:
        write_json(RESULTS / "ablation.json", report)
        with atomic_write(RESULTS / "ablation.md", "w") as stream:
            stream.write(table)
        draw(report).write_png(RESULTS / "ablation.png")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as the JSON has it."""
    seeds = range(options.seeds)
    ladder = [make_run(rung.recipe, seed, options) for seed in seeds for rung in options.rungs]
    context = [make_run(name, seed, options) for seed in seeds for name in CONTEXT]
    context = [] if options.no_context else context
    runs = [*ladder, *context]
    shared = {run.folder: prepare_tokens(run, options.out) for run in runs}
    train_all(runs, options.workers)
    failed = [f"{run.recipe}, seed {run.seed}" for run in runs if not run.is_finished]
    ladder, context = ([r for r in part if r.is_finished] for part in (ladder, context))
    say("reading held-out text")
    losses = ladder_losses(ladder, shared[ladder[0].folder], options.windows) if ladder else {}
    bins: list[dict[str, Any]] = []
    trained = context[0].settings.max_length if context else 0
    if context:
        bins = context_bins(context, shared[context[0].folder], 4 * trained, options.segments)
    return {
        "num_tokens": max((run.settings.num_tokens for run in runs), default=0),
        "num_seeds": options.seeds,
        "is_quick": options.quick,
        "failed": failed,
        "num_windows": options.windows,
        "num_segments": options.segments,
        "trained_length": trained,
        "ladder": ladder_rows(losses),
        "by_position": bins,
        "versions": versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
