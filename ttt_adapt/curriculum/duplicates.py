"""Near-duplicates within a corpus: of tasks that ask the same, the first stays.

Two tasks are duplicates when one's words are covered by the other's (as sets, either way) to a given
share, and their answers are equal. Tasks with tests have no answer to tell them apart, so the share
is higher and their tests do not count.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ttt_adapt.corpus.contamination import words
from ttt_adapt.curriculum.settings import DecontaminationSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.curriculum.verifiers.extraction import normalized


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A task that was left out: ``coverage`` of the words of the shorter of the two are in both."""

    task_id: str
    source: str
    kept_id: str
    kept_source: str
    coverage: float


@dataclass(frozen=True, slots=True)
class Deduplication:
    """What became of a corpus: tasks that stay, in order, and the others."""

    kept: tuple[Task, ...]
    left_out: tuple[Duplicate, ...]
    settings: DecontaminationSettings


def deduplicate(
    tasks: Iterable[Task], settings: DecontaminationSettings | None = None
) -> Deduplication:
    """Keep the first of tasks that ask the same.

    Exact, without comparing every pair: within a group of equal answers, only tasks that share
    words are compared, and of a task's words only the rarest, of which a duplicate must have one.
    """
    settings = settings or DecontaminationSettings()
    groups: dict[str, _Group] = {}
    kept: list[Task] = []
    left_out: list[Duplicate] = []
    listed = list(tasks)
    frequency = Counter(word for task in listed for word in set(words(task.problem)))
    for task in listed:
        is_code = task.tests is not None
        least = settings.code_duplicate_coverage if is_code else settings.duplicate_coverage
        answer = f"{task.kind}\n{normalized(task.answer or '')}"
        group = groups.setdefault(answer, _Group(least, frequency))
        found = group.find(task)
        if found is None:
            kept.append(task)
            group.add(task)
        else:
            other, coverage = found
            left_out.append(Duplicate(task.id, task.source, other.id, other.source, coverage))
    return Deduplication(tuple(kept), tuple(left_out), settings)


class _Group:
    """Kept tasks with one answer, by their words.

    Of two sets of which ``least`` of the smaller, of size m, lie in the larger, at least
    ceil(least · m) words are shared; so the two share one of the smaller's m − ceil(least · m) + 1
    rarest. The larger is looked up by all its words, the smaller by those rarest: either may come
    first, so both are kept.
    """

    def __init__(self, least: float, frequency: Counter[str]) -> None:
        self._least = least
        self._frequency = frequency
        self._tasks: list[tuple[Task, frozenset[str]]] = []
        self._by_word: dict[str, list[int]] = defaultdict(list)
        self._by_rare_word: dict[str, list[int]] = defaultdict(list)
        self._wordless: Task | None = None

    def find(self, task: Task) -> tuple[Task, float] | None:
        """The first kept task that this one repeats, and the share of words."""
        own = frozenset(words(task.problem))
        if not own:
            return (self._wordless, 1.0) if self._wordless is not None else None
        near: set[int] = set()
        for word in self._rarest(own):
            near.update(self._by_word.get(word, ()))
        for word in own:
            near.update(self._by_rare_word.get(word, ()))
        for position in sorted(near):
            other, theirs = self._tasks[position]
            coverage = len(own & theirs) / min(len(own), len(theirs))
            if coverage >= self._least:
                return other, coverage
        return None

    def add(self, task: Task) -> None:
        own = frozenset(words(task.problem))
        if not own:
            self._wordless = self._wordless or task
            return
        position = len(self._tasks)
        self._tasks.append((task, own))
        for word in own:
            self._by_word[word].append(position)
        for word in self._rarest(own):
            self._by_rare_word[word].append(position)

    def _rarest(self, own: frozenset[str]) -> list[str]:
        count = len(own) - math.ceil(self._least * len(own) - 1e-9) + 1
        return sorted(own, key=lambda word: (self._frequency[word], word))[: max(1, count)]
