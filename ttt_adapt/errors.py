"""The errors a user of ttt-adapt can meet.

    TTTAdaptError                     everything below; a message says expected, found, remedy
    ├── UserError (ValueError)        a mistake that the caller can mend; the command line exits with 2
    │   ├── SettingsError             a setting that is unknown, out of range or contradictory
    │   ├── CorpusError               text that cannot be read as asked
    │   ├── IndexFormatError          an index that is missing, incomplete, damaged or of another format
    │   ├── FingerprintMismatchError  vectors, weights or results made by something else than expected
    │   ├── ModelError                a model that cannot be found, loaded or used as asked
    │   ├── SelectionError            candidates or queries that no selector accepts
    │   ├── OperatorInputError        tensors or states that an operator of TTT layers cannot take
    │   ├── TaskError                 tasks that cannot be read, verified or kept apart as asked
    │   ├── SandboxError              a machine that cannot run untrusted programs as asked
    │   └── ImageError                images that cannot be read as asked
    ├── MissingDependencyError        an optional package that this feature needs
    ├── BusyError                     another process holds what this one needs to write
    └── AdaptationError               learning on a query failed in a way that is not the user's

``assert`` is for what cannot happen; these are for what can.
"""


class TTTAdaptError(Exception):
    """Base class of every error that ttt-adapt raises on purpose."""

    exit_code = 1


class UserError(TTTAdaptError, ValueError):
    """A mistake the caller can mend. The command line prints it as one line and exits with 2."""

    exit_code = 2


class SettingsError(UserError):
    """A setting that is unknown, out of range or contradicts another."""


class CorpusError(UserError):
    """Text that cannot be read as asked: missing, malformed, empty."""


class IndexFormatError(UserError):
    """An index that is missing, incomplete, damaged or of a format this version cannot read."""


class FingerprintMismatchError(UserError):
    """Two things that must come from the same model or settings do not."""


class ModelError(UserError):
    """A model that cannot be found, loaded safely, or used as asked."""


class SelectionError(UserError):
    """Candidates or queries of a shape, type or value that no selector accepts."""


class OperatorInputError(UserError):
    """Tensors or states of a shape, type, device or value that an operator cannot take."""


class TaskError(UserError):
    """Tasks that cannot be read, verified or held against targets as asked."""


class SandboxError(UserError):
    """This machine, or its settings, do not let untrusted programs be run as asked."""


class ImageError(UserError):
    """Images that cannot be read as asked: missing, damaged, of another layout."""


class MissingDependencyError(TTTAdaptError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = 2


class BusyError(TTTAdaptError):
    """Another process is writing the same index, run or checkpoint."""

    exit_code = 2


class AdaptationError(TTTAdaptError):
    """Learning on a query failed for a reason that no setting explains."""
