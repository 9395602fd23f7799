"""Tables that more than one command prints."""

from collections.abc import Sequence
from pathlib import Path

from ttt_adapt.cli.console import print_table, say


def print_comparison(out: Path, names: Sequence[str]) -> None:
    """Arms by steps in bits per byte, and the last step against the base with its interval."""
    from ttt_adapt.evaluation import compare, read_results

    runs = {name: read_results(out / name / "results.jsonl") for name in names}
    baseline = "base" if "base" in runs else names[0]
    found = compare(runs, baseline=baseline)
    steps = sorted({row.step for row in found.rows})
    table = []
    for name in names:
        rows = {row.step: row for row in found.rows if row.run == name}
        last = rows[max(rows)]
        line = [name]
        line += [f"{rows[step].bits_per_byte:.4f}" if step in rows else "" for step in steps]
        versus = last.against_base
        if versus is not None:
            line += [
                f"{100 * versus.ratio:.1f}%",
                f"{versus.low:+.4f} … {versus.high:+.4f}",
                f"{versus.wins}/{versus.losses}",
            ]
        table.append(line)
    columns = ["bits per byte after", *map(str, steps), "of base", "95% interval", "won/lost"]
    failed = sum(found.num_failed.values())
    note = f"; {failed} failed, see results.jsonl" if failed else ""
    print_table(f"{found.num_shared} texts{note}", columns, table)


def print_examples(out: Path, names: Sequence[str], num_sources: int = 5) -> None:
    """For the first text: what each learning arm learned from."""
    from ttt_adapt.evaluation import read_results

    for name in names:
        if name not in ("random", "nearest", "sift"):
            continue
        first = read_results(out / name / "results.jsonl")[0]
        rows = [
            [source.passage_id, f"{source.score:.3f}", f"{source.gain:.4f}"]
            for source in first.sources[:num_sources]
        ]
        title = f"{first.query_id.split('@')[0]}: {name} learned from, among others"
        print_table(title, ["passage", "similarity", "gain"], rows)
    say("")
