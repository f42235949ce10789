"""Reads pickles of other programs without running anything in them.

A pickle calls functions by name, so a small one can run code, take gigabytes (`bytearray(n)`) or take for ever (a key
of nested tuples, whose hash visits each element as often as it is named). `InertUnpickler` calls nothing: each class
and function is `Inert`, unless a subclass allows it. `check_claims` reads a file of `torch.save` so, before torch does,
and refuses the calls that torch would make for objects larger than the file.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

_LEGACY_PICKLES = 5
"""In a file before torch 1.6: a magic number, the version, facts about the machine, the object, names of storages."""
_GIVE_STATE: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]
_KEYS = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
"""Operation -> where on the stack it finds the keys that it hashes."""


class Inert:
    """Stands for an object of a class that is not loaded. It holds nothing, and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> Inert:  # noqa: ARG004 - any object's arguments
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class InertUnpickler(pickle._Unpickler):
    """The unpickler in Python: the one in C has no hook for each operation."""

    with_state: ClassVar[tuple[type, ...]] = ()
    """Classes whose objects get a state. A state given to a class would change that class in this process."""
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:  # noqa: ARG002 - a subclass may look
        return Inert

    def _give_state(self) -> None:
        target = self.stack[-2]
        if type(target) is not Inert and type(target) not in self.with_state:
            raise pickle.UnpicklingError(f"it gives a state to an object of {type(target).__name__}")
        state = self.stack[-1]
        for part in state if isinstance(state, tuple) else (state,):
            # The object may become a key.
            refuse_nested(list(part.values()) if isinstance(part, dict) else ())
        _GIVE_STATE(self)

    dispatch[pickle.BUILD[0]] = _give_state


def _with_plain_keys(operation: bytes, keys: slice) -> Callable[[Any], None]:
    run: Callable[[Any], None] = pickle._Unpickler.dispatch[operation[0]]

    def check_and_run(unpickler: InertUnpickler) -> None:
        refuse_nested(unpickler.stack[keys])
        run(unpickler)

    return check_and_run


InertUnpickler.dispatch |= {operation[0]: _with_plain_keys(operation, keys) for operation, keys in _KEYS.items()}
# It takes the memory before it reads the bytes.
del InertUnpickler.dispatch[pickle.BYTEARRAY8[0]]


def refuse_nested(keys: Any) -> None:
    """Raises UnpicklingError for a list with a key whose hash could take for ever."""
    for key in keys if isinstance(keys, (list, tuple)) else ():
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, (tuple, frozenset)) for part in parts):
            raise pickle.UnpicklingError("a key is a tuple of tuples")


def check_claims(file: BinaryIO) -> None:
    """Reads a file of `torch.save`, and returns to its beginning.

    Raises ValueError if it is not one, or its content is larger than the file, and UnpicklingError if torch would make
    large objects, or would need far more time than its size needs.
    """
    try:
        if zipfile.is_zipfile(file):
            _check_archive(file)
        else:
            # The format before torch 1.6. Its tensors are read from the file as they are.
            file.seek(0)
            for _ in range(_LEGACY_PICKLES):
                _Claims(file).load()
        file.seek(0)
    except (OSError, ValueError, pickle.UnpicklingError):
        raise
    # A file that torch did not write raises whichever error occurs first.
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _check_archive(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        content_bytes = sum(member.file_size for member in archive.infolist())
        file_bytes = file.seek(0, io.SEEK_END)
        if content_bytes > file_bytes:
            raise ValueError(
                f"it has {file_bytes:,} bytes, but claims to hold {content_bytes:,}: save it with torch.save, which "
                "does not compress"
            )
        for name in archive.namelist():
            if name.rpartition("/")[2] == "data.pkl":
                _Claims(io.BytesIO(archive.read(name))).load()


class _Result(Inert):
    """The result of a call that was not made."""

    def __call__(self, *_: object) -> _Result:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Function:
    """A function or class that torch would call."""

    module: str
    name: str

    def __call__(self, *args: Any) -> _Result:
        if not self._is_small(args):
            raise pickle.UnpicklingError(f"it calls {self.name} for an object that is not in the file")
        for arg in args:
            refuse_nested(arg)
            for pair in arg if isinstance(arg, list) else ():
                refuse_nested(pair)
        return _Result()

    def _is_small(self, args: tuple[Any, ...]) -> bool:
        """Whether the result is about as large as the arguments."""
        if self.module == "_codecs":
            # This is how bytes are stored. Other codecs write several bytes for one.
            return args[1:] in ((), ("latin1",))
        if self.name == "bytearray":
            return not any(isinstance(arg, int) for arg in args)
        if self.name == "_rebuild_from_type_v2":
            # It calls its first argument.
            return isinstance(args[0], _Function) and args[0].name.startswith("_rebuild_tensor")
        return not (args and self.module.startswith("torch") and self.name.endswith(("Tensor", "Storage")))


class _Claims(InertUnpickler):
    """Makes no call, and raises UnpicklingError where torch's unpickler would make one for a large object."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(InertUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return _Function(module, name)

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - a storage, which torch maps
        return _Result()

    def _drop_state(self) -> None:
        self.stack.pop()

    dispatch[pickle.BUILD[0]] = _drop_state
    # A class makes an object as a function does.
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]]
