"""Programming: HumanEval, MBPP, and tests as the verifiable corpus writes them."""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.curriculum.importers.free_names import defined_names, free_names, imports_of
from ttt_adapt.curriculum.importers.layout import Draft, Layout, chosen, has, optional_text, text
from ttt_adapt.curriculum.importers.rows import Row
from ttt_adapt.curriculum.settings import TaskSourceSettings
from ttt_adapt.curriculum.tasks import CallTest, CheckTest, CodeTest, CodeTests, StdinTest

VERIFIABLE_KINDS = {"math": "math", "verifier": "exact", "exact": "exact"}


def _humaneval(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    prompt, entry = text(row.values, "prompt"), text(row.values, "entry_point")
    code = f"{text(row.values, 'test')}\n\ncheck({entry})\n"
    tests = CodeTests((check_test(code, prefix=prompt, always=(entry,)),), prefix=prompt)
    yield Draft(
        "code",
        prompt,
        tests=tests,
        meta=chosen(row.values, "entry_point", "canonical_solution"),
        own_id=optional_text(row.values, "task_id").removeprefix("HumanEval/"),
    )


def _mbpp(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    values = row.values
    checks = [*_texts(values, "test_list"), *_texts(values, "challenge_test_list")]
    setup = [*_texts(values, "test_imports"), optional_text(values, "test_setup_code")]
    before = "".join(f"{line}\n" for line in setup if line)
    reference = optional_text(values, "code")
    cases = tuple(check_test(before + check, known=reference) for check in checks)
    if not cases:
        raise Malformed("column 'test_list': expected assertions, found none")
    problem = text(values, "text", "prompt").strip()
    functions = dict.fromkeys(name for case in cases for name in case.functions)
    signatures = _signatures(reference, list(functions))
    yield Draft(
        "code",
        problem,
        tests=CodeTests(cases),
        meta=chosen(values, "code"),
        own_id=optional_text(values, "task_id"),
        prompt=f"{problem}\n\n```python\n{signatures}\n```" if signatures else "",
    )


def _verifiable(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    values = row.values
    kind = text(values, "kind")
    problem = text(values, "problem")
    # The description is the problem without its format and examples.
    meta = {"dataset": optional_text(values, "dataset")}
    description = optional_text(values, "description")
    if description and description != problem:
        meta["problem"] = description
    if kind == "code":
        yield Draft("code", problem, tests=_corpus_tests(values.get("tests")), meta=meta)
    elif kind in VERIFIABLE_KINDS:
        answer = text(values, "answer").strip()
        yield Draft(VERIFIABLE_KINDS[kind], problem, answer, meta=meta)
    else:
        known = ", ".join([*VERIFIABLE_KINDS, "code"])
        raise Malformed(f"column 'kind': expected one of {known}, found {kind!r:.40}")


def _corpus_tests(value: Any) -> CodeTests:
    """``inputs``, ``outputs``, ``testtype`` (stdin, functional, code), ``fn_name``, ``time_limit``,
    ``context``: as an object or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Malformed("column 'tests': expected JSON, found something else") from None
    if not isinstance(value, Mapping):
        raise Malformed(f"column 'tests': expected an object, found {value!r:.40}")
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise Malformed("column 'tests': expected as many inputs as outputs")
    kind, prefix = value.get("testtype"), value.get("context") or ""
    cases: list[CodeTest] = []
    for given, expected in zip(inputs, outputs, strict=True):
        if kind == "stdin":
            cases.append(StdinTest(_lines(given), _lines(expected)))
        elif kind == "functional":
            cases.append(_call_test(str(value.get("fn_name") or ""), given, expected))
        elif kind == "code":
            cases.append(check_test(str(given), prefix=str(prefix)))
        else:
            raise Malformed(f"testtype: expected stdin, functional or code, found {kind!r:.40}")
    limit = value.get("time_limit")
    has_limit = isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit > 0
    return CodeTests(tuple(cases), str(prefix), float(limit) if has_limit and limit else None)


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(item) for item in value)
    if not isinstance(value, str):
        raise Malformed(f"a test: expected text to read or write, found {value!r:.40}")
    return value


def _call_test(function: str, given: Any, expected: Any) -> CallTest:
    if not function:
        raise Malformed("fn_name: expected the name of a function, found none")
    returns = _json_or_literal(expected) if isinstance(expected, str) else expected
    if isinstance(given, Mapping):
        return CallTest(function, (), returns, dict(given))
    if isinstance(given, list):
        return CallTest(function, tuple(given), returns)
    if not isinstance(given, str):
        return CallTest(function, (given,), returns)
    try:
        # One argument a line, as JSON.
        return CallTest(function, tuple(json.loads(x) for x in given.splitlines() if x), returns)
    except ValueError:
        arguments, keywords = _written_call(given)
        return CallTest(function, arguments, returns, keywords)


def _written_call(given: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as Python would have them in a call: ``nums = [3, 3], target = 6``."""
    try:
        call = ast.parse(f"f({given})", mode="eval").body
        assert isinstance(call, ast.Call)
        arguments = tuple(ast.literal_eval(item) for item in call.args)
        keywords = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        json.dumps([arguments, keywords])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed(f"a test: expected a function's arguments, found {given!r:.60}") from None
    return arguments, keywords


def _json_or_literal(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        literal = ast.literal_eval(value)
        json.dumps(literal)
        return literal
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return value


def check_test(
    code: str, *, prefix: str = "", known: str = "", always: tuple[str, ...] = ()
) -> CheckTest:
    """A check, with the names that it takes from the program found in its code.

    Args:
        prefix: Python that the check relies on besides; what it defines is not the program's.
        known: a reference solution: only what it defines is the program's.
        always: names that are the program's whatever ``prefix`` defines.

    Raises:
        Malformed: it is no Python, or asks nothing of the program.
    """
    try:
        theirs = defined_names(known, imported=False)
        elsewhere = defined_names(prefix) - set(always)
        names = [name for name in free_names(code, theirs) if name not in elsewhere]
        # Some tests use what their reference solution imports.
        imports, modules = imports_of([name for name in names if name not in theirs], known)
        names = [name for name in names if name not in modules]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(f"a test is no Python: {error}") from None
    functions = dict.fromkeys([*always, *([n for n in names if n in theirs] or names)])
    if not functions:
        raise Malformed(f"a test asks nothing of the program: {code!r:.60}")
    return CheckTest("\n".join([*imports, code]), tuple(functions))


def _texts(values: Mapping[str, Any], column: str) -> list[str]:
    found = values.get(column) or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise Malformed(f"column {column!r}: expected a list of texts")
    return found


def _signatures(reference: str, functions: list[str]) -> str:
    try:
        body = ast.parse(reference).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        body = []
    defined = {item.name: item for item in body if isinstance(item, ast.FunctionDef)}
    return "\n".join(
        f"def {name}({ast.unparse(defined[name].args)}):" for name in functions if name in defined
    )


LAYOUTS = (
    Layout(
        "verifiable-corpus",
        "kind, dataset, description, problem, answer, tests",
        has("kind", "problem", "tests"),
        _verifiable,
    ),
    Layout(
        "humaneval",
        "task_id, prompt, entry_point, test",
        has("prompt", "entry_point", "test"),
        _humaneval,
        "MIT",
    ),
    Layout(
        "mbpp", "task_id, text or prompt, code, test_list", has("test_list"), _mbpp, "CC-BY-4.0"
    ),
)
