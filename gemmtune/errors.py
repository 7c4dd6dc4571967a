"""The error tree: everything gemmtune raises on purpose; each says what failed and what to do."""


class GemmtuneError(Exception):
    """Base of all errors that the command line turns into one line and an exit code."""

    exit_code = 1


class UsageError(GemmtuneError):
    """The request cannot be carried out as asked (missing file, wrong option, wrong machine)."""

    exit_code = 2


class TableError(GemmtuneError):
    """A table cannot be read; the message gives file, line, column and value."""

    exit_code = 2


class BackendError(GemmtuneError):
    """A backend or a library call failed."""


class DeviceLost(BackendError):
    """The device answers this process no more: only a new process can go on."""


class WorkerError(GemmtuneError):
    """No worker process can be started on this machine: nothing can be measured."""


class JobError(GemmtuneError):
    """The user's job could not be started, or ended before anything was learnt from it."""


class Incompatible(GemmtuneError):
    """A table was made on another GPU, library build or dialect than the one here."""

    exit_code = 3
