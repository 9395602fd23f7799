"""The checking process: comparisons that can hang, and a user's own callables.

Started afresh by :mod:`.checking_process`, which kills it when it takes too long. Answers one
request at a time over a socket.
"""

import importlib
import os
import re
import resource
import socket
from typing import Any

from ttt_adapt.curriculum.sandbox import frames


def main(descriptor: int, memory_bytes: int) -> None:
    """Answer requests until the socket closes."""
    # What a callable prints must not end up in the output of the program that verifies.
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=descriptor)
    while (request := frames.receive(channel)) is not None:
        frames.send(channel, _answer(request))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _ACTIONS[request["do"]](request)
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # noqa: BLE001 - reported, and no completion's fault
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _math(request: dict[str, Any]) -> dict[str, Any]:
    import logging

    import math_verify

    # Its own time-outs need signals and have been seen not to fire: this process is killed instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected, found = (
        math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None)
        for text in (request["expected"], request["found"])
    )
    if not expected or not found:
        return {"equal": False}
    return {"equal": bool(math_verify.verify(expected, found, timeout_seconds=None))}


def _regex(request: dict[str, Any]) -> dict[str, Any]:
    return {"equal": re.fullmatch(request["pattern"], request["found"]) is not None}


def _callable(request: dict[str, Any]) -> dict[str, Any]:
    from ttt_adapt.curriculum.tasks import from_json

    returned = _find(request["callable"])(from_json(request["task"]), request["completion"])
    if returned is None or isinstance(returned, (bool, int, float)):
        return {"reward": None if returned is None else float(returned)}
    if hasattr(returned, "item"):
        return {"reward": float(returned.item())}
    raise TypeError(f"expected a number or None, found {type(returned).__name__}")


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _load(request: dict[str, Any]) -> dict[str, Any]:
    """What the first request of a kind would spend its time on."""
    if request["of"] == "math":
        return _math({"expected": "x + 1", "found": "1 + x"})
    if request["of"] == "callable":
        _find(request["callable"])
    return {}


_ACTIONS = {"math": _math, "regex": _regex, "callable": _callable, "load": _load}
