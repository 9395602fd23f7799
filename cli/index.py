"""`ttt-adapt index`: build, info, search, verify, add."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttt_adapt.cli.console import (
    Assignments,
    Config,
    DryRun,
    Json,
    experiment,
    guarded,
    jsonable,
    print_facts,
    print_json,
    print_table,
    progress_bar,
    read_input,
    say,
)

if TYPE_CHECKING:
    from ttt_adapt.corpus import ReadProblems
    from ttt_adapt.indexes import IndexInfo

app = typer.Typer(no_args_is_help=True, help="Build and inspect indexes over a corpus.")

Folder = Annotated[Path, typer.Argument(help="The index's folder.", metavar="INDEX")]


Format = Annotated[
    str | None, typer.Option("--format", help="auto, jsonl, text, tree, parquet, arrow or hub.")
]
TextColumn = Annotated[str | None, typer.Option(help="Column that holds the text.")]
OnError = Annotated[str | None, typer.Option("--on-error", help="Malformed records: fail or skip.")]
CorpusAssignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the corpus, e.g. --set corpus.id_column=url."),
]
IdPrefix = Annotated[
    str | None,
    typer.Option(help="Begins every document's id: for corpora whose files have the same names."),
]


@app.command()
@guarded
def build(
    corpus: Annotated[
        str | None,
        typer.Argument(
            help="A .jsonl[.zst|.gz], text or Parquet/Arrow file, a folder, or hub:owner/name; "
            "or `corpus` in --config."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")] = ...,  # type: ignore[assignment]
    format: Format = None,
    text_column: TextColumn = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Pattern of files to read in a folder.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Pattern of files to leave out.")
    ] = None,
    max_documents: Annotated[int | None, typer.Option(help="Read at most so many.")] = None,
    on_error: OnError = None,
    id_prefix: IdPrefix = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="A sentence-transformers model (default all-MiniLM-L6-v2), causal-lm:MODEL, "
            "or hashing."
        ),
    ] = None,
    factory: Annotated[str | None, typer.Option(help="FAISS factory string, or auto.")] = None,
    memory_budget_mb: Annotated[int | None, typer.Option(help="For factory auto.")] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Bytes (or tokens) a passage; default 1200.")
    ] = None,
    chunk_unit: Annotated[str | None, typer.Option(help="bytes or tokens.")] = None,
    chunk_overlap: Annotated[
        int | None, typer.Option(help="Shared by neighbouring passages.")
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of FAISS training.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Read, cut, embed and index a corpus. Interrupted, the same command continues.

    Example: ttt-adapt index build corpus.jsonl.zst -o my-index
    """
    from ttt_adapt import pipeline
    from ttt_adapt.corpus import ReadProblems
    from ttt_adapt.corpus.files import is_hub
    from ttt_adapt.errors import SettingsError

    settings = experiment(
        config,
        None,
        assignments,
        corpus__path=corpus,
        corpus__format=format,
        corpus__text_column=text_column,
        corpus__split=split,
        corpus__include=tuple(include) if include else None,
        corpus__exclude=tuple(exclude) if exclude else None,
        corpus__max_documents=max_documents,
        corpus__on_error=on_error,
        corpus__id_prefix=id_prefix,
        chunks__size=chunk_size,
        chunks__unit=chunk_unit,
        chunks__overlap=chunk_overlap,
        index__factory=factory,
        index__memory_budget_mb=memory_budget_mb,
        index__seed=seed,
        **_embedding_options(embedder),
    )
    if settings.corpus is None:
        raise SettingsError("expected a corpus to index, found none; name a file or folder")
    if dry_run:
        plan = pipeline.plan_index(settings.corpus, chunks=settings.chunks, index=settings.index)
        _show(plan, as_json, "would build")
        return
    problems = ReadProblems()
    with progress_bar("reading") as update:
        # Counting costs a percent of embedding, and gives the bar a time left.
        streamed = is_hub(settings.corpus)
        plan = {} if streamed else pipeline.plan_index(settings.corpus, chunks=settings.chunks)
        info = pipeline.build_index(
            settings.corpus,
            out,
            chunks=settings.chunks,
            embedding=settings.embedding,
            index=settings.index,
            progress=pipeline.build_progress(update, plan.get("num_passages")),
            problems=problems,
        )
    _tell(problems)
    _show_info(info, as_json, out)


@app.command()
@guarded
def info(folder: Folder, as_json: Json = False) -> None:
    """What an index holds and how it was made.

    Example: ttt-adapt index info my-index
    """
    from ttt_adapt.indexes import Index

    _show_info(Index.open(folder).info, as_json, folder)


@app.command()
@guarded
def search(
    folder: Folder,
    query: Annotated[str | None, typer.Argument(help="A text; standard input if left out.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the query here.")] = None,
    num: Annotated[int, typer.Option("--num", "-n", help="How many passages.")] = 5,
    max_overlap: Annotated[float, typer.Option(help="Leave out nearer duplicates.")] = 1.0,
    as_json: Json = False,
) -> None:
    """The passages nearest to a text.

    Example: ttt-adapt index search my-index "how to parse a date"
    """
    from ttt_adapt import pipeline
    from ttt_adapt.config import ExperimentSettings, override

    settings = override(
        ExperimentSettings(),
        {
            "retrieval.num_candidates": num,
            "retrieval.max_overlap": max_overlap,
            "selection.method": "nearest",
            "selection.num_select": num,
        },
    )
    picked = pipeline.select(
        read_input(query, file),
        folder,
        selection=settings.selection,
        retrieval=settings.retrieval,
    )
    if as_json:
        print_json({"passages": picked.sources()})
        return
    rows = [
        [source.passage_id, f"{source.score:.3f}", _snippet(source.text)]
        for source in picked.sources()
    ]
    print_table("nearest passages", ["passage", "similarity", "text"], rows)


@app.command()
@guarded
def verify(
    folder: Folder,
    recall: Annotated[bool, typer.Option("--recall", help="Measure recall@50 too.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the recall queries.")] = 0,
    as_json: Json = False,
) -> None:
    """Check every file of an index against its hashes; exits with 2 when it is damaged.

    Example: ttt-adapt index verify my-index --recall
    """
    from ttt_adapt.errors import IndexFormatError
    from ttt_adapt.indexes import Index, measure_recall, verify_index

    problems = verify_index(folder)
    result: dict[str, Any] = {"sound": not problems, "problems": problems}
    if recall and not problems:
        result["recall"] = measure_recall(Index.open(folder), seed=seed)
    if as_json:
        print_json(result)
    if problems:
        raise IndexFormatError(f"{folder} is damaged: {'; '.join(problems)}; build it again")
    if not as_json:
        _show({"sound": "yes", **jsonable(result.get("recall", {}))}, False, str(folder))


@app.command()
@guarded
def add(
    folder: Folder,
    corpus: Annotated[str, typer.Argument(help="As for `index build`.")],
    format: Format = None,
    text_column: TextColumn = None,
    on_error: OnError = None,
    id_prefix: IdPrefix = None,
    assignments: CorpusAssignments = None,
    as_json: Json = False,
) -> None:
    """Add a corpus' documents to an index; documents it already holds are skipped.

    Example: ttt-adapt index add my-index more.jsonl
    """
    from ttt_adapt import pipeline
    from ttt_adapt.corpus import ReadProblems
    from ttt_adapt.errors import SettingsError

    for assignment in assignments or ():
        if not assignment.startswith("corpus."):
            raise SettingsError(
                f"--set {assignment}: expected a setting of corpus; how passages are cut and "
                "embedded the index has settled"
            )
    settings = experiment(
        None,
        None,
        assignments,
        corpus__path=corpus,
        corpus__format=format,
        corpus__text_column=text_column,
        corpus__on_error=on_error,
        corpus__id_prefix=id_prefix,
    ).corpus
    assert settings is not None
    problems = ReadProblems()
    with progress_bar("reading") as update:
        info = pipeline.add_documents(
            settings, folder, progress=pipeline.build_progress(update), problems=problems
        )
    _tell(problems)
    _show_info(info, as_json, folder)


def _embedding_options(embedder: str | None) -> dict[str, Any]:
    if embedder is None:
        return {}
    kind, _, model = embedder.partition(":")
    if kind == "hashing":
        return {"embedding__kind": "hashing"}
    if kind == "causal-lm":
        return {"embedding__kind": "causal-lm", "embedding__model": model}
    return {"embedding__model": embedder}


def _tell(problems: "ReadProblems") -> None:
    if problems.num_skipped or problems.num_empty:
        say(problems.summary())
        for problem in problems.problems[:20]:
            say(f"  {problem.location}: {problem.reason}")


def _snippet(text: str, length: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"


def _show(values: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        print_json(values)
    else:
        print_facts(title, {key.replace("_", " "): _plain(item) for key, item in values.items()})


def _show_info(info: "IndexInfo", as_json: bool, folder: Path) -> None:
    if as_json:
        print_json(info)
        return
    chunks, corpus = info.origin["chunks"], info.origin["corpus"]
    facts = {
        "passages": f"{info.num_passages:,} of {info.num_documents:,} documents",
        "on disk": f"{info.num_bytes / 1e6:,.1f} MB, {info.dimension} dimensions",
        "index": info.explanation,
        "embedder": f"{info.embedder_description} ({info.embedder_fingerprint[:12]})",
        "corpus": f"{corpus['path']}, cut at {chunks['size']} {chunks['unit']}",
        "seconds": ", ".join(f"{stage} {s:.1f}" for stage, s in info.seconds.items() if s >= 0.05),
        "continued": f"{info.num_resumed:,} passages were there" if info.num_resumed else "",
        "left out": _count(info.num_skipped_documents, "documents' ids were there already"),
        "note": " ".join(info.notes),
    }
    print_facts(str(folder), facts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number else ""


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
