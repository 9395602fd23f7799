"""Tasks out of data sets in whatever layout they come."""

from collections.abc import Iterable, Iterator

from ttt_adapt.corpus.files import HUB_PREFIX
from ttt_adapt.corpus.problems import Malformed, Problem, ReadProblems
from ttt_adapt.curriculum.importers import mathematics, programs, reasoning
from ttt_adapt.curriculum.importers.layout import Draft, Layout, optional_text, text
from ttt_adapt.curriculum.importers.rows import Row, read_rows, row_stem
from ttt_adapt.curriculum.settings import TaskSourceSettings
from ttt_adapt.curriculum.tasks import Task, from_json
from ttt_adapt.errors import TaskError


def _by_columns(row: Row, settings: TaskSourceSettings) -> Iterator[Draft]:
    own_id = optional_text(row.values, settings.id_column) if settings.id_column else ""
    if settings.id_column and not own_id:
        raise Malformed(f"column {settings.id_column!r}: expected an id, found none")
    problem = text(row.values, settings.prompt_column)
    answer = row.values.get(settings.answer_column)
    if settings.choices_column or settings.kind == "choice":
        options = row.values.get(settings.choices_column or "choices")
        yield reasoning.choice_draft(problem, options, answer, own_id=own_id)
        return
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise Malformed(
            f"column {settings.answer_column!r}: expected text or a number, found {answer!r:.40}"
        )
    yield Draft(settings.kind, problem, str(answer), own_id=own_id)


COLUMNS = Layout("columns", "those that settings name", lambda values: False, _by_columns)
LAYOUTS = {
    layout.name: layout
    for layout in (*programs.LAYOUTS, *mathematics.LAYOUTS, *reasoning.LAYOUTS, COLUMNS)
}
"""In the order in which ``auto`` tries them: the most particular first."""
OWN = "tasks"
_OWN_COLUMNS = {"id", "kind", "prompt"}


def import_tasks(
    settings: TaskSourceSettings, *, problems: ReadProblems | None = None
) -> Iterator[Task]:
    """Stream tasks in an order, and under ids, that are the same on every run.

    Ids are ``<name>/<the data set's own id>``, or ``<name>/<row>`` where it has none.

    Args:
        problems: receives counts, and rows that were skipped.

    Raises:
        CorpusError: nothing is there to read.
        TaskError: no importer fits, a row is malformed (``on_error`` is ``fail``), or there is no
            task at all.
    """
    if settings.importer not in ("auto", OWN, *LAYOUTS):
        known = ", ".join(("auto", OWN, *LAYOUTS))
        raise TaskError(f"importer: expected one of {known}, found {settings.importer!r}")
    found = problems if problems is not None else ReadProblems()
    return _tasks(settings, found)


def _tasks(settings: TaskSourceSettings, found: ReadProblems) -> Iterator[Task]:
    chosen: str | None = None if settings.importer == "auto" else settings.importer
    seen: set[str] = set()
    for row in read_rows(settings, found):
        if isinstance(row, Problem):
            _report(row, settings, found)
            continue
        if chosen is None:
            chosen = fitting_importer(row)
        try:
            for task in _convert(row, chosen, settings):
                if task.id in seen:
                    raise Malformed(f"id {task.id!r:.80} is another task's already")
                seen.add(task.id)
                found.num_documents += 1
                found.num_bytes += len(task.prompt.encode())
                yield task
                if len(seen) == settings.max_tasks:
                    return
        except (Malformed, TaskError) as error:
            _report(Problem(row.location, str(error)), settings, found)
    if not seen:
        raise TaskError(f"{settings.path}: no task found: {found.summary()}")


def fitting_importer(row: Row) -> str:
    """The importer whose layout a row has.

    Raises:
        TaskError: none has it; the message names them.
    """
    if row.values.keys() >= _OWN_COLUMNS and ("answer" in row.values or "tests" in row.values):
        return OWN
    for layout in LAYOUTS.values():
        if layout.fits(row.values):
            return layout.name
    known = "; ".join(f"{layout.name}: {layout.columns}" for layout in LAYOUTS.values())
    raise TaskError(
        f"{row.location}: no importer fits the columns {', '.join(row.values)}; set importer to "
        f"'columns' and name the columns, or to one of these ({known})"
    )


def _report(problem: Problem, settings: TaskSourceSettings, found: ReadProblems) -> None:
    if settings.on_error == "fail":
        raise TaskError(f"{problem.location}: {problem.reason}; mend it, or set on_error to 'skip'")
    found.add(problem)


def _convert(row: Row, importer: str, settings: TaskSourceSettings) -> Iterable[Task]:
    if importer == OWN:
        yield from_json(row.values)
        return
    layout = LAYOUTS[importer]
    name = settings.name or row_stem(settings.path.removeprefix(HUB_PREFIX).rstrip("/"))
    licence = settings.licence or optional_text(row.values, "licence", "license") or layout.licence
    # Rows of one file are told apart by their numbers, those of a folder by file and number.
    is_alone = row.stem == row_stem(settings.path.removeprefix(HUB_PREFIX).rstrip("/"))
    place = row.location.rpartition(":")[2] if is_alone else row.location
    for number, draft in enumerate(layout.drafts(row, settings)):
        prompt = settings.prompt_template.replace("{prompt}", draft.prompt or draft.problem)
        meta = dict(draft.meta or {})
        if prompt != draft.problem:
            meta.setdefault("problem", draft.problem)
        own_id = draft.own_id or (place if number == 0 else f"{place}.{number}")
        yield Task(
            id=f"{name}/{own_id}",
            kind=draft.kind,
            prompt=prompt,
            answer=draft.answer,
            tests=draft.tests,
            source=name,
            licence=licence,
            meta=meta,
        )
