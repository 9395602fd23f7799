"""Leaving out what the targets would give away: word n-grams in common, and near-paraphrases.

Three rules, each with its thresholds in the settings; the first that holds is the reason:

1. ``equal``: the same words.
2. ``ngram``: at least ``min_shared_ngrams`` word n-grams of ``ngram_size`` in common. Of a text
   shorter than that, its ``short_overlap`` share of 3-grams.
3. ``similar``: candidates share an n-gram of ``candidate_ngram_size``; the share of words that are in
   both in the same order (Ratcliff and Obershelp's, of :mod:`difflib`) reaches ``max_similarity``.

It fails closed: targets that cannot be read, or that have no words to compare, raise; nothing is
ever passed unchecked.
"""

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ttt_adapt.corpus.contamination import words
from ttt_adapt.curriculum.settings import DecontaminationSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import TaskError

SHORT_NGRAM = 3
MAX_CANDIDATES = 50
"""Targets that one task is compared with as a whole: those that share most n-grams with it."""

Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contaminated:
    """A task that was left out, and why.

    Attributes:
        target_id: the target it gives away.
        rule: ``equal``, ``ngram`` or ``similar``.
        amount: shared n-grams, or the share of words, that the rule found.
        evidence: words that both have.
    """

    task_id: str
    source: str
    target_id: str
    rule: str
    amount: float
    evidence: str


@dataclass(frozen=True, slots=True)
class Decontamination:
    """What became of a corpus.

    Attributes:
        kept: tasks that share nothing with the targets, in order.
        left_out: the others.
        settings: the thresholds.
        num_tasks: of the corpus.
        num_targets: that it was held against.
        by_source: tasks, and those left out, by the corpus' sources.
    """

    kept: tuple[Task, ...]
    left_out: tuple[Contaminated, ...]
    settings: DecontaminationSettings
    num_tasks: int
    num_targets: int
    by_source: dict[str, tuple[int, int]]


class TargetWords:
    """The targets' n-grams, to hold tasks against one by one.

    Args:
        targets: at least one.

    Raises:
        TaskError: there is none, or one has no words to compare.
    """

    def __init__(self, targets: Sequence[Task], settings: DecontaminationSettings) -> None:
        if not targets:
            raise TaskError(
                "decontamination: expected target tasks to hold the corpus against, found none"
            )
        self.settings = settings
        self._ids = [target.id for target in targets]
        self._words = [words(target.problem) for target in targets]
        for target, found in zip(targets, self._words, strict=True):
            if not found:
                raise TaskError(
                    f"decontamination: target {target.id!r:.80} has no words to compare, so nothing "
                    "can be said of what gives it away"
                )
        self._equal = {tuple(found): i for i, found in reversed(list(enumerate(self._words)))}
        self._long = _index(self._words, settings.ngram_size)
        self._candidate = _index(self._words, settings.candidate_ngram_size)
        self._short = _index(self._words, SHORT_NGRAM)

    @property
    def num_targets(self) -> int:
        return len(self._ids)

    def check(self, task: Task) -> Contaminated | None:
        """Why a task must be left out; ``None`` where nothing speaks against it."""
        own = words(task.problem)
        if not own:
            # Nothing to compare means nothing is known: it is not passed.
            return Contaminated(task.id, task.source, "", "equal", 1.0, "(no words to compare)")
        equal = self._equal.get(tuple(own))
        if equal is not None:
            return self._found(task, equal, "equal", 1.0, own)
        return self._shared(task, own) or self._overlap(task, own) or self._similar(task, own)

    def _shared(self, task: Task, own: list[str]) -> Contaminated | None:
        counts: Counter[int] = Counter()
        first: dict[int, Gram] = {}
        for gram in dict.fromkeys(_grams(own, self.settings.ngram_size)):
            for target in self._long.get(gram, ()):
                counts[target] += 1
                first.setdefault(target, gram)
        if not counts:
            return None
        target, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
        if count < self.settings.min_shared_ngrams:
            return None
        return self._found(task, target, "ngram", count, first[target])

    def _overlap(self, task: Task, own: list[str]) -> Contaminated | None:
        """Where one of the texts is too short for an n-gram: the share of its 3-grams."""
        size = self.settings.ngram_size
        grams = set(_grams(own, SHORT_NGRAM))
        counts: Counter[int] = Counter()
        for gram in grams:
            counts.update(self._short.get(gram, ()))
        for target, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            theirs = self._words[target]
            if min(len(own), len(theirs)) >= size:
                continue
            shorter = min(len(grams), len(set(_grams(theirs, SHORT_NGRAM))))
            if count / shorter >= self.settings.short_overlap:
                return self._found(
                    task, target, "ngram", count, own if len(own) <= len(theirs) else theirs
                )
        return None

    def _similar(self, task: Task, own: list[str]) -> Contaminated | None:
        least = self.settings.max_similarity
        if least >= 1.0:
            return None
        counts: Counter[int] = Counter()
        for gram in set(_grams(own, self.settings.candidate_ngram_size)):
            counts.update(self._candidate.get(gram, ()))
        near = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_CANDIDATES]
        matcher = difflib.SequenceMatcher(autojunk=False)
        # It keeps what it knows of its second text.
        matcher.set_seq2(own)
        for target, _ in near:
            matcher.set_seq1(self._words[target])
            if matcher.real_quick_ratio() < least or matcher.quick_ratio() < least:
                continue
            ratio = matcher.ratio()
            if ratio >= least:
                block = matcher.find_longest_match()
                return self._found(
                    task, target, "similar", ratio, own[block.b : block.b + block.size]
                )
        return None

    def _found(
        self, task: Task, target: int, rule: str, amount: float, evidence: Iterable[str]
    ) -> Contaminated:
        shown = " ".join(evidence)
        shown = shown if len(shown) <= 200 else shown[:199] + "…"
        return Contaminated(task.id, task.source, self._ids[target], rule, float(amount), shown)


def decontaminate(
    tasks: Iterable[Task],
    targets: Iterable[Task],
    settings: DecontaminationSettings | None = None,
) -> Decontamination:
    """Leave out the tasks that give targets away.

    Tasks are compared by their ``problem``: instructions and examples around it are everybody's.

    Args:
        tasks: the corpus, read once.
        targets: what must not be given away.

    Raises:
        TaskError: no targets, or one without words.
    """
    settings = settings or DecontaminationSettings()
    target_words = TargetWords(list(targets), settings)
    kept: list[Task] = []
    left_out: list[Contaminated] = []
    sources: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for task in tasks:
        found = target_words.check(task)
        sources[task.source][0] += 1
        if found is None:
            kept.append(task)
        else:
            left_out.append(found)
            sources[task.source][1] += 1
    return Decontamination(
        kept=tuple(kept),
        left_out=tuple(left_out),
        settings=settings,
        num_tasks=len(kept) + len(left_out),
        num_targets=target_words.num_targets,
        by_source={source: (counts[0], counts[1]) for source, counts in sorted(sources.items())},
    )


def _index(texts: Sequence[Sequence[str]], size: int) -> dict[Gram, list[int]]:
    index: dict[Gram, list[int]] = defaultdict(list)
    for position, text in enumerate(texts):
        for gram in dict.fromkeys(_grams(text, size)):
            index[gram].append(position)
    return dict(index)


def _grams(text: Sequence[str], size: int) -> "zip[Gram]":
    return zip(*(text[start:] for start in range(size)), strict=False)
