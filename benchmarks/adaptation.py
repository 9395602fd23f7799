"""Queries per minute of ttt-adapt against the loops people write by hand.

    python benchmarks/adaptation.py [--repeats 4] [--json] [--write]

Every arm learns the same 20 passages of 200 to 500 tokens with AdamW, one step each, in the same
precision. The first turn is in float32 and untimed: all arms must arrive at the same loss on the
same held-out text, to 1e-4. The timed turns are as people run it, under bfloat16 autocast where the
processor has it; there ours rounds at other places, and the difference is printed. Arms take turns,
so that whatever else the machine does hits all alike; ratios are medians over the turns. Ours and
theirs live in a process each, for ours changes how its process allocates memory; so do our inputs
as long as they come, which shows what whole multiples of 64 tokens do to time and to memory.

    full          an Adapter's episode
    as they come  the same, inputs not lengthened
    deepcopy      copy.deepcopy(model), torch.optim.AdamW, model(input_ids, labels).loss.backward()
    state dict    the same on the model itself, load_state_dict of a saved copy afterwards
    lora          an Adapter's episode
    peft          get_peft_model, torch.optim.AdamW, the same loop, unload
"""

import argparse
import copy
import json
import multiprocessing
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.adaptation import create_adapter, learning
from ttt_adapt.adaptation.chunks import Curriculum, make_curriculum
from ttt_adapt.adaptation.learning import chunk_loss
from ttt_adapt.config import AdaptationSettings, ModelSettings
from ttt_adapt.models import (
    LanguageModel,
    bundled_models,
    load_language_model,
    wrap_language_model,
)
from ttt_adapt.runtime import has_native_bfloat16, versions
from ttt_adapt.storage import write_json
from ttt_adapt.testing import sample_text, tiny_tokenizer

NUM_STEPS = 20
SHORTEST, LONGEST = 200, 500
HELD_OUT_TOKENS = 350
RESULTS = Path(__file__).parent / "results" / "adaptation.json"
FULL = AdaptationSettings(method="full", optimizer="adamw", learning_rate=5e-5)
LORA = AdaptationSettings(method="lora", optimizer="adamw", learning_rate=2e-4)
SEED = 0
OURS = ("full", "lora")
UNEVEN = ("as they come",)
THEIRS = ("deepcopy", "state dict", "peft")


class Stopwatch:
    """Wall and processor seconds of the parts it is held over."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu


class Bench:
    """One model, its adapters, and the texts of each turn."""

    def __init__(self, *, adapters: bool) -> None:
        self.lm = load_bench_model()
        self.is_exact = False
        self.autocast = has_native_bfloat16(str(self.lm.model.device))
        if adapters:
            exact = {"precision": "float32"}
            self.full = create_adapter(self.lm, FULL)
            self.lora = create_adapter(self.lm, LORA)
            self.exact_full = create_adapter(self.lm, FULL.model_copy(update=exact))
            self.exact_lora = create_adapter(self.lm, LORA.model_copy(update=exact))
        self.saved = copy.deepcopy(self.lm.model.state_dict())

    def texts(self, turn: int) -> tuple[list[str], Sequence[torch.Tensor]]:
        """The passages of a turn, and held-out tokens to compare the arms' final losses on."""
        lengths = random.Random(turn)
        found = [
            self._passage(turn * 100 + i, lengths.randint(SHORTEST, LONGEST))
            for i in range(NUM_STEPS)
        ]
        held_out = make_curriculum(
            self.lm.tokenizer,
            [self._passage(turn * 100 + 90 + i, HELD_OUT_TOKENS) for i in range(4)],
            max_length=HELD_OUT_TOKENS,
            epochs=1,
            most=4,
        )
        return found, held_out.chunks

    def _passage(self, seed: int, num_tokens: int) -> str:
        text = sample_text(seed, num_words=2 * num_tokens)
        encoded = self.lm.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return text[: encoded["offset_mapping"][num_tokens - 1][1]]

    def curriculum(self, texts: list[str]) -> Curriculum:
        return make_curriculum(
            self.lm.tokenizer, texts, max_length=self.lm.max_length, epochs=1, most=NUM_STEPS
        )

    def train(self, model: Any, texts: list[str], rate: float) -> None:
        """The loop people write."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        for chunk in self.curriculum(texts).chunks:
            optimizer.zero_grad()
            autocast = self.autocast and not self.is_exact
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=chunk[None], labels=chunk[None]).loss
            loss.backward()
            optimizer.step()

    def final_loss(self, model: Any, held_out: Sequence[torch.Tensor]) -> float:
        with torch.no_grad():
            losses = [float(chunk_loss(model, chunk, autocast=False)) for chunk in held_out]
        return statistics.fmean(losses)

    def run_adapter(self, adapter: Any, turn: int) -> tuple[Stopwatch, float]:
        texts, held_out = self.texts(turn)
        watch = Stopwatch()
        with watch.running():
            episode = adapter.episode([texts], steps=(NUM_STEPS,), seed=SEED)
            episode.__enter__()
            points = episode.points()
            point = next(points)
        loss = self.final_loss(point.model, held_out)
        with watch.running():
            assert next(points, None) is None
            episode.__exit__(None, None, None)
        return watch, loss

    def run_full(self, turn: int) -> tuple[Stopwatch, float]:
        return self.run_adapter(self.exact_full if self.is_exact else self.full, turn)

    def run_lora(self, turn: int) -> tuple[Stopwatch, float]:
        return self.run_adapter(self.exact_lora if self.is_exact else self.lora, turn)

    def run_deepcopy(self, turn: int) -> tuple[Stopwatch, float]:
        texts, held_out = self.texts(turn)
        watch = Stopwatch()
        with watch.running():
            model = copy.deepcopy(self.lm.model)
            self.train(model, texts, FULL.learning_rate)
        return watch, self.final_loss(model, held_out)

    def run_state_dict(self, turn: int) -> tuple[Stopwatch, float]:
        texts, held_out = self.texts(turn)
        model, watch = self.lm.model, Stopwatch()
        with watch.running():
            self.train(model, texts, FULL.learning_rate)
        loss = self.final_loss(model, held_out)
        with watch.running():
            model.load_state_dict(self.saved)
        model.zero_grad(set_to_none=True)
        return watch, loss

    def run_peft(self, turn: int) -> tuple[Stopwatch, float]:
        import peft

        texts, held_out = self.texts(turn)
        model, watch = self.lm.model, Stopwatch()
        config = peft.LoraConfig(
            r=LORA.lora_rank,
            lora_alpha=int(LORA.lora_alpha),
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with watch.running(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(model, config).eval()
        self._same_start(wrapped)
        with watch.running():
            self.train(wrapped, texts, LORA.learning_rate)
        loss = self.final_loss(wrapped, held_out)
        with watch.running():
            wrapped.unload()
        model.requires_grad_(True)
        return watch, loss

    def _same_start(self, wrapped: Any) -> None:
        """PEFT draws A from torch's global generator; give it the A that ours starts from."""
        generator = torch.Generator().manual_seed(SEED)
        for name, parameter in wrapped.named_parameters():
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(parameter, a=5**0.5, generator=generator)


def load_bench_model() -> LanguageModel:
    """The bundled model, or one of its shape with random weights."""
    if "llama-7m" in bundled_models():
        return load_language_model(ModelSettings(name="llama-7m", device="cpu"))
    import transformers

    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return wrap_language_model(
        transformers.LlamaForCausalLM(config), tiny_tokenizer(), name="llama-7m-random"
    )


def measure(num_repeats: int) -> dict[str, Any]:
    """Run every arm once in float32 and ``num_repeats`` times in turn."""
    groups = (OURS, UNEVEN, THEIRS)
    names = [name for group in groups for name in group]
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    context = multiprocessing.get_context("spawn")
    workers = [_Worker(context.Pipe(), group, context.Process) for group in groups]
    worker_of = {
        name: worker for worker, group in zip(workers, groups, strict=True) for name in group
    }
    facts, *_ = [worker.ask("facts", 0) for worker in workers]
    for turn in range(num_repeats + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            wall_s, cpu_s, loss = worker_of[name].ask(name, turn)
            losses[name].append(loss)
            if turn:
                wall[name].append(wall_s)
                cpu[name].append(cpu_s)
    peaks = [worker.ask("stop", 0) for worker in workers]
    pairs = [
        ("full", "as they come"),
        ("full", "deepcopy"),
        ("full", "state dict"),
        ("lora", "peft"),
    ]
    return {
        **facts,
        "num_steps": NUM_STEPS,
        "num_tokens": [SHORTEST, LONGEST],
        "num_repeats": num_repeats,
        "queries_per_minute": {n: round(60 / statistics.median(wall[n]), 2) for n in names},
        "cpu_s_per_query": {n: round(statistics.median(cpu[n]), 3) for n in names},
        "peak_rss_mb": {", ".join(group): peak for group, peak in zip(groups, peaks, strict=True)},
        "final_loss_nats": {n: losses[n][-1] for n in names},
        "comparisons": [
            {
                "ours": ours,
                "theirs": theirs,
                "wall_ratio": round(_median_ratio(wall[theirs], wall[ours]), 3),
                "cpu_ratio": round(_median_ratio(cpu[theirs], cpu[ours]), 3),
                "float32_loss_difference": abs(losses[ours][0] - losses[theirs][0]),
                "timed_loss_difference": max(
                    abs(a - b) for a, b in zip(losses[ours][1:], losses[theirs][1:], strict=True)
                ),
            }
            for ours, theirs in pairs
        ],
        "versions": versions(),
    }


class _Worker:
    """A process of its own: theirs must not profit from the allocator that ours asks for."""

    def __init__(self, pipe: Any, names: Sequence[str], process: Any) -> None:
        self._pipe, remote = pipe
        self._process = process(target=_serve, args=(remote, names), daemon=True)
        self._process.start()

    def ask(self, name: str, turn: int) -> Any:
        self._pipe.send((name, turn))
        return self._pipe.recv()


def _serve(pipe: Any, names: Sequence[str]) -> None:
    bench = Bench(adapters=names != THEIRS)
    if names == UNEVEN:
        learning.LENGTHS = 1
    arms: dict[str, Callable[[int], tuple[Stopwatch, float]]] = {
        "full": bench.run_full,
        "as they come": bench.run_full,
        "deepcopy": bench.run_deepcopy,
        "state dict": bench.run_state_dict,
        "lora": bench.run_lora,
        "peft": bench.run_peft,
    }
    while True:
        name, turn = pipe.recv()
        if name == "stop":
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
            return
        if name == "facts":
            pipe.send(
                {
                    "model": bench.lm.name,
                    "autocast": "bfloat16" if bench.autocast else "none",
                    "num_threads": torch.get_num_threads(),
                }
            )
            continue
        bench.is_exact = turn == 0
        watch, loss = arms[name](turn)
        pipe.send((watch.wall_s, watch.cpu_s, loss))


def _median_ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    result = measure(arguments.repeats)
    if arguments.write:
        write_json(RESULTS, result)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{result['model']}, {NUM_STEPS} steps of {SHORTEST} to {LONGEST} tokens, autocast "
            f"{result['autocast']}, {result['num_threads']} thread(s)"
        )
        for name, rate in result["queries_per_minute"].items():
            seconds = result["cpu_s_per_query"][name]
            print(f"  {name:<12} {rate:7.2f} queries/min   {seconds:6.3f} CPU s/query")
        for group, peak in result["peak_rss_mb"].items():
            print(f"  peak memory of the process for {group}: {peak} MB")
        for row in result["comparisons"]:
            print(
                f"  {row['ours']} against {row['theirs']}: {row['wall_ratio']:.2f}x (wall), "
                f"{row['cpu_ratio']:.2f}x (CPU); final losses differ by "
                f"{row['float32_loss_difference']:.1e} in float32, at most "
                f"{row['timed_loss_difference']:.1e} as timed"
            )
    worst = max(row["float32_loss_difference"] for row in result["comparisons"])
    if worst > 1e-4:
        raise SystemExit(f"float32 losses differ by {worst:.1e}, expected at most 1e-4")


if __name__ == "__main__":
    main()
