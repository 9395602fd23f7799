"""Inside the sandbox: running a source text as Python would, or serving calls of its functions.

Standard library only. Everything here shares a process with code that nobody has read: nothing that
must stay secret or true may be in it.
"""

import _sitebuiltins
import atexit
import builtins
import io
import os
import socket
import sys
import threading
import traceback
import types
from typing import Any

from ttt_adapt.curriculum.sandbox import frames, values

MAX_REPLY_BYTES = 8 * 2**20
"""Of a returned value, as JSON."""


def open_standard_streams() -> None:
    """``sys.stdin``, ``stdout``, ``stderr`` over descriptors 0 to 2, and ``exit``: as Python starts."""
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    sys.stdin = sys.__stdin__ = io.open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: UP020, SIM115
    sys.stdout = sys.__stdout__ = io.open(  # type: ignore[misc] # noqa: UP020, SIM115
        1, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.stderr = sys.__stderr__ = io.open(  # type: ignore[misc] # noqa: UP020, SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )


def run(sources: list[str]) -> int:
    """Run the first of ``sources`` that compiles as ``__main__``; its exit code."""
    return _finish(lambda: _execute(sources, "__main__"))


def serve(sources: list[str], descriptor: int) -> int:
    """Run ``sources`` as a module, then answer calls on a socket until it is closed."""
    return _finish(lambda: _serve(sources, descriptor))


def check(prelude: str, code: str, functions: list[str], descriptor: int) -> int:
    """Run ``code`` with ``functions`` standing for those of a program behind a socket.

    The exit code says what happened: 0 passed, 1 failed, 3 the check itself cannot be run.
    """
    channel = socket.socket(fileno=descriptor)
    try:
        module = _module("__check__")
        exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        remote = _Remote(channel)
        for name in functions:
            module.__dict__[name] = remote.function(name)
        compiled = compile(code, "<check>", "exec", dont_inherit=True)
    except BaseException:  # noqa: BLE001 - it is a stranger's
        traceback.print_exc()
        return 3
    try:
        exec(compiled, module.__dict__)  # noqa: S102
    except SystemExit as leaving:
        # A test framework's way to say how it went; a program has no way to raise it here.
        return 1 if leaving.code else 0
    except BaseException as error:  # noqa: BLE001 - it is a stranger's
        traceback.print_exc()
        # What a check cannot import is missing here; what a program cannot is its own affair.
        is_missing = isinstance(error, ImportError) and error is not remote.last_raised
        return 3 if is_missing or isinstance(error, CannotPass) else 1
    return 0


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    return module


def _execute(sources: list[str], name: str) -> dict[str, Any]:
    module = _module(name)
    code = None
    for position, source in enumerate(sources):
        try:
            code = compile(source, "<program>", "exec", dont_inherit=True)
            break
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            if position == len(sources) - 1:
                raise
    assert code is not None, "at least one source"
    exec(code, module.__dict__)  # noqa: S102
    return module.__dict__


def _finish(action: Any) -> int:
    """What the interpreter does after a program's last line: threads, exit handlers, flushing."""
    code = 0
    try:
        action()
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
    except BaseException:  # noqa: BLE001 - it is a stranger's
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - it is a stranger's
        code = code or 120
    return code


def _exit_code(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value) & 0xFF
    print(value, file=sys.stderr)
    return 1


def _serve(sources: list[str], descriptor: int) -> None:
    channel = socket.socket(fileno=descriptor)
    try:
        names = _execute(sources, "__program__")
    except BaseException as error:
        frames.send(channel, {"failed": _described(error)})
        raise
    frames.send(channel, {"ready": True})
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    while (request := frames.receive(channel)) is not None:
        frames.send(channel, _answer(request, names, kept, keep))


def _answer(request: Any, names: dict[str, Any], kept: list[Any], keep: Any) -> dict[str, Any]:
    try:
        if "get" in request:
            return {
                "returned": values.encode(getattr(kept[request["object"]], request["get"]), keep)
            }
        if "set" in request:
            value = values.decode(request["value"], lambda n, _: kept[n])
            setattr(kept[request["object"]], request["set"], value)
            return {"returned": None}
        if "object" in request:
            function = kept[request["object"]]
        else:
            function = _look_up(names, request["function"])
        arguments = [values.decode(item, lambda n, _: kept[n]) for item in request["arguments"]]
        keywords = {
            key: values.decode(item, lambda n, _: kept[n])
            for key, item in request["keywords"].items()
        }
        # What it did to its arguments stays here: a function that changes what a check compares
        # with could pass any check.
        return {"returned": values.encode(function(*arguments, **keywords), keep)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is a stranger's
        return {"raised": _described(error)}


def _look_up(names: dict[str, Any], name: str) -> Any:
    """A function by name; ``name`` of a class ``Solution`` where there is no such function."""
    if name in names:
        return names[name]
    solution = names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"name {name!r} is not defined")


def _described(error: BaseException) -> list[str]:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - it is a stranger's
        text = ""
    return [type(error).__name__, text[:500]]


class ProgramDied(BaseException):
    """The program under test ended before it answered; no ``except Exception`` passes over it."""


class CannotPass(BaseException):
    """A check wants to pass what cannot be sent: nothing that the program could do about it."""


class ProgramRaised(Exception):
    """The program under test raised an exception that is none of Python's own."""


class _Remote:
    """The other end of :func:`_serve`, in the process that checks."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._is_ready = False
        self.last_raised: BaseException | None = None

    def function(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.call({"function": name}, arguments, keywords)

        call.__name__ = call.__qualname__ = name
        return call

    def _object(self, number: int, kind: str) -> values.Opaque:
        return _RemoteObject(self, number, kind)

    def call(
        self, target: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        request = target | {
            "arguments": [values.encode(item, _own_number) for item in arguments],
            "keywords": {key: values.encode(item, _own_number) for key, item in keywords.items()},
        }
        return self.ask(request)

    def ask(self, request: dict[str, Any]) -> Any:
        """What the program returns; raises what it raises."""
        if not self._is_ready:
            greeting = self._receive()
            if not greeting.get("ready"):
                raise ProgramDied(f"the program failed: {greeting.get('failed')}")
            self._is_ready = True
        try:
            frames.send(self._channel, request)
        except OSError:
            raise ProgramDied("the program ended") from None
        reply = self._receive()
        if "raised" in reply:
            self.last_raised = _exception(reply["raised"])
            raise self.last_raised
        return values.decode(reply["returned"], self._object)

    def _receive(self) -> dict[str, Any]:
        try:
            reply = frames.receive(self._channel, MAX_REPLY_BYTES)
        except OSError:
            reply = None
        if not isinstance(reply, dict):
            raise ProgramDied("the program ended")
        return reply


class _RemoteObject(values.Opaque):
    """An object of the program: called, read and written where it lives.

    Nothing that Python does by itself is asked there: it equals itself alone, has no length, no
    items and no order.
    """

    __slots__ = ("opaque_remote",)
    opaque_remote: _Remote

    def __init__(self, remote: _Remote, number: int, kind: str) -> None:
        super().__init__(number, kind)
        object.__setattr__(self, "opaque_remote", remote)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.opaque_remote.call({"object": self.opaque_number}, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self!r} shows no {name}")
        return self.opaque_remote.ask({"object": self.opaque_number, "get": name})

    def __setattr__(self, name: str, value: Any) -> None:
        sent = values.encode(value, _own_number)
        self.opaque_remote.ask({"object": self.opaque_number, "set": name, "value": sent})


def _own_number(value: Any) -> int:
    if isinstance(value, values.Opaque):
        return value.opaque_number
    raise CannotPass(f"a check cannot pass a {type(value).__name__} object to the program")


def _exception(described: Any) -> BaseException:
    name, text = (str(part) for part in described)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return ProgramRaised(f"{name}: {text}")


def environment() -> dict[str, str]:
    """What a program finds in ``os.environ``: enough to run, nothing of the host's."""
    return {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": os.defpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "TMPDIR": "/tmp",
    }
