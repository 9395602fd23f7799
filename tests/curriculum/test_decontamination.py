"""What gives a target away, and what doesn't; duplicates against the slow way."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttt_adapt.corpus.contamination import words
from ttt_adapt.curriculum import (
    CodeTests,
    DecontaminationSettings,
    StdinTest,
    Task,
    decontaminate,
    deduplicate,
)
from ttt_adapt.curriculum.decontamination import TargetWords
from ttt_adapt.curriculum.decontamination_report import write_decontamination
from ttt_adapt.errors import TaskError

TARGET_TEXT = (
    "A robe takes two bolts of blue fiber and half that much white fiber. How many bolts in total "
    "does it take to make three of them for the choir?"
)
TARGET = Task("target", "math", TARGET_TEXT, "9")


def task(text: str, name: str = "t", answer: str = "1", source: str = "s") -> Task:
    return Task(name, "math", text, answer, source=source)


def rule(text: str, settings: DecontaminationSettings | None = None) -> str:
    found = decontaminate([task(text)], [TARGET], settings)
    assert len(found.kept) + len(found.left_out) == 1
    return found.left_out[0].rule if found.left_out else ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TARGET_TEXT, "equal"),
        (TARGET_TEXT.upper().replace(" ", "\n  "), "equal"),
        ("Solve this. " + TARGET_TEXT, "ngram"),
        (
            "He says half that much white fiber. How many bolts in total does it take to sew?",
            "ngram",
        ),
        (
            TARGET_TEXT.replace("blue", "red").replace("half", "twice").replace("it", "one"),
            "similar",
        ),
        ("A robe takes two bolts of blue fiber.", "ngram"),
        ("How many bolts of cloth does a tailor need for three coats of blue fiber?", ""),
        ("Weng earns twelve dollars an hour and worked for fifty minutes yesterday.", ""),
        ("?!", "equal"),
    ],
)
def test_rules(text: str, expected: str) -> None:
    assert rule(text) == expected


def test_thresholds_are_settings() -> None:
    shared = "He says half that much white fiber. How many bolts in total does it take to sew?"
    assert rule(shared, DecontaminationSettings(min_shared_ngrams=5)) == ""
    assert rule(shared, DecontaminationSettings(ngram_size=15)) == ""
    reworded = TARGET_TEXT.replace("blue", "red").replace("half", "twice").replace("it", "one")
    assert rule(reworded, DecontaminationSettings(max_similarity=0.99)) == ""
    assert rule(reworded, DecontaminationSettings(max_similarity=1.0)) == ""
    assert rule("A robe takes two bolts", DecontaminationSettings(short_overlap=1.0)) == "ngram"


def test_a_short_target_is_found_in_a_long_task() -> None:
    short = Task("short", "math", "What is 17 times 23 minus 4?", "387")
    text = "First think. What is 17 times 23 minus 4? Then write down the result in words, please."
    found = decontaminate([task(text)], [TARGET, short])
    assert (found.left_out[0].target_id, found.left_out[0].rule) == ("short", "ngram")


def test_instructions_around_a_problem_do_not_count() -> None:
    around = "Think step by step and put your final answer within a box at the very end. "
    target = Task("t", "math", around + "Add 2 and 3.", "5", meta={"problem": "Add 2 and 3."})
    other = Task("o", "math", around + "Name a prime.", "7", meta={"problem": "Name a prime."})
    assert decontaminate([other], [target]).kept == (other,)


def test_it_fails_closed() -> None:
    with pytest.raises(TaskError, match="expected target tasks .* found none"):
        decontaminate([task("x")], [])
    with pytest.raises(TaskError, match="target 'empty' has no words to compare"):
        decontaminate([task("x")], [TARGET, Task("empty", "math", "?!", "1")])

    def broken() -> "list[Task]":
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        decontaminate([task("x")], broken())


TEXTS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14).map(" ".join)


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS, st.integers(1, 6))
def test_shared_ngrams_against_the_slow_way(targets: list[str], text: str, size: int) -> None:
    settings = DecontaminationSettings(
        ngram_size=size, max_similarity=1.0, short_overlap=1.0, candidate_ngram_size=1
    )
    listed = [task(target, f"t{n}") for n, target in enumerate(targets)]
    found = TargetWords(listed, settings).check(task(text))

    def grams(value: str, length: int) -> set[tuple[str, ...]]:
        own = words(value)
        return {tuple(own[i : i + length]) for i in range(len(own) - length + 1)}

    def gives_away(target: str) -> bool:
        if words(target) == words(text) or grams(target, size) & grams(text, size):
            return True
        is_short = min(len(words(target)), len(words(text))) < size
        smaller = min((grams(target, 3), grams(text, 3)), key=len)
        return is_short and bool(smaller) and smaller <= grams(target, 3) & grams(text, 3)

    assert (found is not None) == any(map(gives_away, targets))
    if found is not None and found.rule == "ngram":
        assert found.evidence in " ".join(words(text))


def test_the_report_is_written_for_machines_and_people(tmp_path: Path) -> None:
    tasks = [
        task("Weng earns twelve dollars an hour.", "a"),
        task("Solve this. " + TARGET_TEXT, "b", source="x"),
        *[task(TARGET_TEXT, f"c{n}", source="y") for n in range(25)],
        task("Weng earns twelve dollars an hour!", "d"),
    ]
    once = deduplicate(tasks)
    found = decontaminate(tasks, [TARGET])
    assert [item.id for item in found.kept] == ["a", "d"]
    assert found.by_source == {"s": (2, 0), "x": (1, 1), "y": (25, 25)}
    report, text = write_decontamination(tmp_path / "out", found, once)
    values = json.loads(report.read_text(encoding="utf-8"))
    assert values["format_version"] == 1
    assert values["settings"]["ngram_size"] == 13
    assert (values["num_tasks"], values["num_kept"], values["num_left_out"]) == (28, 2, 26)
    assert values["by_rule"] == {"equal": 25, "ngram": 1}
    assert values["by_source"]["x"] == {"tasks": 1, "left_out": 1}
    assert values["left_out"][0]["task_id"] == "b"
    assert values["left_out"][0]["target_id"] == "target"
    assert values["num_duplicates"] == len(once.left_out) == 26
    shown = text.read_text(encoding="utf-8")
    assert "28 tasks held against 1 targets: 26 left out, 2 kept" in shown
    assert f"b gives away target ({len(words(TARGET_TEXT)) - 12}): a robe takes two bolts" in shown
    assert "… and 5 more in decontamination.json" in shown
    assert "duplicates within the corpus: 26" in shown


def test_duplicates_have_equal_answers_and_the_first_stays() -> None:
    tasks = [
        task("Weng earns twelve dollars an hour.", "a"),
        task("Weng earns twelve dollars an HOUR, an hour.", "b"),
        task("Weng earns twelve dollars an hour.", "c", answer="2"),
        task("Weng spends twelve dollars.", "d"),
        Task("e", "exact", "Weng earns twelve dollars an hour.", "1"),
        Task("f", "code", "Weng earns", tests=CodeTests((StdinTest("", "1"),))),
        Task("g", "code", "Weng earns", tests=CodeTests((StdinTest("", "2"),))),
        task("?", "h"),
        task("!", "i"),
    ]
    found = deduplicate(tasks)
    assert [item.id for item in found.kept] == ["a", "c", "d", "e", "f", "h"]
    assert [(item.task_id, item.kept_id, item.coverage) for item in found.left_out] == [
        ("b", "a", 1.0),
        ("g", "f", 1.0),
        ("i", "h", 1.0),
    ]


@given(
    st.lists(TEXTS, min_size=1, max_size=10),
    st.sampled_from([0.0, 0.3, 0.5, 2 / 3, 0.75, 0.9, 1.0]),
)
def test_duplicates_against_the_slow_way(texts: list[str], least: float) -> None:
    tasks = [task(text, f"t{n}") for n, text in enumerate(texts)]
    kept: list[Task] = []
    for item in tasks:
        own = set(words(item.problem))
        repeats = any(
            len(own & theirs) / min(len(own), len(theirs)) >= least
            for theirs in (set(words(other.problem)) for other in kept)
            if own & theirs or least == 0.0
        )
        if not repeats:
            kept.append(item)
    found = deduplicate(tasks, DecontaminationSettings(duplicate_coverage=least))
    if least > 0.0:
        assert found.kept == tuple(kept)
    assert all(one.id != two.id for one, two in pairwise(found.kept))
