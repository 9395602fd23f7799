"""`ttt-adapt curriculum train` and `eval`: practise tasks, and measure how often they are solved."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import (
    Assignments,
    DryRun,
    Json,
    Seed,
    guarded,
    parse_assignments,
    print_facts,
    print_json,
    print_table,
    progress_bar,
    read_config,
    say,
)
from ttt_adapt.cli.curriculum_options import (
    Device,
    MaxTasks,
    Model,
    Recipe,
    Weaker,
    print_plan,
    verifier,
)


@guarded
def train(
    curriculum: Annotated[Path, typer.Argument(help="A folder of `select`, or a file of tasks.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run's folder.")],
    model: Model = "llama-7m",
    config: Recipe = None,
    corpus: Annotated[
        str | None, typer.Option(help="To choose anew from, where reselect_every is set.")
    ] = None,
    targets: Annotated[
        list[str] | None, typer.Option("--targets", "-t", help="To choose anew for.")
    ] = None,
    weaker: Weaker = False,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Practise tasks by GRPO; Ctrl-C saves, the same command continues.

    Example: ttt-adapt curriculum train chosen -m llama-7m -c ttc_rl_llama_7m -o trained
    """
    from ttt_adapt.config import override
    from ttt_adapt.curriculum.comparing.planning import training_steps
    from ttt_adapt.curriculum.preparing import tasks_of
    from ttt_adapt.curriculum.training import GRPOSettings, TrainingProgress, train_curriculum

    changes = parse_assignments(assignments) | ({} if seed is None else {"seed": seed})
    settings = override(read_config(GRPOSettings, config), changes)
    tasks = tasks_of(curriculum / "tasks.jsonl" if curriculum.is_dir() else curriculum)
    num_steps = training_steps(len(tasks), settings)
    if dry_run:
        from ttt_adapt.curriculum.comparing.pace import measured_pace

        rollouts = num_steps * settings.prompts_per_step * settings.num_generations
        pace = measured_pace(model, tasks, settings, device=settings.device)
        most_s = rollouts * pace.rollout_s(settings.max_completion_tokens)
        print_plan({"num_tasks": len(tasks), "num_steps": num_steps, "num_rollouts": rollouts,
               "max_completion_tokens": rollouts * settings.max_completion_tokens,
               "estimated_s_at_most": round(most_s)}, as_json)  # fmt: skip
        return
    reselect = None
    if settings.reselect_every and corpus and targets:
        from ttt_adapt.curriculum.selecting import CurriculumSelectionSettings, Reselection

        wanted = [task for path in targets for task in tasks_of(path)]
        chosen_anew = CurriculumSelectionSettings(num_select=len(tasks), model=model)
        reselect = Reselection(
            tasks_of(corpus), wanted, chosen_anew, cache=out.with_name(out.name + "-embeddings")
        )
    with verifier(weaker) as checking, progress_bar("training", num_steps) as update:

        def report(now: TrainingProgress) -> None:
            update(now.record.step, now.num_steps, now.line())

        result = train_curriculum(
            model, tasks, settings, out, verifier=checking, progress=report, reselect=reselect
        )
    if as_json:
        print_json(result)
        return
    reward = "none known" if result.reward is None else f"{result.reward:.3f}"
    print_facts(
        f"{result.num_steps:,} steps",
        {
            "reward in the last step": reward,
            "rollouts": f"{result.num_rollouts:,}",
            "tokens": f"{result.num_tokens:,}",
            "groups without signal": f"{result.num_zero_signal:,}",
            "not verified": f"{result.num_absent:,}",
            "seconds": f"{result.elapsed_s:.0f}",
            "model": str(result.model),
        },
    )


@guarded
def evaluate(
    tasks: Annotated[str, typer.Argument(help="Tasks to attempt: file, folder, hub:…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for attempts and summary.")],
    model: Model = "llama-7m",
    num_samples: Annotated[int, typer.Option("--num-samples", help="Completions a task.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Of a completion.")] = 512,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 0.6,
    ks: Annotated[
        list[int] | None, typer.Option("-k", help="For pass@k and maj@k; repeatable.")
    ] = None,
    max_tasks: MaxTasks = None,
    device: Device = "auto",
    weaker: Weaker = False,
    assignments: Assignments = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """How often a model solves tasks: pass@k, avg@k, maj@k, with intervals.

    Every completion is kept: the same command draws only what is missing.

    Example: ttt-adapt curriculum eval svamp-test.jsonl.zst -m llama-7m -o runs/svamp --max-tasks 50
    """
    from ttt_adapt.config import ModelSettings, make_settings
    from ttt_adapt.curriculum.preparing import tasks_of
    from ttt_adapt.curriculum.sampling_settings import SamplingSettings

    settings = make_settings(
        SamplingSettings,
        {"num_samples": num_samples, "max_new_tokens": max_new_tokens, "temperature": temperature,
         "seed": seed or 0} | parse_assignments(assignments),
    )  # fmt: skip
    found = tasks_of(tasks, max_tasks=max_tasks)
    if dry_run:
        from ttt_adapt.curriculum.comparing.pace import measured_pace

        num = len(found) * settings.num_samples
        pace = measured_pace(model, found, settings, device=device)
        most_s = num * settings.max_new_tokens * pace.draw_s
        print_plan({"num_tasks": len(found), "num_completions": num,
               "max_completion_tokens": num * settings.max_new_tokens,
               "estimated_s_at_most": round(most_s)}, as_json)  # fmt: skip
        return
    from ttt_adapt.curriculum.evaluating import evaluate_tasks, evaluation_as_json

    with verifier(weaker) as checking, progress_bar("tasks", len(found)) as update:
        result = evaluate_tasks(
            ModelSettings(name=model, device=device), found, settings, out, checking,
            ks=tuple(ks or ()), progress=lambda done, total: update(done, total),
        )  # fmt: skip
    if as_json:
        print_json(evaluation_as_json(result, settings))
        return
    from ttt_adapt.curriculum.comparing.wording import with_interval

    ks_found = sorted(result.rates.pass_at)
    rows = [
        [name, str(rates.num_tasks), with_interval(rates.average),
         *(with_interval(rates.pass_at[k]) for k in ks_found),
         *(with_interval(rates.majority_at.get(k)) for k in ks_found)]
        for name, rates in (*result.by_source.items(), ("all", result.rates))
    ]  # fmt: skip
    header = ["source", "tasks", f"avg@{settings.num_samples}"]
    header += [f"pass@{k}" for k in ks_found] + [f"maj@{k}" for k in ks_found]
    print_table(model, header, rows)
    if result.rates.num_absent or result.num_too_long:
        say(
            f"not verified: {result.rates.num_absent}; left out, as their prompts are too long: "
            f"{result.num_too_long}"
        )
    say(f"every completion: {result.attempts}")
