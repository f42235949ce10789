"""Reads pickles of other programs without running anything in them.

A pickle calls functions by name, so a small one can run code, take gigabytes (`bytearray(n)`) or take for ever (a key
of nested tuples, whose hash visits each element as often as it is named). `InertUnpickler` calls nothing: each class
and function is `Inert`, unless a subclass allows it. `check_claims` reads a file of `torch.save` so, before torch does,
and refuses the calls that torch would make for objects that are not in the file.

The pickle that `check_claims` reads comes from torch's own reader of archives, which finds records without regard to
case: with another reader, a file could show one pickle to the check, and another to torch.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Final

import torch

_ARCHIVE: Final = b"PK\x03\x04"
"""The first bytes of an archive, by which torch tells it from its format before version 1.6."""
_LEGACY_PICKLES = 5
"""In a file before torch 1.6: a magic number, the version, facts about the machine, the object, names of storages."""
_SHOWN = 200
PICKLE: Final = "data.pkl"
"""The record of the object in an archive. Those of its tensors are `data/KEY`."""
_END, _END_64, _PLACE_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
"""The last records of an archive: the end of the directory, the same with 64 bits (before it), and its place (between).
"""
_DENSE: Final = frozenset(
    {
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    }
)
"""Functions of torch that make a tensor of stored numbers, and copy none of them."""
_ITERATE: Final = frozenset({"OrderedDict", "Counter", "set", "Size", "bytearray", "complex", "encode"})
"""They would read each element of a tensor, which may be one stored number many times, or take its value as a size."""
_MOST_CHOSEN_HASHES: Final = 10_000
"""Keys whose hash a file can choose: tuples and large numbers. A key is compared with all that have the same hash."""
_HASH_BITS: Final = 64
_LAST_PROTOCOL: Final = 3
"""torch reads tensors alone from no later one. Its own is 2."""
_GIVE_STATE: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]
_KEYS = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
"""Operation -> where on the stack it finds the keys that it hashes."""
_CALLS = (pickle.REDUCE, pickle.NEWOBJ)
"""Operations that make an object: of a function or class and its arguments."""


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
    read: Callable[[int], bytes]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        """`size_bytes`: of the file. The arguments of all calls together are no larger: a pickle can name one large
        argument many times.
        """
        super().__init__(file)
        self._left = size_bytes
        self._chosen_hashes = 0

    def find_class(self, module: str, name: str) -> Any:  # noqa: ARG002 - a subclass may look
        return Inert

    def check_keys(self, keys: Any) -> None:
        """Raises UnpicklingError for keys of a dict or set whose hashes or comparisons could take for ever."""
        refuse_nested(keys)
        self._chosen_hashes += sum(
            isinstance(key, tuple) or (isinstance(key, int) and key.bit_length() > _HASH_BITS) for key in keys
        )
        if self._chosen_hashes > _MOST_CHOSEN_HASHES:
            raise pickle.UnpicklingError(f"more than {_MOST_CHOSEN_HASHES:,} keys are tuples or large numbers")

    def check_call(self, function: Any, args: Any) -> None:
        """Raises UnpicklingError for a call that could take more memory than the file, or for ever."""
        if function is not Inert:
            self.spend(args)
            # The result may become a key.
            refuse_nested(args)

    def spend(self, args: Any) -> None:
        """Counts the arguments of a call. Raises UnpicklingError if those of all calls are larger than the file."""
        self._left -= len(args) + sum(len(arg) for arg in args if isinstance(arg, Sized))
        if self._left < 0:
            raise pickle.UnpicklingError("it makes objects that are larger than the file")

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
        unpickler.check_keys(unpickler.stack[keys])
        run(unpickler)

    return check_and_run


def _with_small_arguments(operation: bytes) -> Callable[[Any], None]:
    run: Callable[[Any], None] = pickle._Unpickler.dispatch[operation[0]]

    def check_and_run(unpickler: InertUnpickler) -> None:
        unpickler.check_call(*unpickler.stack[-2:])
        run(unpickler)

    return check_and_run


InertUnpickler.dispatch |= {operation[0]: _with_plain_keys(operation, keys) for operation, keys in _KEYS.items()}
InertUnpickler.dispatch |= {operation[0]: _with_small_arguments(operation) for operation in _CALLS}
# The first takes the memory before it reads the bytes. No writer of today uses the others, which call too.
for _operation in (pickle.BYTEARRAY8, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):
    del InertUnpickler.dispatch[_operation[0]]


def refuse_nested(keys: Any) -> None:
    """Raises UnpicklingError for a list with a key whose hash could take for ever."""
    for key in keys if isinstance(keys, (list, tuple)) else ():
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, (tuple, frozenset)) for part in parts):
            raise pickle.UnpicklingError("a key is a tuple of tuples")


@dataclass(frozen=True, slots=True)
class Claims:
    """What `check_claims` found in a file."""

    is_archive: bool
    made_by: str
    """The class or function that would make the archive's object; empty: it is of a type that pickles know."""


def check_claims(file: BinaryIO) -> Claims:
    """Reads a file of `torch.save`, and goes back to its beginning.

    Raises ValueError if it is not one, or its content is larger than the file, and UnpicklingError if torch would make
    large objects, or would need far more time than its size needs.
    """
    try:
        file_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
        is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        file.seek(0)
        made_by = ""
        if is_archive:
            found = _check_archive(file, file_bytes)
            made_by = found.made_by if isinstance(found, _Result) else ""
        else:
            # The format before torch 1.6. Its tensors are read from the file as they are.
            for _ in range(_LEGACY_PICKLES):
                _Claims(file, file_bytes).load()
        file.seek(0)
        return Claims(is_archive, made_by[:_SHOWN])
    except (OSError, ValueError, pickle.UnpicklingError):
        raise
    # A file that torch did not write raises whichever error occurs first.
    except Exception as error:
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from error


def _check_archive(file: BinaryIO, file_bytes: int) -> Any:
    """The object, as `_Claims` reads it."""
    content = open_archive(file, file_bytes).get_record(PICKLE)
    return _Claims(io.BytesIO(content), file_bytes).load()


def open_archive(file: BinaryIO, file_bytes: int) -> Any:
    """torch's own reader of an archive, whose records are no larger than the file.

    Raises ValueError if they are, or if another reader could find other records, and BadZipFile.
    """
    with zipfile.ZipFile(file) as archive:
        content_bytes = sum(member.file_size for member in archive.infolist())
        directory = archive.start_dir
    if content_bytes > file_bytes:
        raise ValueError(
            f"it has {file_bytes:,} bytes, but claims to hold {content_bytes:,}: save it with torch.save, which "
            "does not compress"
        )
    if _directory(file, file_bytes) != directory:
        # Then readers differ in which records the archive has, and the sizes above may be of others.
        raise ValueError("its directory is not at its end, where torch.save writes it")
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    spellings = Counter(name.casefold() for name in reader.get_all_records())
    twice = [name for name, count in spellings.items() if count > 1]
    if twice:
        raise ValueError(f"it has {twice[0]} more than once, or in different case")
    return reader


def _directory(file: BinaryIO, file_bytes: int) -> int | None:
    """Where the directory begins, if it and its end are the last things in the archive."""
    end_at = file_bytes - _END.size
    file.seek(max(0, end_at - _PLACE_64.size - _END_64.size))
    last = file.read()
    signature, *_, size, start, comment_bytes = _END.unpack(last[-_END.size :])
    if signature != b"PK\x05\x06" or comment_bytes:
        return None
    signature, _, place, _ = _PLACE_64.unpack(last[-_END.size - _PLACE_64.size : -_END.size])
    if signature == b"PK\x06\x07":
        end_at -= _PLACE_64.size + _END_64.size
        signature, *_, size, start = _END_64.unpack(last[: _END_64.size])
        if signature != b"PK\x06\x06" or place != end_at:
            return None
    return int(start) if start + size == end_at else None


class _Result(Inert):
    """The result of a call that was not made."""

    made_by = ""
    """The path of the class or function."""

    def __call__(self, *_: object) -> _Result:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, _: object) -> None:
        raise pickle.UnpicklingError("it has a list of a class that is not loaded, such as a deque")


class _Bytes(_Result):
    """Bytes, which a call would make of text."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function or class that torch would call. torch knows it by its path, however a pickle divides the path into
    module and name.
    """

    path: str

    def __call__(self, *_: object) -> _Result:
        result = _Bytes() if self.path == "_codecs.encode" else _Result()
        result.made_by = self.path
        return result


def _is_small(function: _Function, name: str, args: Any) -> bool:
    """Whether the result is about as large as the arguments. `name`: the last part of the path."""
    if name in _ITERATE and any(
        isinstance(each, _Result) and not isinstance(each, _Bytes)
        for arg in args
        for each in (arg, *(arg if name == "OrderedDict" and isinstance(arg, list) else ()))
    ):
        return False
    if name == "encode":
        # This is how bytes are stored. Other codecs write several bytes for one.
        return args[1:] in ((), ("latin1",))
    if name == "bytearray":
        return not any(isinstance(arg, int) for arg in args)
    if name == "_rebuild_from_type_v2":
        # It calls its first argument.
        return isinstance(args[0], _Function) and args[0].path.removeprefix("torch._utils.") in _DENSE
    return not (args and function.path.startswith("torch.") and name.endswith(("Tensor", "Storage")))


class _Claims(InertUnpickler):
    """Makes no call, and raises UnpicklingError where torch's unpickler would make one for a large object."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(InertUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return _Function(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - a storage, which torch maps
        return _Result()

    def check_call(self, function: Any, args: Any) -> None:
        self.spend(args)
        if not isinstance(function, _Function):
            return
        name = function.path.rpartition(".")[2]
        if function.path.startswith("torch._utils.") and name not in _DENSE:
            raise ValueError(f"{name} makes what is not a plain tensor: save it as a dense one")
        if not _is_small(function, name, args):
            raise pickle.UnpicklingError(f"it calls {name} for an object that is not in the file")
        for arg in args:
            if isinstance(arg, (list, tuple)):
                self.check_keys(arg)
            for pair in arg if isinstance(arg, list) else ():
                refuse_nested(pair)

    def _drop_state(self) -> None:
        self.stack.pop()

    def _check_protocol(self) -> None:
        protocol = self.read(1)[0]
        if protocol > _LAST_PROTOCOL:
            raise pickle.UnpicklingError(f"its pickle has protocol {protocol}, and the one of torch.save is 2")

    dispatch[pickle.BUILD[0]] = _drop_state
    dispatch[pickle.PROTO[0]] = _check_protocol
    # A class makes an object as a function does.
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]]
