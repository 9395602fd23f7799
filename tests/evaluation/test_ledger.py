"""The ledger: resumed, killed, shared by two writers, damaged."""

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ttt_adapt.errors import BusyError, UserError
from ttt_adapt.evaluation.ledger import LEDGER_NAME, Ledger
from ttt_adapt.evaluation.serialization import dumps, read_results
from ttt_adapt.types import Prediction, Score


def prediction(query_id: str, failure: str = "", **changes: Any) -> Prediction:
    scores = () if failure else (Score(1.5, 3, 2),)
    whole = Prediction(query_id, "code", (0,), scores, 0, None, (), failure=failure)
    return dataclasses.replace(whole, **changes)


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "run", "key") as ledger:
        assert ledger.done() == set()
        for name in ("b", "c", "a"):
            assert ledger.add(prediction(name))
        assert ledger.done() == {"a", "b", "c"}
    with Ledger.open(tmp_path / "run", "key") as ledger:
        assert [row.query_id for row in ledger.predictions()] == ["a", "b", "c"]
        assert ledger.predictions(["c", "missing", "b"]) == [prediction("c"), prediction("b")]


def test_another_key_in_the_same_folder_is_another_run(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, "one") as one, Ledger.open(tmp_path, "two") as two:
        one.add(prediction("a"))
        two.add(prediction("a", num_steps=5))
        two.add(prediction("b", failure="failed"))
        assert one.done() == {"a"}
        assert one.predictions() == [prediction("a")]
        assert one.failures() == {}
        assert two.predictions(["a"]) == [prediction("a", num_steps=5)]
        assert read_results(one.export()) == [prediction("a")]


def test_failures_are_rows_and_can_be_done_again(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, "key") as ledger:
        ledger.add(prediction("a"))
        ledger.add(prediction("b", failure="no candidates"))
        assert ledger.done() == {"a", "b"}
        assert ledger.done(retry_failures=True) == {"a"}
        assert ledger.failures() == {"b": "no candidates"}
        assert ledger.add(prediction("b", failure="again"))
        assert ledger.add(prediction("b"))
        assert ledger.failures() == {}


def test_a_success_is_never_overwritten(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, "key") as ledger:
        assert ledger.add(prediction("a"))
        assert not ledger.add(prediction("a", failure="later"))
        assert not ledger.add(prediction("a", num_steps=9))
        assert ledger.predictions() == [prediction("a")]


def test_export_is_the_same_bytes_for_the_same_rows(tmp_path: Path) -> None:
    exported = []
    for folder, order in (("one", "abc"), ("two", "cab")):
        with Ledger.open(tmp_path / folder, "key") as ledger:
            for name in order:
                ledger.add(prediction(name))
            exported.append(ledger.export().read_bytes())
            assert [p.query_id for p in read_results(ledger.export(["b", "a"]))] == ["b", "a"]
    assert exported[0] == exported[1]
    assert exported[0].decode().splitlines() == [dumps(prediction(name)) for name in "abc"]


def test_any_text_survives(tmp_path: Path) -> None:
    odd = prediction("東京 'x'; DROP TABLE results; --\x00\n", failure="\udc80 bad \x00 text")
    with Ledger.open(tmp_path, "key") as ledger:
        ledger.add(odd)
        assert ledger.predictions() == [odd]
        assert ledger.done() == {odd.query_id}
        with pytest.raises(UserError, match=r"query id '\\udc80' has no UTF-8 form"):
            ledger.add(prediction("\udc80"))


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ttt_adapt.evaluation.ledger import Ledger
    from ttt_adapt.types import Prediction, Score, Source

    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sources = tuple(Source("p", "s", "", 0.5, 0.5, 0.5, "text " * 200) for _ in range(20))
    with Ledger.open(folder, "key") as ledger:
        done = ledger.done()
        for number in range(first, last):
            if f"q{number:05d}" not in done:
                score = Score(number / 7, 3, 2)
                ledger.add(Prediction(f"q{number:05d}", "", (0,), (score,), 0, None, sources))
                print(number, flush=True)
    """
)


def start_writer(folder: Path, first: int, last: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first), str(last)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_moment_nothing_committed_is_lost(tmp_path: Path) -> None:
    for attempt in range(3):
        writer = start_writer(tmp_path, 0, 100_000)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.03 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        printed = [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        writer.stdout.close()
        with Ledger.open(tmp_path, "key") as ledger:
            done = ledger.done()
            assert {f"q{number:05d}" for number in printed} <= done
            # Whole rows, in order, each exactly once: at most the one not yet printed is more.
            assert sorted(done) == [f"q{number:05d}" for number in range(len(done))]
            assert all(
                row.scores[0].nats == number / 7 and len(row.sources) == 20
                for number, row in enumerate(ledger.predictions())
            )
    with sqlite3.connect(tmp_path / LEDGER_NAME) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_two_writers_begin_and_add_at_the_same_time(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, first, first + 40) for first in (0, 20, 40)]
    for writer in writers:
        writer.communicate(timeout=30)
        assert writer.returncode == 0
    with Ledger.open(tmp_path, "key") as ledger:
        assert sorted(ledger.done()) == [f"q{number:05d}" for number in range(80)]


def test_a_writer_that_does_not_finish_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, "key", timeout_s=0.1) as ledger:
        other = sqlite3.connect(tmp_path / LEDGER_NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError, match="another process is writing it and did not finish"):
            ledger.add(prediction("a"))
        other.execute("ROLLBACK")
        other.close()
        assert ledger.add(prediction("a"))


def test_a_new_ledger_that_stays_locked(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / LEDGER_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BusyError, match="try again, or stop the other run"):
        Ledger.open(tmp_path, "key", timeout_s=0.1)
    other.close()


def test_not_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    path.write_bytes(b"not a database, but long enough to be taken for one" * 50)
    with pytest.raises(UserError, match="not a ledger, or damaged .*; move it away"):
        Ledger.open(tmp_path, "key")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="cannot be read or written .* permissions and free space"):
        Ledger.open(tmp_path, "key")
    with pytest.raises(UserError, match="run_key must not be empty"):
        Ledger.open(tmp_path, "")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / LEDGER_NAME)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(UserError, match="ledger format 9, expected 1"):
        Ledger.open(tmp_path, "key")


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, "key") as ledger:
        ledger.add(prediction("a"))
        other = sqlite3.connect(tmp_path / LEDGER_NAME, isolation_level=None)
        other.execute("UPDATE results SET prediction = '{}'")
        other.close()
        with pytest.raises(
            UserError, match=r"ledger\.sqlite, query a: a Prediction lacks query_id"
        ):
            ledger.predictions()


def test_use_after_close_is_the_callers_mistake(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, "key")
    ledger.close()
    with pytest.raises(sqlite3.ProgrammingError):
        ledger.done()
