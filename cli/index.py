"""`ttt-adapt index`: build, info, search, verify, add."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttt_adapt.cli.console import (
    Assignments,
    DryRun,
    Json,
    guarded,
    jsonable,
    parse_assignments,
    print_json,
    print_table,
    progress_bar,
    read_input,
    say,
)

if TYPE_CHECKING:
    from ttt_adapt.corpus import ReadProblems

app = typer.Typer(no_args_is_help=True, help="Build and inspect indexes over a corpus.")

Folder = Annotated[Path, typer.Argument(help="The index's folder.", metavar="INDEX")]
Corpus = Annotated[
    str,
    typer.Argument(
        help="A .jsonl[.zst|.gz], text or Parquet/Arrow file, a folder, or hub:owner/name."
    ),
]
Format = Annotated[
    str, typer.Option("--format", help="auto, jsonl, text, tree, parquet, arrow or hub.")
]
TextColumn = Annotated[str, typer.Option("--text-column", help="Column that holds the text.")]
OnError = Annotated[str, typer.Option("--on-error", help="Malformed records: fail or skip.")]
Include = Annotated[
    list[str] | None, typer.Option("--include", help="Pattern of files to read in a tree.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", help="Pattern of files to leave out in a tree.")
]


@app.command()
@guarded
def build(
    corpus: Corpus,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    format: Format = "auto",
    text_column: TextColumn = "text",
    split: Annotated[str, typer.Option(help="Split of a hub data set.")] = "train",
    include: Include = None,
    exclude: Exclude = None,
    max_documents: Annotated[int | None, typer.Option(help="Read at most so many.")] = None,
    on_error: OnError = "fail",
    embedder: Annotated[
        str, typer.Option(help="A sentence-transformers model, causal-lm:MODEL, or hashing.")
    ] = "all-MiniLM-L6-v2",
    factory: Annotated[str, typer.Option(help="FAISS factory string, or auto.")] = "auto",
    memory_budget_mb: Annotated[int, typer.Option(help="For --factory auto.")] = 4096,
    chunk_size: Annotated[int, typer.Option(help="Bytes (or tokens) a passage.")] = 1200,
    chunk_unit: Annotated[str, typer.Option(help="bytes or tokens.")] = "bytes",
    chunk_overlap: Annotated[int, typer.Option(help="Shared by neighbouring passages.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of FAISS training.")] = 0,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Read, cut, embed and index a corpus. Interrupted, the same command continues.

    Example: ttt-adapt index build corpus.jsonl.zst -o my-index
    """
    from ttt_adapt import pipeline
    from ttt_adapt.config import ExperimentSettings, override
    from ttt_adapt.corpus import ReadProblems

    kind, _, model = embedder.partition(":")
    named = {"hashing": {"kind": "hashing"}, "causal-lm": {"kind": "causal-lm", "model": model}}
    settings = override(
        ExperimentSettings(),
        {
            "corpus": _corpus_values(
                corpus, format, text_column, on_error, include, exclude, split, max_documents
            ),
            "chunks": {"unit": chunk_unit, "size": chunk_size, "overlap": chunk_overlap},
            "embedding": named.get(kind, {"model": embedder}),
            "index": {"factory": factory, "memory_budget_mb": memory_budget_mb, "seed": seed},
            **parse_assignments(assignments),
        },
    )
    assert settings.corpus is not None
    if dry_run:
        plan = pipeline.plan_index(settings.corpus, chunks=settings.chunks, index=settings.index)
        _show(plan, as_json, "would build")
        return
    problems = ReadProblems()
    with progress_bar("reading") as update:
        # Counting costs a percent of embedding, and gives the bar a time left.
        streamed = settings.corpus.format == "hub" or corpus.startswith("hub:")
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
    _show(_info(info), as_json, str(out))


@app.command()
@guarded
def info(folder: Folder, as_json: Json = False) -> None:
    """What an index holds and how it was made.

    Example: ttt-adapt index info my-index
    """
    from ttt_adapt.indexes import Index

    _show(_info(Index.open(folder).info), as_json, str(folder))


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
        [source.source or source.passage_id, f"{source.score:.3f}", _snippet(source.text)]
        for source in picked.sources()
    ]
    print_table("nearest passages", ["source", "similarity", "text"], rows)


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
    corpus: Corpus,
    format: Format = "auto",
    text_column: TextColumn = "text",
    on_error: OnError = "fail",
    as_json: Json = False,
) -> None:
    """Add a corpus' documents to an index; documents it already holds are skipped.

    Example: ttt-adapt index add my-index more.jsonl
    """
    from ttt_adapt import pipeline
    from ttt_adapt.config import CorpusSettings, make_settings
    from ttt_adapt.corpus import ReadProblems

    values = _corpus_values(corpus, format, text_column, on_error, None, None, "train", None)
    settings: CorpusSettings = make_settings(CorpusSettings, values, where=corpus)
    problems = ReadProblems()
    with progress_bar("embedding passages") as update:
        info = pipeline.add_documents(
            settings, folder, progress=pipeline.build_progress(update), problems=problems
        )
    _tell(problems)
    _show(_info(info), as_json, str(folder))


def _corpus_values(
    path: str,
    format: str,
    text_column: str,
    on_error: str,
    include: list[str] | None,
    exclude: list[str] | None,
    split: str,
    max_documents: int | None,
) -> dict[str, Any]:
    return {
        "path": path,
        "format": format,
        "text_column": text_column,
        "on_error": on_error,
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "split": split,
        "max_documents": max_documents,
    }


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
        return
    rows = []
    for key, value in values.items():
        if isinstance(value, float):
            rows.append([key, f"{value:.4g}"])
        elif isinstance(value, dict):
            rows += [[f"{key}.{inner}", str(item)] for inner, item in value.items()]
        else:
            rows.append([key, f"{value:,}" if isinstance(value, int) else str(value)])
    print_table(title, ["", ""], rows)


def _info(info: Any) -> dict[str, Any]:
    values: dict[str, Any] = jsonable(info)
    return values
