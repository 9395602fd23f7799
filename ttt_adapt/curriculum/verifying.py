"""What is a completion worth? One function for tasks of every kind."""

import atexit
import functools
import importlib.util
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ttt_adapt.closing import Closing
from ttt_adapt.curriculum.sandbox import Sandbox
from ttt_adapt.curriculum.settings import SandboxSettings, VerifierSettings
from ttt_adapt.curriculum.tasks import KINDS, Task, to_json
from ttt_adapt.curriculum.verdicts import Verdict, no_answer, not_verified, right_or_wrong
from ttt_adapt.curriculum.verifiers.answers import verify_choice, verify_exact, verify_grid
from ttt_adapt.curriculum.verifiers.checking_process import (
    CheckFailed,
    CheckingProcesses,
    LoadFailed,
)
from ttt_adapt.curriculum.verifiers.extraction import final_answer
from ttt_adapt.curriculum.verifiers.mathematics import EqualAnswers, verify_math
from ttt_adapt.curriculum.verifiers.programs import verify_program
from ttt_adapt.errors import MissingDependencyError, TaskError

RewardFunction = Callable[[Task, str], float | None]
"""A user's own verifier: a reward, or ``None`` where it cannot tell."""


class Verifier(Closing):
    """Verifies completions; holds the processes that this needs.

    May be used from several threads. Close it, or use it as a context manager.

    Args:
        settings: where final answers may stand, limits, tolerances.
        sandbox: for programs; ``None``: one with default settings, made when it is needed.
        callables: verifiers for kinds of the user's own (they may stand in for built-in kinds
            too). ``"package.module:function"`` runs in another process, which is killed when it
            takes longer than ``settings.check_s``; a function object runs in this one, as long as
            it likes. Both get the task and the completion.

    Raises:
        TaskError: a callable is neither.
    """

    def __init__(
        self,
        settings: VerifierSettings | None = None,
        *,
        sandbox: Sandbox | SandboxSettings | None = None,
        callables: Mapping[str, RewardFunction | str] | None = None,
    ) -> None:
        self.settings = settings or VerifierSettings()
        self._callables = dict(callables or {})
        for kind, function in self._callables.items():
            _require_callable(kind, function)
        self._owns_sandbox = not isinstance(sandbox, Sandbox)
        self._sandbox = sandbox if isinstance(sandbox, Sandbox) else Sandbox(sandbox)
        self._processes = CheckingProcesses(self.settings.check_s, self.settings.check_memory_mb)
        self._known = EqualAnswers()

    @property
    def sandbox(self) -> Sandbox:
        """What runs programs; its ``strength`` is for printing before a long run."""
        return self._sandbox

    def require(self, tasks: Sequence[Task]) -> None:
        """Find out, before a long run, whether these tasks can be verified here.

        Raises:
            TaskError: a kind that nothing here verifies.
            MissingDependencyError: mathematics without Math-Verify.
            SandboxError: programs on a machine that does not isolate them.
        """
        for kind in sorted({task.kind for task in tasks}):
            if kind in self._callables:
                continue
            if kind not in KINDS:
                raise _unknown_kind(kind, self._callables)
            if kind == "math":
                require_math_verify()
            if kind == "code":
                _ = self._sandbox.strength

    def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict on one completion.

        A failure of the harness is ``reward=None`` with the reason; a mistake of the caller raises.

        Raises:
            TaskError: a kind that nothing here verifies, a completion that is no text, a callable
                that cannot be imported.
            MissingDependencyError: mathematics without Math-Verify.
            SandboxError: a program on a machine that does not isolate it.
        """
        if not isinstance(completion, str):
            raise TaskError(f"a completion: expected text, found {type(completion).__name__}")
        if task.kind in self._callables:
            return self._verify_by_callable(self._callables[task.kind], task, completion)
        allowed = self.settings.final_answer
        if task.kind == "math":
            require_math_verify()
            return verify_math(
                task,
                completion,
                allowed=allowed,
                max_characters=self.settings.max_answer_characters,
                ask=self._processes.ask,
                known=self._known,
            )
        if task.kind == "choice":
            return verify_choice(task, completion, allowed)
        if task.kind == "exact":
            return verify_exact(task, completion, allowed)
        if task.kind == "grid":
            return verify_grid(task, completion)
        if task.kind == "regex":
            return self._verify_regex(task, completion)
        if task.kind == "code":
            return verify_program(task, completion, sandbox=self._sandbox, settings=self.settings)
        raise _unknown_kind(task.kind, self._callables)

    def verify_all(
        self, tasks: Sequence[Task], completions: Sequence[str], *, num_workers: int = 1
    ) -> list[Verdict]:
        """Verdicts in order; ``num_workers`` at once, each with processes of its own.

        Raises:
            TaskError: more or fewer completions than tasks, and as :meth:`verify`.
        """
        if len(tasks) != len(completions):
            raise TaskError(
                f"expected one completion a task: {len(tasks)} tasks, {len(completions)} completions"
            )
        if num_workers <= 1 or len(tasks) <= 1:
            return [self.verify(t, c) for t, c in zip(tasks, completions, strict=True)]
        with ThreadPoolExecutor(num_workers) as pool:
            return list(pool.map(self.verify, tasks, completions))

    def close(self) -> None:
        """End every process that was started here."""
        self._processes.close()
        if self._owns_sandbox:
            self._sandbox.close()

    def _verify_regex(self, task: Task, completion: str) -> Verdict:
        found = final_answer(completion, self.settings.final_answer)
        if found is None:
            return no_answer("a final answer")
        try:
            # A pattern can take for ever, so it is matched where it can be killed.
            reply = self._processes.ask(
                {"do": "regex", "pattern": task.answer, "found": found.text}
            )
        except CheckFailed as error:
            return not_verified(f"regular expression: {error}")
        if "error" in reply:
            return not_verified(f"regular expression: {reply['error']}")
        return right_or_wrong(bool(reply["equal"]), found.text, str(task.answer))

    def _verify_by_callable(
        self, function: RewardFunction | str, task: Task, completion: str
    ) -> Verdict:
        name = function if isinstance(function, str) else getattr(function, "__name__", "callable")
        try:
            if isinstance(function, str):
                reply = self._processes.ask(
                    {
                        "do": "callable",
                        "callable": function,
                        "task": to_json(task),
                        "completion": completion,
                    }
                )
                if "error" in reply:
                    return not_verified(f"{name}: {reply['error']}")
                returned = reply["reward"]
            else:
                returned = function(task, completion)
        except LoadFailed as error:
            raise TaskError(f"callable {name}: cannot be imported: {error}") from None
        except CheckFailed as error:
            return not_verified(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            return not_verified(f"{name}: {type(error).__name__}: {error}")
        return _verdict_of(returned, name)


def verify(
    task: Task,
    completion: str,
    *,
    sandbox: Sandbox | None = None,
    settings: VerifierSettings | None = None,
    callables: Mapping[str, RewardFunction | str] | None = None,
) -> Verdict:
    """The verdict on one completion; see :meth:`Verifier.verify`.

    Processes it needs are kept until the interpreter ends; for many completions at once, or to
    say when processes end, use a :class:`Verifier`.

    Args:
        sandbox: for programs; ``None``: one with default settings.
        callables: see :class:`Verifier`; each call with them makes a verifier of its own.
    """
    if callables:
        with Verifier(settings, sandbox=sandbox, callables=callables) as verifier:
            return verifier.verify(task, completion)
    with _SHARING:
        verifier = _shared(settings or VerifierSettings(), sandbox)
    return verifier.verify(task, completion)


_SHARING = threading.Lock()


@functools.lru_cache(maxsize=16)
def _shared(settings: VerifierSettings, sandbox: Sandbox | None) -> Verifier:
    verifier = Verifier(settings, sandbox=sandbox)
    atexit.register(verifier.close)
    return verifier


@functools.cache
def require_math_verify() -> None:
    """Raise where mathematics cannot be compared.

    Raises:
        MissingDependencyError: Math-Verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MissingDependencyError(
            "mathematics is compared by Math-Verify, which is not installed; install "
            "ttt-adapt[curriculum]"
        )


def _require_callable(kind: str, function: object) -> None:
    if callable(function):
        return
    module, colon, name = function.partition(":") if isinstance(function, str) else ("", "", "")
    if not (colon and module and name):
        raise TaskError(
            f"callable for kind {kind!r}: expected a function or 'package.module:function', found "
            f"{function!r:.80}"
        )


def _unknown_kind(kind: str, callables: Mapping[str, object]) -> TaskError:
    known = ", ".join((*KINDS, *callables))
    return TaskError(f"kind {kind!r}: expected one of {known}; pass a callable for your own")


def _verdict_of(returned: object, name: str) -> Verdict:
    if returned is None:
        return not_verified(f"{name}: returned None")
    try:
        reward = float(returned)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return not_verified(f"{name}: expected a number or None, found {type(returned).__name__}")
    if not math.isfinite(reward):
        return not_verified(f"{name}: expected a finite reward, found {reward}")
    reason = "correct" if reward == 1.0 else "wrong" if reward == 0.0 else "scored"
    return Verdict(reward, reason, name)
