"""Programs: taken out of a completion, run in the sandbox test by test, their outputs compared here.

What a test expects stays in this process, or (of a check) in another sandbox than the program's.
"""

import re
import socket
from collections.abc import Sequence

from ttt_adapt.curriculum.sandbox import Execution, Sandbox, Session, frames
from ttt_adapt.curriculum.sandbox.program import MAX_REPLY_BYTES
from ttt_adapt.curriculum.sandbox.values import encode, same_value
from ttt_adapt.curriculum.settings import VerifierSettings
from ttt_adapt.curriculum.tasks import CallTest, CheckTest, CodeTest, CodeTests, StdinTest, Task
from ttt_adapt.curriculum.verdicts import TestOutcome, Verdict, no_answer, not_verified
from ttt_adapt.curriculum.verifiers.extraction import after_thought

MAX_SOURCE_CHARACTERS = 200_000
CHECK_EXTRA_S = 30.0
"""A check outlasts the program it asks."""
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_OPEN_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|py)?[ \t]*\n(.*)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_NEXT_STATEMENT = re.compile(r"\n(?=\S)")
_LANGUAGES = ("", "python", "python3", "py")


def verify_program(
    task: Task, completion: str, *, sandbox: Sandbox, settings: VerifierSettings
) -> Verdict:
    """Run a completion's program on the task's tests.

    With ``code_reward="all"`` the first failed test ends it.
    """
    assert task.tests is not None
    sources = program_sources(completion, task.tests)
    if not sources:
        return no_answer("a program")
    if any("\ud800" <= letter <= "\udfff" for letter in sources[0]):
        return Verdict(0.0, "wrong", "the program holds a lone surrogate: no Python")
    if len(sources[0]) > MAX_SOURCE_CHARACTERS:
        return Verdict(0.0, "answer too long", f"at most {MAX_SOURCE_CHARACTERS:,} characters")
    outcomes: list[TestOutcome] = []
    cases = task.tests.cases[: settings.max_tests]
    for case in cases:
        outcomes.append(_run(case, sources, task.tests, sandbox, settings))
        if outcomes[-1].passed is False and settings.code_reward == "all":
            break
    return _verdict(outcomes, len(cases), settings.code_reward, sources[0])


def _verdict(outcomes: list[TestOutcome], num_cases: int, reward: str, source: str) -> Verdict:
    unknown = next((item for item in outcomes if item.passed is None), None)
    failed = next((item for item in outcomes if item.passed is False), None)
    # One failed test is enough to know that not all pass.
    if unknown is not None and (reward == "fraction" or failed is None):
        return not_verified(unknown.detail, outcomes)
    num_passed = sum(item.passed is True for item in outcomes)
    share = num_passed / num_cases
    return Verdict(
        share if reward == "fraction" else float(num_passed == num_cases),
        "correct" if num_passed == num_cases else f"passed {num_passed} of {num_cases} tests",
        failed.detail if failed else "",
        source,
        tuple(outcomes),
    )


def program_sources(completion: str, tests: CodeTests) -> list[str]:
    """Readings of a completion as a program, the likeliest first; empty if it holds none.

    The last fenced block that defines what the tests call, else the last fenced block, else the
    completion as code that continues the task's prefix. What follows a continuation (a base model
    goes on with something else) is left out in the readings that come after the whole.
    """
    said = after_thought(completion).strip("\r\n")
    wanted = _wanted(tests.cases)
    if tests.prefix and said[:1] in " \t":
        # The body of the prefix's function goes on; a fence then ends the block that holds it.
        said = _FENCE.split(said)[0]
    blocks = [body for language, body in _FENCED.findall(said) if language.lower() in _LANGUAGES]
    if not blocks and (match := _OPEN_FENCE.search(said)):
        blocks = [match[1]]
    if blocks:
        code = next((body for body in reversed(blocks) if _defines(body, wanted)), blocks[-1])
        return [] if not code.strip() else _with_prefix(code, tests.prefix, wanted)
    if not said.strip():
        return []
    if _defines(said, wanted) or not tests.prefix:
        whole = _with_prefix(said, tests.prefix, wanted)
    else:
        whole = [tests.prefix + said]
        whole += [tests.prefix + piece for piece in _beginnings(said)]
    return whole


def _with_prefix(code: str, prefix: str, wanted: Sequence[str]) -> list[str]:
    if not prefix:
        return [code]
    # The prefix has imports and classes that the code may rely on; what it defines again counts.
    readings = [f"{prefix}\n{code}", code]
    return readings if _defines(code, wanted) else [prefix + code, *readings]


def _beginnings(code: str) -> list[str]:
    """What stands before each statement at the left margin, the longest first, at most eight."""
    ends = [match.start() for match in _NEXT_STATEMENT.finditer(code)]
    return [code[:end] for end in reversed(ends[:8])]


def _defines(code: str, names: Sequence[str]) -> bool:
    return any(
        re.search(
            rf"^(?:[ \t]*(?:async )?def {re.escape(name)}\b|{re.escape(name)}\s*=)",
            code,
            re.MULTILINE,
        )
        for name in names
    )


def _wanted(cases: Sequence[CodeTest]) -> list[str]:
    names: dict[str, None] = {}
    for case in cases:
        if isinstance(case, CallTest):
            names[case.function] = None
        elif isinstance(case, CheckTest):
            names |= dict.fromkeys(case.functions)
    return list(names)


def _run(
    case: CodeTest,
    sources: list[str],
    tests: CodeTests,
    sandbox: Sandbox,
    settings: VerifierSettings,
) -> TestOutcome:
    cpu_s = None if tests.time_limit_s is None else tests.time_limit_s * settings.time_factor
    with sandbox.session() as session:
        if isinstance(case, StdinTest):
            return _run_stdin(case, session, sources, cpu_s, settings.float_tolerance)
        if isinstance(case, CallTest):
            return _run_call(case, session, sources, cpu_s, settings.float_tolerance)
        with sandbox.session() as checking:
            return _run_check(case, session, checking, sources, tests.prefix, cpu_s)


def _run_stdin(
    case: StdinTest, session: Session, sources: list[str], cpu_s: float | None, tolerance: float
) -> TestOutcome:
    execution = session.run(sources, case.stdin, cpu_s=cpu_s)
    if execution.status != "finished":
        return _failure(execution)
    if same_output(case.stdout, execution.stdout, tolerance):
        return TestOutcome(True)
    return _expected(case.stdout, execution.stdout)


def _run_call(
    case: CallTest, session: Session, sources: list[str], cpu_s: float | None, tolerance: float
) -> TestOutcome:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            session.start("serve", {"sources": sources}, cpu_s=cpu_s, channel=theirs)
        ours.settimeout(session.longest_s)
        request = {
            "function": case.function,
            "arguments": [encode(argument) for argument in case.arguments],
            "keywords": {name: encode(value) for name, value in case.keywords.items()},
        }
        try:
            greeting = frames.receive(ours, MAX_REPLY_BYTES)
            reply = None
            if isinstance(greeting, dict) and greeting.get("ready"):
                frames.send(ours, request)
                reply = frames.receive(ours, MAX_REPLY_BYTES)
        except (OSError, frames.BadFrame):
            reply = None
    if isinstance(reply, dict) and "returned" in reply:
        if same_value(case.returns, reply["returned"], tolerance=tolerance):
            return TestOutcome(True)
        return _expected(case.returns, reply["returned"])
    if isinstance(reply, dict) and "raised" in reply:
        return TestOutcome(False, f"raised {reply['raised']!r:.200}")
    return _failure(session.wait())


def _run_check(
    case: CheckTest,
    session: Session,
    checking: Session,
    sources: list[str],
    prefix: str,
    cpu_s: float | None,
) -> TestOutcome:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session.start("serve", {"sources": sources}, cpu_s=cpu_s, channel=theirs)
        task = {"prelude": prefix, "code": case.code, "functions": list(case.functions)}
        checking.start("check", task, channel=ours, extra_s=session.longest_s + CHECK_EXTRA_S)
    checked = checking.wait()
    if checked.status == "finished":
        return TestOutcome(True)
    if checked.status != "failed" or checked.exit_code not in (1, 3):
        return TestOutcome(None, f"the check did not end: {checked.detail}")
    if checked.exit_code == 3:
        return TestOutcome(None, f"the check cannot be run: {checked.detail}")
    if "ProgramDied" in checked.detail:
        return _failure(session.wait())
    return TestOutcome(False, checked.detail)


def same_output(expected: str, found: str, tolerance: float) -> bool:
    """Whether two outputs are the same but for spaces at ends, or word by word up to ``tolerance``.

    The tolerance is for words that are numbers with a decimal point or exponent on either side.
    """
    one, two = expected.split(), found.split()
    if one == two:
        return True
    return len(one) == len(two) and all(
        left == right or _same_decimal(left, right, tolerance)
        for left, right in zip(one, two, strict=True)
    )


def _same_decimal(one: str, two: str, tolerance: float) -> bool:
    if not any(mark in one + two for mark in ".eE"):
        return False
    try:
        left, right = float(one), float(two)
    except ValueError:
        return False
    return abs(left - right) <= tolerance * max(1.0, abs(left), abs(right))


def _failure(execution: Execution) -> TestOutcome:
    """A program that did not do what was asked: its own fault, unless the sandbox failed."""
    if execution.status == "fault":
        return TestOutcome(None, execution.detail)
    if execution.status == "finished":
        return TestOutcome(False, "ended before it was asked")
    return TestOutcome(False, f"{execution.status}: {execution.detail}")


def _expected(expected: object, found: object) -> TestOutcome:
    return TestOutcome(False, f"expected {expected!r:.100}, found {found!r:.100}")
