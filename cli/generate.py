"""`ttt-adapt generate`: continue a prompt with a language model."""

from pathlib import Path
from typing import Annotated

import typer

from ttt_adapt.cli.console import (
    Assignments,
    Config,
    Json,
    Seed,
    experiment,
    guarded,
    print_json,
    read_input,
)


@guarded
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; standard input if left out.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt here.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name, folder or hub id.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="At most.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 takes the likeliest token each time.")
    ] = 0.0,
    config: Config = None,
    assignments: Assignments = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt; nothing is learned from it. For that, see ttt-adapt predict --generate.

    Example: ttt-adapt generate "The old house" --model llama-7m --temperature 0.8 --seed 1
    """
    import time

    settings = experiment(config, seed, assignments, model__name=model)
    content = read_input(prompt, file)

    from ttt_adapt.models import generate as continue_prompt
    from ttt_adapt.models import load_language_model

    lm = load_language_model(settings.model)
    begun = time.perf_counter()
    continuation = continue_prompt(
        lm,
        content,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=settings.seed,
    )
    if not as_json:
        typer.echo(continuation)
        return
    print_json(
        {
            "prompt": content,
            "continuation": continuation,
            "model": lm.name,
            "fingerprint": lm.fingerprint,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": settings.seed,
            "elapsed_s": time.perf_counter() - begun,
        }
    )
