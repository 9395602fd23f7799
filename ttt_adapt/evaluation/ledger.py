"""A run's results as they come: one row a query, on disk before the next query begins.

An evaluation may take hours and be killed at any moment. Each finished query is one committed row
in ``ledger.sqlite`` (SQLite's write-ahead log), so a second start does only what is missing. Rows
belong to a ``run_key``, a hash of everything the results depend on: runs with other settings may
share the folder, and never see each other's rows.

A query that failed is a row too, with why; a success is never overwritten.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

from ttt_adapt.closing import Closing
from ttt_adapt.errors import BusyError, UserError
from ttt_adapt.evaluation.serialization import dumps, loads, write_results
from ttt_adapt.types import Prediction

LEDGER_NAME = "ledger.sqlite"
RESULTS_NAME = "results.jsonl"
_FORMAT_VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS results (
    run_key TEXT NOT NULL,
    query_id TEXT NOT NULL,
    failure TEXT NOT NULL,
    prediction TEXT NOT NULL,
    PRIMARY KEY (run_key, query_id)
)
"""
_ADD = """
INSERT INTO results (run_key, query_id, failure, prediction) VALUES (?, ?, ?, ?)
ON CONFLICT (run_key, query_id) DO UPDATE
SET failure = excluded.failure, prediction = excluded.prediction
WHERE results.failure != ''
"""

Result = TypeVar("Result")


class Ledger(Closing):
    """The rows of one run in one folder. Several processes may add to it at the same time.

    Use it as a context manager, or call :meth:`close`. A ledger belongs to the thread that opened
    it.
    """

    def __init__(self, connection: sqlite3.Connection, folder: Path, run_key: str) -> None:
        self._connection = connection
        self.folder = folder
        self.run_key = run_key

    @classmethod
    def open(cls, folder: Path, run_key: str, *, timeout_s: float = 30.0) -> Self:
        """Open, or begin, the ledger in ``folder``.

        Args:
            folder: where ``ledger.sqlite`` lives; made if missing.
            run_key: everything the results depend on, hashed; rows of other keys stay unseen.
            timeout_s: how long to wait, here and later, for another process that is writing.

        Raises:
            UserError: ``run_key`` is empty, or the file is no ledger of this format.
            BusyError: another process kept the ledger locked for longer than ``timeout_s``.
        """
        if not run_key:
            raise UserError("run_key must not be empty: it is what keeps runs apart")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEDGER_NAME
        with _errors(path):
            connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None)
        try:
            with _errors(path):
                _retry(lambda: _prepare(connection, path), timeout_s)
        except BaseException:
            connection.close()
            raise
        return cls(connection, folder, run_key)

    def done(self, *, retry_failures: bool = False) -> set[str]:
        """Ids of the queries that need no work; failed ones count unless ``retry_failures``."""
        query = "SELECT query_id FROM results WHERE run_key = ?"
        if retry_failures:
            query += " AND failure = ''"
        with _errors(self._path):
            return {row[0] for row in self._connection.execute(query, (self.run_key,))}

    def add(self, prediction: Prediction) -> bool:
        """Commit one query's row; when this returns it is on disk.

        Returns whether the row was stored: it replaces a failure, but never a success (another
        process may have finished the same query first).

        Raises:
            UserError: the query's id has no UTF-8 form.
            BusyError: another process kept the ledger locked too long.
        """
        row = (self.run_key, prediction.query_id, prediction.failure, dumps(prediction))
        try:
            with _errors(self._path):
                # One statement in autocommit mode: a transaction of its own.
                return self._connection.execute(_ADD, _utf8_safe(row)).rowcount > 0
        except UnicodeEncodeError:
            raise UserError(
                f"query id {prediction.query_id!a} has no UTF-8 form; rename the document"
            ) from None

    def predictions(self, query_ids: Iterable[str] | None = None) -> list[Prediction]:
        """Predictions of this run in the order of ``query_ids`` (ids without a row are left out).

        ``None``: all of them, sorted by query id. Failed queries are included.
        """
        return list(self._read(query_ids))

    def failures(self) -> dict[str, str]:
        """Why, for each query that failed, by query id."""
        query = (
            "SELECT query_id, failure FROM results WHERE run_key = ? AND failure != '' "
            "ORDER BY query_id"
        )
        with _errors(self._path):
            return dict(self._connection.execute(query, (self.run_key,)).fetchall())

    def export(self, query_ids: Sequence[str] | None = None) -> Path:
        """Write ``results.jsonl`` beside the ledger, atomically; the order is :meth:`predictions`'.

        The same rows make the same bytes, however often the run was interrupted.
        """
        path = self.folder / RESULTS_NAME
        write_results(path, self._read(query_ids))
        return path

    def close(self) -> None:
        """Close the file; what was added stays."""
        self._connection.close()

    @property
    def _path(self) -> Path:
        return self.folder / LEDGER_NAME

    def _read(self, query_ids: Iterable[str] | None) -> Iterator[Prediction]:
        if query_ids is None:
            query_ids = sorted(self.done())
        query = "SELECT prediction FROM results WHERE run_key = ? AND query_id = ?"
        for query_id in query_ids:
            with _errors(self._path):
                row = self._connection.execute(query, (self.run_key, query_id)).fetchone()
            if row is not None:
                yield loads(Prediction, row[0], where=f"{self._path}, query {query_id}")


def _utf8_safe(row: tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    """The failure column is for people and may hold any text; the JSON beside it is exact."""
    run_key, query_id, failure, prediction = row
    return run_key, query_id, failure.encode("utf-8", "replace").decode("utf-8"), prediction


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _FORMAT_VERSION):
        raise UserError(
            f"{path}: ledger format {version}, expected {_FORMAT_VERSION}; use another folder, or "
            "the version of ttt-adapt that wrote it"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode the default survives a kill but not a power cut; a query costs seconds, an
    # fsync milliseconds.
    connection.execute("PRAGMA synchronous = FULL")
    if version == 0:
        connection.execute("BEGIN IMMEDIATE")
        with connection:  # commits, or rolls back
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {_FORMAT_VERSION}")


def _retry(action: Callable[[], Result], timeout_s: float) -> Result:
    """SQLite does not wait by itself when two processes switch a new file to WAL at once."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


def _is_busy(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a closed ledger or another thread's: not the file's fault
    except sqlite3.OperationalError as error:
        if _is_busy(error):
            raise BusyError(
                f"{path}: another process is writing it and did not finish in time; try again, "
                "or stop the other run"
            ) from None
        raise UserError(
            f"{path}: cannot be read or written ({error}); check permissions and free space"
        ) from None
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{path}: not a ledger, or damaged ({error}); move it away, or use another folder"
        ) from None
