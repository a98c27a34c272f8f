"""What a path leads to: regular files alone, replaced as a whole, their permissions kept."""

import os
import socket
import stat
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqx

from ..oracles.refusals import assert_error


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# What is no regular file.


def no_files(folder):
    """Paths of things that are no regular files, by kind."""
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "to folder").symlink_to(folder / "folder")
    return {
        "a FIFO": folder / "fifo",
        "FIFO": folder / "link",
        "a folder": folder / "folder",
        "folder": folder / "to folder",
        "a device": "/dev/null",
        "device": "/dev/zero",
    }


def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path):
    for words, path in no_files(tmp_path).items():
        before = os.lstat(path)
        for call in (jqx.load, jqx.interop.Archive, lambda p: jqx.save(p, jnp.ones(2))):
            error = assert_error(lambda c=call, p=path: c(p), words, str(path), error=OSError)
            assert isinstance(error, IsADirectoryError) == ("folder" in words)
        assert os.lstat(path).st_ino == before.st_ino
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind("socket")
        assert_error(lambda: jqx.load("socket"), "a socket", error=OSError)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize("path", [3, None, b"bytes", ["a"], 1.5])
def test_what_is_no_path_is_refused(path):
    for call in (jqx.load, lambda p: jqx.save(p, jnp.ones(2))):
        assert_error(
            lambda c=call: c(path), "is neither a string nor a pathlib.Path", error=TypeError
        )


def test_names_of_no_file_are_refused(tmp_path):
    for name in ("", "a\0b"):
        for call in (jqx.load, lambda p: jqx.save(p, jnp.ones(2))):
            assert_error(lambda c=call, n=name: c(n), "not the name of a file")
    assert_error(
        lambda: jqx.save(f"{tmp_path}/new/", jnp.ones(2)), "the name of a folder", error=OSError
    )


def test_errors_of_files_use_the_name_that_was_given(tmp_path):
    ones = jnp.ones(2)
    missing = tmp_path / "absent" / "x"
    assert_error(lambda: jqx.load(missing), f"'{missing}'", error=FileNotFoundError)
    error = assert_error(
        lambda: jqx.save(missing, ones), f"'{missing}'", "no folder", error=FileNotFoundError
    )
    assert ".part" not in str(error)
    (tmp_path / "file").write_bytes(b"x")
    below = tmp_path / "file" / "x"
    assert_error(lambda: jqx.load(below), f"'{below}'", error=NotADirectoryError)
    assert_error(lambda: jqx.save(below, ones), f"'{below}'", error=OSError)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for call in (jqx.load, lambda p: jqx.save(p, ones)):
        assert_error(lambda c=call: c(tmp_path / "loop"), "loop", error=OSError)
        assert_error(lambda c=call: c(tmp_path / ("n" * 300)), "nnn", error=OSError)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_long_names_and_links_to_nothing_are_written(tmp_path):
    long = tmp_path / ("é" * 127)
    jqx.save(long, jnp.ones(2))
    (tmp_path / "link").symlink_to("target")
    jqx.save(tmp_path / "link", jnp.ones(2))
    assert sorted(os.listdir(tmp_path)) == ["link", "target", long.name]
    assert (tmp_path / "link").is_symlink()


# Permissions.


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o777, 0o400])
def test_permissions_stay(path, mode):
    jqx.save(path, jnp.ones(2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(mode)
    link = path.with_name("link")
    link.symlink_to(path)
    for name in (path, link):
        jqx.save(name, jnp.zeros(2))
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert link.is_symlink() and not path.is_symlink()
    assert jqx.load(path).tolist() == [0, 0]


@pytest.mark.usefixtures("umask")
def test_a_temporary_file_is_as_private_as_the_file(path):
    jqx.save(path, jnp.ones(2))
    path.chmod(0o600)
    modes = []

    def leaves():
        modes.extend(stat.S_IMODE(part.stat().st_mode) for part in path.parent.glob("*.part"))
        yield jnp.ones(2)

    jqx.interop.save_leaves(path, [jax.ShapeDtypeStruct((2,), jnp.float32)], leaves())
    assert modes == [0o600]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
@pytest.mark.usefixtures("umask")
def test_the_owner_stays_where_the_system_allows(path, monkeypatch):
    jqx.save(path, jnp.ones(2))
    os.chown(path, 1234, 5678)
    path.chmod(0o660)
    jqx.save(path, jnp.ones(2))
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 5678, 0o660)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    jqx.save(path, jnp.ones(2))
    status = path.stat()  # another group may do no more than everybody
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (os.getgid(), 0o600)


# Disks that are full, and files that become shorter.

FULL = """
import os, resource, signal, sys
import numpy as np
import jqx
path, count = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
try:
    jqx.save(path, {str(i): np.zeros(1000 // count, "f4") for i in range(count)})
except OSError as error:
    print(type(error).__name__, error.errno, error)
"""


@pytest.mark.parametrize("count", [1, 10])
def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(path, count):
    path.write_bytes(b"old")
    run = [sys.executable, "-c", FULL, str(path), str(count)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OSError 27 ") and "fix: " in done.stdout
    assert f"'{path}' cannot be written" in done.stdout and ".part" not in done.stdout
    assert os.listdir(path.parent) == [path.name] and path.read_bytes() == b"old"


@pytest.mark.parametrize("function", ["open", "fsync", "replace", "chmod"])
def test_an_error_at_any_place_leaves_no_other_file(path, function, monkeypatch):
    path.write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        error = assert_error(lambda: jqx.save(path, jnp.ones(2)), f"'{path}'", error=OSError)
    assert error.errno == 28
    assert os.listdir(path.parent) == [path.name] and path.read_bytes() == b"old"


def test_a_file_that_becomes_shorter_is_an_error(path):
    jqx.save(path, {"a": np.ones(1 << 16, np.float32), "b": np.ones(2, np.float32)})
    with jqx.interop.Archive(path) as archive:
        os.truncate(path, 4096)
        for read in (archive.read, archive.view):
            for name in "ab":
                assert_error(lambda r=read, n=name: r(n), "become shorter", error=OSError)
    assert_error(lambda: jqx.load(path), "is truncated")
    assert_error(lambda: archive.read("a"), "is closed")
    assert "SIGBUS" in jqx.interop.Archive.view.__doc__


def test_leaves_are_read_in_threads(path):
    tree = {str(i): np.full(10_000, i, np.int32) for i in range(20)}
    jqx.save(path, tree)
    leaves = {}
    with jqx.interop.Archive(path) as archive:
        threads = [
            threading.Thread(target=lambda n=n: leaves.update({n: archive.read(n)})) for n in tree
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(set(np.asarray(leaves[name]).tolist()) == {int(name)} for name in tree)
