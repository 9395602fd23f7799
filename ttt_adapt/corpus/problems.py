"""What was wrong with a corpus: malformed input located, explained and counted."""

from dataclasses import dataclass, field

MAX_LISTED = 1000


class Malformed(ValueError):
    """One record cannot be used; the message is the reason. Never leaves this room."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of malformed input.

    Attributes:
        location: ``file.jsonl:17``, or a file's path where no line can be named.
        reason: one line.
    """

    location: str
    reason: str


@dataclass(slots=True)
class ReadProblems:
    """Collects, while a corpus is read, what was found in it.

    Attributes:
        problems: the first 1000 malformed records that were skipped.
        num_documents: documents handed out.
        num_bytes: UTF-8 bytes of their text.
        num_empty: documents left out because they hold nothing but white space.
        num_skipped: malformed records that were skipped, listed or not.
        num_files: files opened, or tried; 0 for a hub data set.
        num_binary: files of a tree left out because they hold NUL bytes.
    """

    problems: list[Problem] = field(default_factory=list)
    num_documents: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    num_skipped: int = 0
    num_files: int = 0
    num_binary: int = 0

    def add(self, problem: Problem) -> None:
        """Count a skipped record, and list it while there is room."""
        self.num_skipped += 1
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{_count(self.num_documents, 'document')} ({self.num_bytes / 1e6:,.1f} MB)"]
        if self.num_empty:
            parts.append(f"{_count(self.num_empty, 'empty document')} left out")
        if self.num_binary:
            parts.append(f"{_count(self.num_binary, 'binary file')} left out")
        if self.num_skipped:
            skipped = f"{_count(self.num_skipped, 'malformed record')} skipped"
            if self.problems:
                first = self.problems[0]
                skipped += f" (first: {first.location}: {first.reason})"
            parts.append(skipped)
        return "; ".join(parts)


def explain(error: BaseException, limit: int = 300) -> str:
    """A third party's error as one line of at most ``limit`` characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
