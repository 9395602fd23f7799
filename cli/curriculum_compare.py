"""`ttt-adapt curriculum compare` and `demo`: all arms at the same number of rollouts."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import (
    Assignments,
    DryRun,
    Json,
    guarded,
    jsonable,
    parse_assignments,
    parse_numbers,
    print_json,
    print_table,
    progress_bar,
    read_config,
    say,
)
from ttt_adapt.cli.curriculum_options import MaxTasks, Targets, Weaker, print_plan

Workers = Annotated[
    int, typer.Option(help="Processes of one thread each; 0: this one, with all threads.")
]
Seeds = Annotated[str | None, typer.Option(help="Comma-separated, e.g. 0,1,2.")]
Arms = Annotated[
    str | None,
    typer.Option(help="Comma-separated: base, random, nearest, round-robin, sift, sift@λ."),
]


@guarded
def compare(
    corpus: Annotated[str, typer.Argument(help="Tasks to choose from: file, folder, hub:…")],
    targets: Targets,
    out: Annotated[Path, typer.Option("--out", "-o", help="The comparison's folder.")],
    evaluation: Annotated[
        list[str] | None,
        typer.Option("--evaluation", help="Tasks to compare on; default: the targets."),
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--others", help="Tasks of other kinds: what was forgotten; repeatable."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A bundled name, a folder, a hub id.")
    ] = None,
    arms: Arms = None,
    seeds: Seeds = None,
    num_select: Annotated[int | None, typer.Option("--num-select", "-n", help="N.")] = None,
    training: Annotated[
        str | None, typer.Option(help="A recipe or TOML file of training: ttc_rl_llama_7m, …")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A TOML file of a whole comparison.")
    ] = None,
    max_targets: MaxTasks = None,
    max_corpus: MaxTasks = None,
    max_others: MaxTasks = None,
    workers: Workers = 0,
    weaker: Weaker = False,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Choose, practise and evaluate for every arm and seed; write table, JSON and page.

    Interrupted, the same command continues; arms and seeds may be added later.

    Example: ttt-adapt curriculum compare clean/tasks.jsonl.zst -t svamp-test.jsonl.zst
    --training ttc_rl_llama_7m --max-targets 20 -n 16 --seeds 0,1 -o runs/svamp
    """
    from ttt_adapt.config import override
    from ttt_adapt.curriculum.comparing import (
        ComparisonProgress,
        ComparisonSettings,
        compare_curricula,
        plan_comparison,
    )
    from ttt_adapt.curriculum.comparing.files import comparison_to_json
    from ttt_adapt.curriculum.preparing import tasks_of
    from ttt_adapt.curriculum.settings import SandboxSettings
    from ttt_adapt.curriculum.training.settings import GRPOSettings

    settings = read_config(ComparisonSettings, config)
    changes = {
        "model": model,
        "arms": _listed(arms),
        "seeds": None if seeds is None else parse_numbers(seeds),
        "selection.num_select": num_select,
        "training": None if training is None else read_config(GRPOSettings, training).model_dump(),
    }
    given = {key: value for key, value in changes.items() if value is not None}
    settings = override(settings, given | parse_assignments(assignments))
    tasks = tasks_of(corpus, max_tasks=max_corpus)
    wanted = [task for path in targets for task in tasks_of(path, max_tasks=max_targets)]
    compared = [task for path in evaluation or () for task in tasks_of(path)] or None
    other = [task for path in others or () for task in tasks_of(path, max_tasks=max_others)]
    if dry_run:
        from ttt_adapt.curriculum.comparing.pace import measured_pace

        plan = plan_comparison(tasks, wanted, settings, out, evaluation=compared, others=other)
        pace = measured_pace(
            settings.model, wanted, settings.sampling, device=settings.training.device
        )
        practised_s = plan.num_rollouts_left * pace.rollout_s(
            settings.training.max_completion_tokens
        )
        attempted_s = plan.num_attempts_left * settings.sampling.max_new_tokens * pace.draw_s
        most_s = (practised_s + attempted_s) / max(1, workers)
        print_plan({**jsonable(plan), "estimated_s_at_most": round(most_s)}, as_json)
        return
    with progress_bar("compare") as update:

        def report(now: ComparisonProgress) -> None:
            text = f"run {now.runs_done}/{now.num_runs}: {now.stage} {now.arm}"
            update(now.done, now.total, text)

        found = compare_curricula(
            tasks,
            wanted,
            settings,
            out,
            evaluation=compared,
            others=other,
            workers=workers,
            sandbox=SandboxSettings(allow_weaker=weaker),
            progress=report,
        )
    if as_json:
        print_json({"out": str(out), **comparison_to_json(found)})
        return
    _print_comparison(out)
    say(f"draw it: ttt-adapt report {out}")


@guarded
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for model, runs and reports.")
    ] = Path("runs/demo-curriculum"),
    workers: Workers = 2,
    seeds: Seeds = None,
    arms: Arms = None,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """A small model learns string tasks in minutes: one family, then a mixture of three.

    Example: ttt-adapt curriculum demo --workers 2
    """
    from ttt_adapt.config import override
    from ttt_adapt.curriculum.comparing.files import comparison_to_json
    from ttt_adapt.curriculum.demonstration import (
        DemonstrationSettings,
        plan_demonstration,
        run_demonstration,
    )

    changes = {"arms": _listed(arms), "seeds": None if seeds is None else parse_numbers(seeds)}
    given = {key: value for key, value in changes.items() if value is not None}
    settings = override(DemonstrationSettings(), given | parse_assignments(assignments))
    if dry_run:
        print_plan(plan_demonstration(settings), as_json)
        return
    with progress_bar("demo") as update:
        found = run_demonstration(
            out,
            settings,
            workers=workers,
            report=say,
            progress=lambda text, done, total: update(done, total, text),
        )
    if as_json:
        comparisons = {k: comparison_to_json(v) for k, v in found.comparisons.items()}
        print_json({"comparisons": comparisons, "reports": found.reports,
                    "elapsed_s": found.elapsed_s})  # fmt: skip
        return
    for name in found.comparisons:
        _print_comparison(out / name, name)
    for page in found.reports.values():
        say(f"report: {page}")
    say(f"{found.elapsed_s:.0f} s")


def _print_comparison(folder: Path, title: str = "") -> None:
    """The table of arms, and what it shows."""
    from ttt_adapt.curriculum.comparing import conclusions, read_comparison
    from ttt_adapt.curriculum.comparing.wording import arms_rows, has_subsets, subsets_rows

    found = read_comparison(folder)
    header, rows = arms_rows(found, brief=True)
    where = f"{found.num_evaluation:,} tasks, {len(found.seeds)} seeds"
    print_table(f"{title}: {where}" if title else where, header, rows)
    if has_subsets(found):
        header, rows = subsets_rows(found)
        print_table("kinds of targets", header, rows)
    for sentence in conclusions(found):
        say(sentence)
    for note in found.notes:
        say(f"note: {note}")


def _listed(names: str | None) -> list[str] | None:
    if names is None:
        return None
    return [name.strip() for name in names.split(",") if name.strip()]
