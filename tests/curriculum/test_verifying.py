"""Every kind of answer: right ones, wrong ones, hostile ones, and a harness that fails."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.curriculum import Task, Verdict, Verifier, VerifierSettings, verify
from ttt_adapt.errors import MissingDependencyError, TaskError

GRID = "0 1\n2 3"


def task(kind: str, answer: str, **meta: Any) -> Task:
    return Task("t", kind, "p", answer, meta=meta)


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("18", r"\boxed{18}", 1.0),
        ("18", "She makes 9 * 2 = 18 dollars.\n#### 18", 1.0),
        ("18", "The answer is $18 a day.", 1.0),
        ("18", "9 * 2 = 18", 1.0),
        ("18", "18.0", 1.0),
        ("2125", r"\boxed{2{,}125}", 1.0),
        ("2125", "2,125", 1.0),
        ("-50", r"\boxed{-50}", 1.0),
        ("18", r"\boxed{19} 18", 0.0),
        ("18", "18 or 19", 0.0),
        ("18", r"\boxed{18, 19}", 0.0),
        ("18", r"\boxed{1} \boxed{2} \boxed{18} \boxed{3}", 0.0),
        ("18", "", 0.0),
        ("18", "I don't know", 0.0),
        ("18", r"\boxed{}", 0.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\dfrac12}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
        ("p - q", r"\boxed{-q + p}", 1.0),
        ("p - q", r"\boxed{q - p}", 0.0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", 1.0),
        (r"11\sqrt2", r"\boxed{11\sqrt{2}}", 1.0),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", 1.0),
        (r"\text{Evelyn}", r"\boxed{\text{Carla}}", 0.0),
        ("90^\\circ", r"\boxed{90^\circ}", 1.0),
        (r"\frac{14}{3}", r"The answer is $\frac{14}{3}$.", 1.0),
        ("1", r"\boxed{" + "1+" * 600 + "1}", 0.0),
        ("1", r"\boxed{\frac{\boxed{}", 0.0),
        ("6 - 5i", r"\boxed{6-5i}", 1.0),
    ],
)
def test_mathematics(verifier: Verifier, answer: str, completion: str, reward: float) -> None:
    verdict = verifier.verify(task("math", answer), completion)
    assert verdict.reward == reward, verdict
    assert verdict.reason in ("correct", "wrong", "no answer", "answer too long")
    assert (verdict.detail == "") == (reward == 1.0)


def test_a_comparison_that_hangs_is_killed_and_is_no_zero() -> None:
    """Math-Verify's own time-out does not fire here; the process ends, and the next answer counts."""
    hanging = r"\boxed{9^{9^{9^{9^{9}}}} + x}"
    with Verifier(VerifierSettings(check_s=1.0)) as verifier:
        assert verifier.verify(task("math", "x + 1"), r"\boxed{1 + x}").reward == 1.0
        began = time.monotonic()
        verdict = verifier.verify(task("math", "x"), hanging)
        assert time.monotonic() - began < 20.0
        assert verdict.reward is None
        assert verdict.is_absent
        assert verdict.reason == "not verified"
        assert verdict.detail.startswith("Math-Verify: ")
        assert verifier.verify(task("math", "x + 2"), r"\boxed{2 + x}").reward == 1.0


def test_strict_settings_take_only_boxed_answers() -> None:
    with Verifier(VerifierSettings(final_answer="boxed")) as strict:
        assert strict.verify(task("math", "5"), "The answer is 5").reason == "no answer"
        assert strict.verify(task("exact", "yes"), "yes").reward == 0.0
        assert strict.verify(task("math", "5"), r"\boxed{5}").reward == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("B", 1.0),
        ("(B)", 1.0),
        ("**B**", 1.0),
        ("B.", 1.0),
        (r"\boxed{B}", 1.0),
        (r"\boxed{\text{(B)}}", 1.0),
        (r"\boxed{\text{B}} ", 1.0),
        ("So the answer is (B).", 1.0),
        ("Answer: B", 1.0),
        ("**Answer:** B) pears", 1.0),
        ("The answer is (B) pears, not (A).", 1.0),
        ("The answer is pears", 1.0),
        ("pears", 1.0),
        ("It must be (B)", 1.0),
        ("(A)", 0.0),
        ("A or B", 0.0),
        ("(A) and (B)", 0.0),
        ("The answer is (A) or maybe (B)", 0.0),
        ("E", 0.0),
        ("b", 0.0),
        ("", 0.0),
        ("A dog said B", 0.0),
        ("The answer is A lot of pears", 0.0),
    ],
)
def test_multiple_choice(completion: str, reward: float) -> None:
    asked = task("choice", "B", choices=["apples", "pears", "plums"])
    assert verify(asked, completion).reward == reward


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("Yes", "so the answer is yes.", 1.0),
        ("apple bear cat", "A: apple bear cat", 0.0),
        ("apple bear cat", "Sorted:\napple bear cat", 1.0),
        ("] ]", "] ]", 1.0),
        ("] ]", "] ] ]", 0.0),
        ("a\nb", "first\na\nb\n", 1.0),
        ("no", "", 0.0),
        ("no", "yes no", 0.0),
    ],
)
def test_exact(answer: str, completion: str, reward: float) -> None:
    assert verify(task("exact", answer), completion).reward == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("Output:\n0 1\n2 3", 1.0),
        ("```\n0 1\n2 3\n```", 1.0),
        ("[[0, 1],\n [2, 3]]", 1.0),
        ("9 9\n9 9\n\nno:\n0 1\n2 3\nDone.", 1.0),
        ("0 1\n2 3\n\n9 9", 0.0),
        ("0 1 2 3", 0.0),
        ("0 1\n2 3 4", 0.0),
        ("none", 0.0),
    ],
)
def test_grids(completion: str, reward: float) -> None:
    assert verify(task("grid", GRID), completion).reward == reward


def test_regular_expressions(verifier: Verifier) -> None:
    asked = task("regex", r"\d{4}-\d\d-\d\d")
    assert verifier.verify(asked, "The answer is 2024-05-01").reward == 1.0
    assert verifier.verify(asked, "2024-05-01 or so").reward == 0.0
    assert verifier.verify(asked, "").reason == "no answer"
    broken = verifier.verify(task("regex", "("), "x")
    assert broken.reward is None
    assert "regular expression" in broken.detail
    with Verifier(VerifierSettings(check_s=0.5)) as hasty:
        endless = hasty.verify(task("regex", "(a+)+b"), "a" * 60)
        assert endless.reward is None
        assert "no answer within 0.5 s" in endless.detail


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_rewards.py").write_text(
        "import os, time\n"
        "def length(task, completion):\n    print('noise')\n"
        "    return len(completion) / int(task.answer)\n"
        "def hangs(task, completion):\n    time.sleep(60)\n"
        "def dies(task, completion):\n    os._exit(0)\n"
        "def raises(task, completion):\n    raise ValueError('bad thing')\n"
        "def unsure(task, completion):\n    return None\n"
        "def infinite(task, completion):\n    return float('nan')\n"
        "def text(task, completion):\n    return 'good'\n"
        "class Scorer:\n    @staticmethod\n    def score(task, completion):\n        return True\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_rewards"
    sys.modules.pop("own_rewards", None)


def test_callables_of_ones_own(own_module: str) -> None:
    names = ("length", "hangs", "dies", "raises", "unsure", "infinite", "text", "Scorer.score")
    callables = {name: f"{own_module}:{name}" for name in names}
    with Verifier(VerifierSettings(check_s=1.0), callables=callables) as verifier:

        def outcome(kind: str) -> Verdict:
            return verifier.verify(Task("t", kind, "p", "10"), "12345")

        assert (outcome("length").reward, outcome("length").reason) == (0.5, "scored")
        assert outcome("Scorer.score").reward == 1.0
        for kind, reason in {
            "hangs": "hangs: no answer within 1 s; its process was killed",
            "dies": "dies: its process died",
            "raises": "raises: ValueError: bad thing",
            "unsure": "unsure: returned None",
            "infinite": "infinite: expected a finite reward, found nan",
            "text": "text: TypeError: expected a number or None, found str",
        }.items():
            assert outcome(kind).reward is None
            assert outcome(kind).detail.endswith(reason)
        assert outcome("length").reward == 0.5


def test_function_objects_run_here() -> None:
    def half(asked: Task, completion: str) -> float:
        return 0.5

    def bad(asked: Task, completion: str) -> float:
        raise OSError("gone")

    def odd(asked: Task, completion: str) -> Any:
        return "x"

    kinds: Any = {"half": half, "bad": bad, "odd": odd, "math": half}
    with Verifier(callables=kinds) as verifier:
        assert verifier.verify(Task("t", "half", "p"), "x").reward == 0.5
        assert verifier.verify(Task("t", "bad", "p"), "x").detail == "bad: OSError: gone"
        assert verifier.verify(Task("t", "odd", "p"), "x").reward is None
        assert verifier.verify(task("math", "5"), "x").reward == 0.5, "built-in kinds too"
    assert verify(Task("t", "half", "p"), "x", callables=kinds).reward == 0.5


def test_mistakes_are_said_before_and_raised(own_module: str) -> None:
    with pytest.raises(TaskError, match="expected a function or 'package.module:function'"):
        Verifier(callables={"x": "no_colon"})
    with Verifier(callables={"x": f"{own_module}:missing"}) as verifier:
        with pytest.raises(TaskError, match="cannot be imported: AttributeError"):
            verifier.verify(Task("t", "x", "p"), "c")
        with pytest.raises(TaskError, match="kind 'poem': expected one of math, .*, x; pass a"):
            verifier.verify(Task("t", "poem", "p"), "c")
        with pytest.raises(TaskError, match="kind 'poem'"):
            verifier.require([Task("t", "poem", "p")])
        with pytest.raises(TaskError, match="expected text, found NoneType"):
            verifier.verify(task("exact", "a"), None)  # type: ignore[arg-type]
        with pytest.raises(TaskError, match="one completion a task: 1 tasks, 2 completions"):
            verifier.verify_all([task("exact", "a")], ["a", "b"])
        verifier.require([task("math", "1"), Task("t", "x", "p")])


def test_without_math_verify_the_extra_is_named() -> None:
    from ttt_adapt.curriculum import verifying

    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from ttt_adapt.curriculum import Task, verify\n"
        "verify(Task('t', 'math', 'p', '5'), '5')"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert MissingDependencyError.__name__ in done.stderr
    assert "ttt-adapt[curriculum]" in done.stderr
    verifying.require_math_verify()


def test_many_at_once_come_back_in_order(verifier: Verifier) -> None:
    tasks = [task("math", f"x + {n}") for n in range(6)] + [task("exact", "a")] * 3
    completions = [rf"\boxed{{{n} + x}}" for n in range(6)] + ["a", "b", "a"]
    verdicts = verifier.verify_all(tasks, completions, num_workers=3)
    assert [verdict.reward for verdict in verdicts] == [1.0] * 6 + [1.0, 0.0, 1.0]
    assert verifier.verify_all(tasks, completions) == verdicts
    assert verifier.verify_all([], []) == []


def test_the_function_is_the_verifier(sandbox: Any) -> None:
    assert verify(task("math", "x + 1"), r"\boxed{1 + x}").reward == 1.0
    from ttt_adapt.curriculum import CodeTests, StdinTest

    program = Task("t", "code", "p", tests=CodeTests((StdinTest("2", "4"),)))
    assert verify(program, "```\nprint(2 * int(input()))\n```", sandbox=sandbox).reward == 1.0


@pytest.mark.parametrize("kind", ["math", "choice", "exact", "grid"])
def test_long_completions_take_no_long_time(verifier: Verifier, kind: str) -> None:
    asked = task(kind, "A" if kind == "choice" else "1")
    began = time.process_time()
    for piece in (
        "(",
        "1 ",
        "1,",
        "A",
        "(A)",
        "\\boxed{",
        "[",
        "\n1",
        "answer is 1\n",
        "```\n",
        "\t",
    ):
        assert verifier.verify(asked, piece * 30_000 + "!").reward in (0.0, 1.0)
    assert time.process_time() - began < 10.0


def test_a_long_program_takes_no_long_time(verifier: Verifier) -> None:
    from ttt_adapt.curriculum import CallTest, CodeTests
    from ttt_adapt.curriculum.verifiers.programs import program_sources

    tests = CodeTests((CallTest("f", (), 1),), prefix="def f():\n")
    began = time.process_time()
    for piece in ("```\n", "```x\n", " ", "\n", "def f\n", "f = ", "\n```", "x\n", "  ```"):
        program_sources(piece * 30_000, tests)
        program_sources("  return 1\n" + piece * 30_000, tests)
    assert time.process_time() - began < 10.0
    huge = Task("t", "code", "p", tests=tests)
    assert verifier.verify(huge, "```\n" + "x = 1\n" * 50_000 + "```").reason == "answer too long"
