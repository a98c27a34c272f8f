"""Opens and replaces regular files; anything else is an error."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from io import BufferedReader
from types import TracebackType
from typing import Any, NoReturn

from .checks import shown
from .errors import fail, message

Path = str | os.PathLike[str]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def as_path(function: str, path: Any) -> str:
    """Returns a path as a string, after checking it."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        problem = f"`path` is neither a string nor a pathlib.Path: {type(path).__name__}."
        raise fail(function, problem, fix="pass the name of a file.", error=TypeError)
    if not (text and "\0" not in text):
        problem = f"`path` == {shown(text)} is not the name of a file."
        raise fail(function, problem, fix="pass the name of a file.")
    return str(text)


def open_regular(function: str, path: str) -> BufferedReader:
    """Opens a file for reading, after checking that it is a regular file, which cannot block."""
    with naming_file(function, path, "cannot be opened", "a file that may be read"):
        _check_regular(function, path, os.stat(path))
        return open(path, "rb")


class Replacement:
    """A file that replaces `path` once it is complete. A context manager.

    Data is written to a temporary file in the same folder. If an error occurs first, nothing has
    changed and nothing is left. What a killed process has left is removed by the next replacement
    of the same file: a writer locks its temporary file, so a file that nobody has locked has no
    writer. A link stays a link: its target is replaced. The new file takes the
    permissions of the old one, and its owner and group if the system allows it. If the group cannot
    be kept, the new group has only the permissions that all others have.

    Raises:
      OSError: if `path` is not a regular file, or its folder does not exist or is not writable.
    """

    def __init__(self, function: str, path: Path) -> None:
        self.path = as_path(function, path)
        self._function = function
        with self._written():
            self._old = self._status()
        self._target = pathlib.Path(os.path.realpath(self.path))
        self._part = new_part(self._target)
        folder = self._target.parent
        if not folder.is_dir():
            problem = f"{self.path!r} cannot be written: there is no folder {str(folder)!r}."
            fix = "create it first, for example with os.makedirs."
            raise fail(function, problem, fix=fix, error=FileNotFoundError)

    def __enter__(self) -> "Replacement":
        mode = 0o666 if self._old is None else 0o600  # minus the umask
        with self._written():
            remove_left(self._target)
            while True:
                self._file = open(self._part, "xb", opener=lambda p, flags: os.open(p, flags, mode))
                with contextlib.suppress(OSError):  # a file system without locks
                    lock(self._file)
                if self._part.exists():  # nobody has removed it before it was locked
                    return self
                self._file.close()

    @property
    def file(self) -> Any:
        """The temporary file, open for writing."""
        return self._file

    def write(self, start: int, data: Any) -> None:
        """Writes bytes at a position."""
        with self._written():
            self._file.seek(start)
            self._file.write(data)

    def commit(self) -> None:
        """Moves the file to `path`."""
        with self._written():
            self._file.flush()
            if self._old is not None:
                _hand_on(self._old, self._part)
            os.fsync(self._file.fileno())
            if _fcntl() is None:  # only such systems refuse to replace an open file
                self._file.close()
            os.replace(self._part, self._target)
            self._file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # the disk is still full
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _status(self) -> os.stat_result | None:
        """Returns the status of the file to be replaced, if there is one."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            if os.path.basename(self.path) in ("", ".", ".."):
                _refuse_kind(self._function, self.path, "the name of a folder", IsADirectoryError)
            return None
        _check_regular(self._function, self.path, status)
        return status

    def _written(self) -> contextlib.AbstractContextManager[None]:
        return naming_file(
            self._function,
            self.path,
            "cannot be written",
            "a writable folder with enough space",
        )


def new_part(target: pathlib.Path) -> pathlib.Path:
    """Returns a new name of a temporary file or folder next to a target."""
    return target.with_name(f"{target.name[:50]}.{uuid.uuid4().hex}.part")


def remove_left(target: pathlib.Path) -> None:
    """Removes the temporary files and folders of a target whose writers were killed. Where files
    cannot be locked, writers are not known and nothing is removed.
    """
    if _fcntl() is None:
        return
    name = re.compile(re.escape(target.name[:50]) + r"\.[0-9a-f]{32}\.part")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with contextlib.suppress(OSError):  # another process was faster, or owns it
                _remove_free(path)


def _remove_free(path: pathlib.Path) -> None:
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        if lock(number, wait=False):
            is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
            (shutil.rmtree if is_folder else os.unlink)(path)
    finally:
        os.close(number)


def _fcntl() -> Any:
    """Returns the module that locks files, if the system has it."""
    has_fcntl = importlib.util.find_spec("fcntl") is not None
    return importlib.import_module("fcntl") if has_fcntl else None


def lock(file: Any, *, wait: bool = True) -> bool:
    """Locks an open file for this process; `False` if another process has locked it."""
    fcntl = _fcntl()
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _hand_on(old: os.stat_result, path: pathlib.Path) -> None:
    """Gives a file the owner, group and permissions of another."""
    mode = stat.S_IMODE(old.st_mode)
    if hasattr(os, "chown"):
        new = os.stat(path)
        for owner, group in ((-1, old.st_gid), (old.st_uid, -1)):
            if owner not in (-1, new.st_uid) or group not in (-1, new.st_gid):
                with contextlib.suppress(OSError):
                    os.chown(path, owner, group)
        if os.stat(path).st_gid != old.st_gid:
            mode &= ~0o070 | (mode & 0o007) << 3
    if stat.S_IMODE(os.stat(path).st_mode) != mode:
        os.chmod(path, mode)


def _check_regular(function: str, path: str, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        error = IsADirectoryError if kind == stat.S_IFDIR else OSError
        _refuse_kind(function, path, _KINDS.get(kind, "not a regular file"), error)


def _refuse_kind(function: str, path: str, kind: str, error: type[OSError]) -> NoReturn:
    problem = f"{path!r} is not a file."
    fix = "pass the name of a file."
    raise fail(function, problem, given=kind, expected="a regular file", fix=fix, error=error)


@contextlib.contextmanager
def naming_file(function: str, path: str, problem: str, expected: str) -> Iterator[None]:
    """Adds the path that the user passed to errors of the system."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by jqx
            raise
        text = message(
            function,
            f"{path!r} {problem}.",
            given=error.strerror or str(error),
            expected=expected,
            fix="check its name and permissions.",
        )
        named = type(error)(text)
        named.errno = error.errno
        raise named from None
