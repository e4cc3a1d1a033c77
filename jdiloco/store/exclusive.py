"""Giving a finished file its name, unless the name is taken: in one step that no other can split.

`os.link` does it on every local file system and over NFS. Some mounts have no hard links (FAT,
SMB, many FUSE ones); Linux can then rename without replacing. The two also exclude each other, so
programs that found different ways may share a folder. Creating the final file with O_EXCL would
be exclusive too but shows it half written, and for ever so when the writer dies; a lock file would
outlive its owner. So a file system with neither way is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os

from jdiloco.errors import StoreIgnoresConditions

_UNSUPPORTED = {
    errno.EPERM,  # What Linux says of `link` on a file system without hard links.
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EXDEV,  # A folder over several mounts; or one that pretends to be.
}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def publish(temporary: str, path: str) -> bool:
    """Gives the file `temporary` the name `path`; False when `path` is taken.

    `temporary` may or may not be there afterwards. Raises OSError when the outcome is open, and
    StoreIgnoresConditions when this file system cannot do it.
    """
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return _is_ours(temporary, path)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        refused = error
    try:
        rename_without_replacing(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        raise StoreIgnoresConditions(
            f"`{os.path.dirname(path)}` is on a file system that can neither link "
            f"({_name(refused)}) nor rename without replacing ({_name(error)}), so two writers of "
            "one key could both succeed. Choose a folder on a local disk or NFS, or a bucket."
        ) from error


def rename_without_replacing(source: str, target: str) -> None:
    """Renames, or raises FileExistsError. Raises ENOSYS where there is no `renameat2`."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target)
    old, new = os.fsencode(source), os.fsencode(target)
    if renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, target)


def _is_ours(temporary: str, path: str) -> bool:
    """An NFS client whose answer got lost asks again and is told that its own link exists."""
    try:
        return os.path.samestat(os.stat(temporary), os.lstat(path))
    except FileNotFoundError:
        return False  # Deleted meanwhile.


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))
