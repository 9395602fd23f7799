"""Programs that people and models really write, and that a sandbox must let be."""

import pytest

from ttt_adapt.curriculum import CallTest, CheckTest, CodeTests, Sandbox, StdinTest, Task, Verifier

PROGRAMS = {
    "divmod": ("print(*divmod(int(input()), 5))", "4 1"),
    "super": (
        (
            "class A:\n def f(self): return 1\nclass B(A):\n def f(self): return super().f() + 1\n"
            "print(B().f())"
        ),
        "2",
    ),
    "open(0)": ("print(open(0).read().split()[0])", "21"),
    "sys.exit(0)": ("import sys\nprint(7)\nsys.exit(0)", "7"),
    "exit()": ("print(7)\nexit()", "7"),
    "numpy": ("import numpy as np\nprint(int(np.linalg.det(np.eye(3)) + np.arange(4).sum()))", "7"),
    "main": ("def main():\n print(input())\nif __name__ == '__main__':\n main()", "21"),
    "until EOF": (
        "n = 0\ntry:\n while True:\n  n += int(input())\nexcept EOFError:\n print(n)",
        "26",
    ),
    "stdin lines": ("import sys\nprint(sum(int(line) for line in sys.stdin))", "26"),
    "buffer": ("import sys\nprint(len(sys.stdin.buffer.read()))", "5"),
    "stdout": (
        "import sys\nsys.stdout.write('a')\nsys.stdout.flush()\nprint('b', flush=True)",
        "ab",
    ),
    "unbuffered": ("import os\nprint('a')\nos.write(2, b'x')", "a"),
    "unicode": ("print('Zoë → ∑')", "Zoë → ∑"),
    "recursion": (
        (
            "import sys\nsys.setrecursionlimit(10**6)\n"
            "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(50000))"
        ),
        "50000",
    ),
    "big stack in a thread": (
        (
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
            "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
            "thread = threading.Thread(target=lambda: print(f(50000)))\nthread.start()\nthread.join()"
        ),
        "50000",
    ),
    "threads": (
        (
            "import threading\nthreads = [threading.Thread(target=print, args=(1,)) for _ in range(3)]\n"
            "for t in threads: t.start()"
        ),
        "1 1 1",
    ),
    "multiprocessing": (
        (
            "import multiprocessing\nif __name__ == '__main__':\n"
            " with multiprocessing.Pool(2) as pool: print(*pool.map(abs, [-1, 2]))"
        ),
        "1 2",
    ),
    "subprocess": (
        (
            "import subprocess, sys\n"
            "print(subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True, "
            "text=True).stdout)"
        ),
        "3",
    ),
    "asyncio": ("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", "5"),
    "files": (
        (
            "import tempfile, os\nopen('x', 'w').write('hello')\nprint(open('x').read())\n"
            "with tempfile.NamedTemporaryFile() as f: print(os.path.exists(f.name))"
        ),
        "hello True",
    ),
    "dataclass": (
        (
            "from dataclasses import dataclass\nfrom typing import List\n"
            "@dataclass(order=True)\nclass P:\n x: int\n y: List[int]\nprint(max(P(1, [2]), P(2, [])))"
        ),
        "P(x=2, y=[])",
    ),
    "pickle": (
        "import pickle\nclass P: pass\nprint(type(pickle.loads(pickle.dumps(P()))).__name__)",
        "P",
    ),
    "library": (
        (
            "import bisect, collections, decimal, fractions, functools, heapq, itertools, json, math, "
            "operator, random, re, statistics, string, sqlite3, datetime, ctypes, zlib\n"
            "print(fractions.Fraction(1, 3) + 1, decimal.Decimal('1.10'), math.comb(5, 2))"
        ),
        "4/3 1.10 10",
    ),
    "long integers": (
        "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(10**5000)))",
        "5001",
    ),
    "globals": ("n = 0\ndef f():\n global n\n n += 1\nf()\nprint(n, __name__)", "1 __main__"),
    "atexit": ("import atexit\natexit.register(print, 'end')\nprint('start')", "start end"),
    "frames": ("import sys\nprint(sys._getframe().f_code.co_name)", "<module>"),
    "memory": ("x = bytearray(3 * 10**8)\nprint(len(x))", "300000000"),
    "second of three": ("print('no')", "no"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_honest_program_runs(sandbox: Sandbox, name: str) -> None:
    source, expected = PROGRAMS[name]
    execution = sandbox.run(source, "21\n5\n")
    assert execution.status == "finished", execution
    assert execution.stdout.split() == expected.split()


FUNCTIONS = {
    "tuple for list": ("def f(x): return (x, x)", [1, 1]),
    "deep": (
        "def f(x): return {'a': [x, {'b': None}], 'c': 1.5}",
        {"a": [1, {"b": None}], "c": 1.5},
    ),
    "integer keys": ("def f(x): return {1: 'a', 2: 'b'}", {"1": "a", "2": "b"}),
    "counter": (
        "import collections\ndef f(x): return collections.Counter('aab')",
        {"a": 2, "b": 1},
    ),
    "defaultdict": (
        "import collections\ndef f(x):\n d = collections.defaultdict(int)\n d['a'] += x\n return d",
        {"a": 1},
    ),
    "generator": ("def f(x):\n yield x\n yield x", [1, 1]),
    "numpy": ("import numpy as np\ndef f(x): return np.arange(3) * x", [0, 1, 2]),
    "numpy number": ("import numpy as np\ndef f(x): return np.int64(x) + np.float32(0.5)", 1.5),
    "float": ("def f(x): return 0.1 + 0.2", 0.3),
    "fraction": ("from fractions import Fraction\ndef f(x): return Fraction(x, 2)", 0.5),
    "huge": ("def f(x): return 7**3000", 7**3000),
    "bool": ("def f(x): return x == 1", True),
    "method": ("class Solution:\n def f(self, x): return x + 1", 2),
    "lambda": ("f = lambda x: x + 1", 2),
    "prints": ("def f(x):\n print('debug')\n return x", 1),
    "main guard": ("def f(x): return x\nif __name__ == '__main__':\n print(input())", 1),
    "cached": ("import functools\n@functools.cache\ndef f(x): return x", 1),
    "none": ("def f(x): pass", None),
    "surrogate": ("def f(x): return '\\ud800'", "\ud800"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_honest_function_returns(verifier: Verifier, name: str) -> None:
    source, expected = FUNCTIONS[name]
    task = Task("t", "code", "f", tests=CodeTests((CallTest("f", (1,), expected),)))
    verdict = verifier.verify(task, f"Here:\n```python\n{source}\n```\nDone.")
    assert verdict.reward == 1.0, verdict


CHECKS = {
    "tuple is a tuple": ("assert f(1) == (1, 2)", "def f(x): return (1, 2)", 1.0),
    "list is no tuple": ("assert f(1) == (1, 2)", "def f(x): return [1, 2]", 0.0),
    "set": ("assert f([1, 1]) == {1}", "f = set", 1.0),
    "raises": (
        "try:\n f(0)\nexcept ZeroDivisionError:\n pass\nelse:\n assert False",
        "def f(x): return 1 / x",
        1.0,
    ),
    "does not raise": (
        "try:\n f(0)\nexcept ZeroDivisionError:\n pass\nelse:\n assert False",
        "def f(x): return x",
        0.0,
    ),
    "own exception": (
        "try:\n f(0)\nexcept Exception as error:\n assert 'bad' in str(error)",
        "class Bad(Exception): pass\ndef f(x): raise Bad('bad thing')",
        1.0,
    ),
    "dies": ("try:\n f(0)\nexcept Exception:\n pass", "import os\ndef f(x): os._exit(0)", 0.0),
    "closure": ("assert f(2)(3) == 5", "def f(a): return lambda b: a + b", 1.0),
    "keywords": ("assert f(a=1, b=[2]) == [2, 1]", "def f(*, a, b): return [*b, a]", 1.0),
    "tolerance": ("import math\nassert math.isclose(f(1), 0.3)", "def f(x): return 0.1 + 0.2", 1.0),
    "complex": ("assert f(1) == 1j", "def f(x): return x * 1j", 1.0),
    "range": ("assert list(f(3)) == [0, 1, 2]", "f = range", 1.0),
    "nan": ("import math\nassert math.isnan(f(1))", "def f(x): return float('nan')", 1.0),
    "bytes": ("assert f('a') == b'a'", "def f(x): return x.encode()", 1.0),
    "objects": (
        (
            "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\n"
            "assert depth(root) == 3 and root.left.value == 2 and root.left.twice() == 4\n"
            "assert root.left is not root and root != Node(1)"
        ),
        (
            "class Node:\n def __init__(self, value): self.value, self.left = value, None\n"
            " def twice(self): return 2 * self.value\n"
            "def depth(node): return 0 if node is None else 1 + depth(node.left)"
        ),
        1.0,
    ),
    "unittest": (
        (
            "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(1), 2)\n"
            "unittest.main(module='__check__', argv=['x'])"
        ),
        "def f(x): return x + 1",
        1.0,
    ),
    "unittest that fails": (
        (
            "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(1), 2)\n"
            "unittest.main(module='__check__', argv=['x'])"
        ),
        "def f(x): return x",
        0.0,
    ),
    "numpy in the check": (
        "import numpy as np\nassert np.allclose(f(2), [2.0, 2.0])",
        "def f(x): return [x, x]",
        1.0,
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_sees_what_the_program_returns(verifier: Verifier, name: str) -> None:
    code, source, expected = CHECKS[name]
    functions = ("Node", "depth") if name == "objects" else ("f",)
    task = Task("t", "code", "f", tests=CodeTests((CheckTest(code, functions),)))
    verdict = verifier.verify(task, f"```\n{source}\n```")
    assert verdict.reward == expected, verdict


def test_a_check_relies_on_the_prefix_and_the_program_continues_it(verifier: Verifier) -> None:
    prefix = "def half(x):\n    return x / 2\n\ndef f(x):\n    '''Half of half.'''\n"
    check = CheckTest("for x in range(5):\n    assert half(half(x)) == f(x)", ("f",))
    task = Task("t", "code", prefix, tests=CodeTests((check,), prefix=prefix))
    right = "    return half(half(x))\n"
    for completion in (
        right,
        right + "\n\nprint(f(3))\n\ndef g(:\n",
        right + "```\nThat is all.",
        f"```python\n{right}```",
        "```python\ndef f(x):\n    return half(half(x))\n```",
        "I first thought of ```x / 3```.\n```python\ndef f(x):\n    return x / 4\n```\nBye",
        "<think>def f(x): return 0</think>\n```python\ndef f(x):\n    return x / 4\n```",
        "```python\ndef f(x):\n    return x / 4",
    ):
        assert verifier.verify(task, completion).reward == 1.0, completion
    for completion in (
        "    return half(x)\n",
        "No idea.",
        "```python\n```",
        "",
        "<think>\n" + right,
    ):
        assert verifier.verify(task, completion).reward in (0.0,), completion


def test_shares_of_tests_and_the_first_failure(sandbox: Sandbox) -> None:
    from ttt_adapt.curriculum import VerifierSettings

    cases = tuple(CallTest("f", (n,), n) for n in range(4))
    task = Task("t", "code", "f", tests=CodeTests(cases))
    source = "```\ndef f(n): return n if n != 1 else 0\n```"
    with Verifier(VerifierSettings(code_reward="fraction"), sandbox=sandbox) as verifier:
        verdict = verifier.verify(task, source)
        assert (verdict.reward, verdict.reason) == (0.75, "passed 3 of 4 tests")
        assert [test.passed for test in verdict.tests] == [True, False, True, True]
        assert verdict.detail == "expected 1, found 0"
    with Verifier(VerifierSettings(max_tests=1), sandbox=sandbox) as verifier:
        assert verifier.verify(task, source).reward == 1.0
    with Verifier(sandbox=sandbox) as verifier:
        verdict = verifier.verify(task, source)
        assert verdict.reward == 0.0
        assert len(verdict.tests) == 2


def test_decimals_in_outputs_may_differ_a_little(verifier: Verifier) -> None:
    task = Task("t", "code", "f", tests=CodeTests((StdinTest("", "0.3333333 x\n2\n"),)))
    assert verifier.verify(task, "```\nprint(1 / 3, 'x')\nprint(2, end='')\n```").reward == 1.0
    assert verifier.verify(task, "```\nprint(0.334, 'x')\nprint(2)\n```").reward == 0.0
    assert verifier.verify(task, "```\nprint(1 / 3, 'x')\nprint(3)\n```").reward == 0.0


def test_a_tasks_own_time_limit_counts(verifier: Verifier) -> None:
    tests = CodeTests((StdinTest("", "1"),), time_limit_s=0.1)
    task = Task("t", "code", "f", tests=tests)
    verdict = verifier.verify(task, "```\nwhile True: pass\n```")
    assert verdict.reward == 0.0
    assert "time: more than 0.5 s of processor time" in verdict.detail
