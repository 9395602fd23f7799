"""Settings of curricula: where tasks come from, what is left out, how answers are verified."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ttt_adapt.settings import Settings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
PositiveInt = Annotated[int, Field(ge=1)]


class SandboxSettings(Settings):
    """How programs that nobody has read are run. Owner: ``ttt_adapt.curriculum.sandbox``."""

    allow_weaker: bool = False
    """Run programs even where this machine gives them no namespaces: they can then read and write
    what your user can, and use the network."""
    cpu_s: Positive = 10.0
    """Processor seconds a run; beyond them it is ended."""
    wall_s: Positive = 30.0
    """Seconds a run, whatever the program waits for."""
    memory_mb: PositiveInt = 1024
    """Address space of each process of a run, and memory of all of them together."""
    output_mb: PositiveInt = 8
    """Standard output of a run; beyond it the run is ended."""
    file_mb: PositiveInt = 64
    """What a run can write to files, which are in memory and gone when it ends."""
    num_processes: PositiveInt = 64
    """Processes and threads of a run at once."""
    packages: tuple[str, ...] = ("numpy",)
    """Installed packages that programs may import besides the standard library."""

    @model_validator(mode="after")
    def _wall_leaves_time(self) -> Self:
        if self.wall_s < self.cpu_s:
            raise ValueError(f"wall_s ({self.wall_s:g}) must be at least cpu_s ({self.cpu_s:g})")
        return self


class VerifierSettings(Settings):
    """How completions are verified. Owner: ``ttt_adapt.curriculum.verifiers``."""

    final_answer: Literal["boxed", "marked", "any"] = "any"
    r"""Where a completion's final answer may stand: ``boxed``: only in ``\boxed{}``; ``marked``:
    also after "answer is", "Answer:" or "####"; ``any``: else the last number (mathematics) or the
    last line that is not empty (others)."""
    max_answer_characters: PositiveInt = 1000
    """A longer final answer is wrong: nobody writes one, and comparing it could take hours."""
    check_s: Positive = 10.0
    """Seconds for one comparison in the checking process, which is then killed."""
    check_memory_mb: PositiveInt = 4096
    """Address space of the checking process."""
    float_tolerance: Annotated[float, Field(ge=0.0, lt=1.0)] = 1e-6
    """Relative or absolute difference of numbers with a decimal point in outputs of programs."""
    code_reward: Literal["all", "fraction"] = "all"
    """``all``: 1 if every test passes, else 0. ``fraction``: the share of tests that pass."""
    max_tests: PositiveInt | None = None
    """Run at most so many tests of a program, the first ones."""
    time_factor: Positive = 5.0
    """A task's own time limit (meant for compiled languages and fast machines) times this, up to
    the sandbox's ``cpu_s``."""


class TaskSourceSettings(Settings):
    """Where tasks come from. Owner: ``ttt_adapt.curriculum.importers``."""

    path: str
    """A .jsonl[.zst|.gz], .json, .parquet or .arrow file, a folder of them, or ``hub:owner/name``."""
    importer: str = "auto"
    """The layout: an importer's name, ``tasks`` for files of this project, ``columns`` for any
    table by the columns named below; ``auto`` goes by the first record's columns."""
    name: str = ""
    """Beginning of the tasks' ids and their ``source``; empty: the path's own name."""
    licence: str = ""
    """Of all tasks; empty: what the importer knows or the records say."""
    split: str = "train"
    hub_config: str | None = None
    kind: Literal["math", "choice", "exact", "regex"] = "exact"
    """Of tasks by columns."""
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    choices_column: str | None = None
    """Holds a list of options; the answer is then one's letter, position (from 0) or text."""
    id_column: str | None = None
    prompt_template: str = "{prompt}"
    """What the model reads: ``{prompt}`` stands for the problem."""
    on_error: Literal["fail", "skip"] = "fail"
    max_tasks: PositiveInt | None = None

    @model_validator(mode="after")
    def _template_has_the_prompt(self) -> Self:
        if "{prompt}" not in self.prompt_template:
            raise ValueError("prompt_template: expected {prompt} in it")
        return self


class DecontaminationSettings(Settings):
    """What is left out of a corpus of tasks. Owner: ``ttt_adapt.curriculum.decontamination``."""

    ngram_size: PositiveInt = 13
    """Words in an n-gram. One that a task shares with a target leaves the task out."""
    min_shared_ngrams: PositiveInt = 1
    """Shared n-grams from which on a task is left out."""
    short_overlap: Fraction = 0.8
    """A task or target of fewer words than an n-gram: share of the shorter text's word 3-grams that
    the longer one holds, from which on the task is left out."""
    candidate_ngram_size: PositiveInt = 5
    """Tasks that share an n-gram of this size with a target are compared with it as a whole."""
    max_similarity: Fraction = 0.75
    """Share of the words of both texts that are in both, in order, from which on a task is left
    out (a paraphrase, other numbers in the same story); 1.0: only equal texts."""
    duplicate_coverage: Fraction = 0.9
    """Share of one text's words that the other holds, either way, from which on the later of two
    tasks with the same answer is left out."""
    code_duplicate_coverage: Fraction = 0.95
    """The same for tasks with tests, which have no answer to tell them apart."""
