"""Reading thousands of passages: what it costs a model of TTT layers and a transformer, and what it gives.

    OMP_NUM_THREADS=1 python benchmarks/reading.py [--passages 2000] [--quick] [--json] [--write]

Text: Python sources of the running interpreter's standard library, in passages of 1200 bytes, in an order
drawn once; whole modules are held out and predicted from what was read. One process, one thread by
default.

The TTT model reads through ``ttt_adapt.adaptation.Reading`` as the adapter `fast-weights` does, with its
half-life and without one. The transformer reads the same passages, in float32, with its cache of keys and
values, one at a time, for as many passages as ``--transformer-passages`` says: its cost per token and
its memory grow. It has not been trained on texts as long, so only its costs are shown, and how they
grow: its level is not to be compared.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ttt_adapt.adaptation import Reading
from ttt_adapt.adaptation.fast_weights import BLOCK_TOKENS
from ttt_adapt.config import AdaptationSettings, ChunkSettings, ModelSettings
from ttt_adapt.corpus import chunk_documents
from ttt_adapt.errors import UserError
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import LanguageModel, beginning_token, load_language_model
from ttt_adapt.runtime import set_num_threads, versions
from ttt_adapt.storage import atomic_write, write_json
from ttt_adapt.testing import library_documents

RESULTS = Path(__file__).parent / "results"
HELD_OUT_BYTES = 1500


def library(num_passages: int, num_held_out: int) -> tuple[list[str], list[str]]:
    """Passages to read, and beginnings of modules none of whose text is among them."""
    documents = [d for d in library_documents() if len(d.text) > HELD_OUT_BYTES]
    order = np.random.default_rng(0).permutation(len(documents))
    held_out = [documents[i].text[:HELD_OUT_BYTES] for i in order[:num_held_out]]
    rest = (documents[i] for i in order[num_held_out:])
    passages = [passage.text for passage in chunk_documents(rest, ChunkSettings(size=1200))]
    chosen = np.random.default_rng(1).permutation(len(passages))[:num_passages]
    return [passages[i] for i in chosen], held_out


def marks_up_to(last: int) -> list[int]:
    """1, 10, 100 … and the last."""
    return sorted({10**k for k in range(9) if 10**k < last} | {last})


def read_by_ttt(
    lm: LanguageModel, passages: list[str], held_out: list[str], half_life: int
) -> list[dict[str, Any]]:
    """A row for each mark: cost of the stretch that ends there, size of the state, bits per byte."""
    reading = Reading.by(lm, AdaptationSettings(half_life=half_life))
    rows = [{"passages": 0, "tokens": 0, "bits_per_byte": predicted(lm, lm.model, held_out)}]
    begin = 0
    for mark in marks_up_to(len(passages)):
        tokens, elapsed_s = reading.num_tokens, reading.elapsed_s
        reading.read(passages[begin:mark])
        if reading.stopped:
            say(f"stopped after {reading.num_passages} passages: {reading.stopped}")
            break
        spent = reading.elapsed_s - elapsed_s
        rows.append(
            {
                "passages": mark,
                "tokens": reading.num_tokens,
                "us_per_token": spent / (reading.num_tokens - tokens) * 1e6,
                "state_mb": reading.state.num_bytes() / 1e6,
                "bits_per_byte": predicted(lm, reading.model, held_out),
            }
        )
        say(f"  {mark} passages")
        begin = mark
    return rows


def predicted(lm: LanguageModel, model: Any, texts: list[str]) -> float:
    """Bits per byte of the held-out texts, each from the same state."""
    with torch.no_grad():
        return bits_per_byte(model, lm.tokenizer, texts, max_length=lm.max_length).value


@torch.no_grad()
def read_by_transformer(lm: LanguageModel, passages: list[str]) -> list[dict[str, Any]]:
    """The same costs for a transformer and its cache."""
    rows: list[dict[str, Any]] = []
    cache, begin, num_tokens = None, 0, 0
    for mark in marks_up_to(len(passages)):
        before, started = num_tokens, time.perf_counter()
        for text in passages[begin:mark]:
            ids = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for block in blocks([beginning_token(lm.tokenizer), *ids]):
                cache = lm.model(
                    input_ids=block, past_key_values=cache, use_cache=True, logits_to_keep=1
                ).past_key_values
                num_tokens += block.shape[1]
        spent = time.perf_counter() - started
        assert cache is not None
        size = sum(
            tensor.numel() * tensor.element_size()
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        )
        rows.append(
            {
                "passages": mark,
                "tokens": num_tokens,
                "us_per_token": spent / (num_tokens - before) * 1e6,
                "state_mb": size / 1e6,
            }
        )
        say(f"  {mark} passages")
        begin = mark
    return rows


def blocks(ids: list[int]) -> Iterator[torch.Tensor]:
    for first in range(0, len(ids), BLOCK_TOKENS):
        yield torch.tensor([ids[first : first + BLOCK_TOKENS]])


def as_markdown(report: dict[str, Any]) -> str:
    """The table, for people."""
    lines = [
        f"# Reading passages of the standard library: {report['threads']} thread(s)",
        "",
        (
            "Microseconds per token are of the stretch since the row above. The state is what is "
            f"kept to go on from. Bits per byte: the first {HELD_OUT_BYTES:,} bytes of "
            f"{report['num_held_out']} modules that were not read."
        ),
        "",
        "| model | passages | tokens | µs per token | state, MB | bits per byte |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in report["models"].items():
        for row in rows:
            spent, size = row.get("us_per_token"), row.get("state_mb")
            cells = [
                f"{row['passages']:,}",
                f"{row['tokens']:,}",
                "–" if spent is None else f"{spent:.0f}",
                "–" if size is None else f"{size:.2f}",
                f"{row['bits_per_byte']:.4f}" if "bits_per_byte" in row else "–",
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    """A line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Read, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="ttt-linear-7m", help="of TTT layers")
    parser.add_argument("--transformer", default="llama-7m", help="for its costs, or none")
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--transformer-passages", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=16, help="modules to predict")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="100 passages, 20 by the transformer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="write both to benchmarks/results")
    options = parser.parse_args()
    if options.quick:
        options.passages, options.transformer_passages = 100, 20
    if min(options.passages, options.transformer_passages, options.held_out) < 1:
        parser.error("expected at least one passage and one held-out module")
    set_num_threads(options.threads)
    passages, held_out = library(options.passages, options.held_out)
    models: dict[str, list[dict[str, Any]]] = {}
    try:
        say(options.model)
        lm = load_language_model(ModelSettings(name=options.model, device="cpu"))
        for half_life in (AdaptationSettings().half_life, 0):
            name = f"half-life {half_life:,}" if half_life else "no forgetting"
            say(f"  {name}")
            arm = f"{options.model}, {name}"
            models[arm] = read_by_ttt(lm, passages, held_out, half_life)
        if options.transformer != "none":
            say(options.transformer)
            lm = load_language_model(ModelSettings(name=options.transformer, device="cpu"))
            few = passages[: options.transformer_passages]
            models[options.transformer] = read_by_transformer(lm, few)
    except UserError as error:
        parser.error(str(error))
    report = {
        "threads": options.threads,
        "num_held_out": len(held_out),
        "models": models,
        "versions": versions(),
    }
    table = as_markdown(report)
    print(json.dumps(report, indent=1) if options.json else table)
    if options.write:
        write_json(RESULTS / "reading.json", report)
        with atomic_write(RESULTS / "reading.md", "w") as stream:
            stream.write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
