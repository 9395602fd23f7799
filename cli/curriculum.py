"""`ttt-adapt curriculum`: choose tasks for the task at hand, practise them, measure."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttt_adapt.cli import curriculum_compare, curriculum_practise
from ttt_adapt.cli.console import (
    Assignments,
    DryRun,
    Json,
    Seed,
    guarded,
    parse_assignments,
    print_facts,
    print_json,
    progress_bar,
    say,
)
from ttt_adapt.cli.curriculum_options import Device, MaxTasks, Model, Targets, print_plan

if TYPE_CHECKING:
    from ttt_adapt.curriculum.preparing import PreparedCorpus

app = typer.Typer(
    no_args_is_help=True,
    help="Practise for a task: import, decontaminate, select, train, eval, compare.",
)


@app.command("import")
@guarded
def import_(
    source: Annotated[str, typer.Argument(help="A file, a folder, or hub:owner/name.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .jsonl or .jsonl.zst file.")],
    importer: Annotated[
        str, typer.Option(help="auto, gsm8k, math, humaneval, columns, …")
    ] = "auto",
    name: Annotated[str, typer.Option(help="Beginning of ids; default: the path's name.")] = "",
    split: Annotated[str, typer.Option(help="Of a hub data set.")] = "train",
    max_tasks: MaxTasks = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count rows that are no task instead of failing.")
    ] = False,
    without_duplicates: Annotated[
        bool, typer.Option("--without-duplicates", help="Of tasks that ask the same, keep one.")
    ] = False,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Read a data set of tasks whose answers can be verified, and write it in one format.

    Example: ttt-adapt curriculum import gsm8k-train.jsonl.zst -o corpus.jsonl.zst
    """
    from ttt_adapt.config import override
    from ttt_adapt.curriculum.preparing import import_corpus
    from ttt_adapt.curriculum.settings import TaskSourceSettings

    settings = override(
        TaskSourceSettings(path=source),
        {
            "importer": importer,
            "name": name,
            "split": split,
            "max_tasks": max_tasks,
            "on_error": "skip" if skip_bad else "fail",
        }
        | parse_assignments(assignments),
    )
    if dry_run:
        print_plan({"source": source, "importer": settings.importer, "out": str(out),
               "bytes": _bytes_of(source)}, as_json)  # fmt: skip
        return
    _print_prepared(
        import_corpus(settings, out, without_duplicates=without_duplicates), "imported", as_json
    )


@app.command()
@guarded
def decontaminate(
    corpus: Annotated[str, typer.Argument(help="Tasks to practise on: file, folder, hub:…")],
    targets: Targets,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for tasks and report.")],
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep tasks that ask the same.")
    ] = False,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Leave out of a corpus what gives the targets away, with a report of every case.

    Example: ttt-adapt curriculum decontaminate corpus.jsonl.zst -t gsm8k-test.jsonl.zst -o clean
    """
    from ttt_adapt.config import make_settings
    from ttt_adapt.curriculum.preparing import decontaminate_corpus, tasks_of
    from ttt_adapt.curriculum.settings import DecontaminationSettings

    settings = make_settings(DecontaminationSettings, parse_assignments(assignments))
    if dry_run:
        num_targets = sum(len(tasks_of(path)) for path in targets)
        print_plan({"num_tasks": len(tasks_of(corpus)), "num_targets": num_targets, "out": str(out)},
              as_json)  # fmt: skip
        return
    made = decontaminate_corpus(
        corpus, targets, out, settings, without_duplicates=not keep_duplicates
    )
    _print_prepared(made, "kept", as_json)
    if not as_json:
        say(f"what was left out, and why: {out / 'decontamination.txt'}")


@app.command()
@guarded
def select(
    corpus: Annotated[str, typer.Argument(help="Tasks to choose from: file, folder, hub:…")],
    targets: Targets,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the curriculum.")],
    model: Model = "llama-7m",
    method: Annotated[str, typer.Option(help="sift, nearest, round-robin or random.")] = "sift",
    num_select: Annotated[int, typer.Option("--num-select", "-n", help="N.")] = 1000,
    noise_var: Annotated[
        float | None, typer.Option(help="λ of SIFT; default: what the embeddings ask for.")
    ] = None,
    embedder: Annotated[
        str, typer.Option(help="policy-mean, policy-last, sentence or hashing.")
    ] = "policy-mean",
    max_targets: MaxTasks = None,
    device: Device = "auto",
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Choose the tasks of a corpus that are worth practising for some targets.

    Embeddings are kept in the folder: the same command continues, another method reuses them.

    Example: ttt-adapt curriculum select clean/tasks.jsonl.zst -t gsm8k-test.jsonl.zst -o chosen
    """
    from ttt_adapt.config import make_settings
    from ttt_adapt.curriculum.preparing import tasks_of
    from ttt_adapt.curriculum.selecting import (
        CurriculumSelectionSettings,
        select_curriculum,
        write_curriculum,
    )
    from ttt_adapt.curriculum.selecting.report import report_to_json

    policy = {"model": model} if embedder.startswith("policy") else {}
    settings = make_settings(
        CurriculumSelectionSettings,
        {"method": method, "num_select": num_select, "embedder": embedder, "device": device,
         "seed": seed or 0, **policy}
        | ({} if noise_var is None else {"noise_var": noise_var})
        | parse_assignments(assignments),
    )  # fmt: skip
    tasks = tasks_of(corpus)
    wanted = [task for path in targets for task in tasks_of(path, max_tasks=max_targets)]
    if dry_run:
        print_plan({"num_tasks": len(tasks), "num_targets": len(wanted), "method": settings.method,
               "num_select": min(settings.num_select, len(tasks)), "out": str(out),
               "texts_to_embed": len(tasks) + len(wanted)}, as_json)  # fmt: skip
        return
    with progress_bar("select") as update:
        chosen = select_curriculum(
            tasks, wanted, settings, cache=out / "embeddings",
            progress=lambda stage, done, total: update(done, total, stage),
        )  # fmt: skip
    write_curriculum(out, chosen)
    if as_json:
        print_json({"out": str(out), **report_to_json(chosen.report)})
        return
    report = chosen.report
    print_facts(
        f"{report.num_selected:,} of {report.num_tasks:,} tasks by {report.method}",
        {
            "similarity with the targets": f"{report.mean_similarity:.3f} (corpus "
            f"{report.corpus_similarity:.3f})",
            "diversity": f"{report.diversity:.3f} (corpus {report.corpus_diversity:.3f})",
            "variance left": f"{report.variance_left:.1%}",
            "effective rank": f"{report.effective_rank:.1f}",
            "λ": f"{report.noise_var:g} (suggested {report.suggested_noise_var:g})",
        },
    )
    for warning in report.warnings:
        say(f"note: {warning}")
    say(f"practise it: ttt-adapt curriculum train {out} -m {model} -o {out}-trained")


app.command("train")(curriculum_practise.train)
app.command("eval")(curriculum_practise.evaluate)
app.command("compare")(curriculum_compare.compare)
app.command("demo")(curriculum_compare.demo)


def _print_prepared(made: "PreparedCorpus", verb: str, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in made.by_kind.items())
    left_out = []
    if made.num_duplicates:
        left_out.append(f"{made.num_duplicates:,} duplicates")
    if made.num_contaminated:
        left_out.append(f"{made.num_contaminated:,} that give targets away")
    note = f"; left out: {', '.join(left_out)}" if left_out else ""
    there = "" if made.is_new else " (already there)"
    say(f"{verb} {made.num_tasks:,} of {made.num_read:,} tasks ({kinds}){note}: {made.path}{there}")
    if made.problems:
        say(made.problems)


def _bytes_of(source: str) -> int | None:
    path = Path(source)
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    return sum(file.stat().st_size for file in files if file.is_file()) or None
