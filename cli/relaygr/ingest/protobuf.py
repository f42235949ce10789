"""Reads messages of Protobuf whose descriptor is known (`relaygr.ingest.registered`).

    message indexes | the message                         indexes: how many, and each, as zigzag numbers of Avro

The indexes lead from the messages of a file to one of them: [2, 0] is the first message inside the third one. A single
0 stands for [0], the first message.

Of the descriptors only enums and the fields that are used are kept. The parser passes over other fields as unknown
ones, whatever they are. Registries differ in those: Karapace gives maps a type that no parser knows, and files that
Confluent's registry knows by itself, such as `confluent/meta.proto`, are imported without a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, Final, NoReturn

from google.protobuf import message_factory, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from relaygr.ingest.avro import Used, check_length, decimal_text, refuse_bytes, time_text, zigzag
from relaygr.ingest.registry import Schema
from relaygr.schemas.fields import FieldError

_KEPT_CLASSES: Final = 64
"""Of one schema: by message and by the fields that are used."""
_MOST_INDEXES: Final = 100
"""More than messages nest."""
_BROKEN: Final = (ValueError, LookupError, TypeError, AttributeError, DecodeError)
_ROOT: Final = "the schema of the record"
"""The name of its file, beside those of imports."""

Convert = Callable[[Any], Any]


class ProtobufReader:
    """Reads the messages of one schema."""

    def __init__(self, schema: Schema) -> None:
        """Raises ValueError if the schema cannot be read."""
        try:
            self._root = FileDescriptorProto.FromString(schema.content)
            self._imported = [(name, FileDescriptorProto.FromString(content)) for name, content in schema.needed]
        except DecodeError as error:
            raise FieldError(f"cannot be read: {error}") from error
        self._paths: dict[tuple[int, ...], tuple[list[DescriptorProto], tuple[str, ...]]] = {}
        """By indexes: the messages from the file to the one that is meant, and the names of its fields."""
        self._classes: dict[tuple[tuple[int, ...], frozenset[str]], _Class | str] = {}
        """The class of a message with some of its fields, or why there is none."""

    def read(self, content: bytes, at: int, used: Used) -> dict[str, Any]:
        """The message from a position to the end, in types of JSON. Times are texts, enums their names, and a field
        that is not used, or not set, is None.

        Raises ValueError for bad bytes.
        """
        indexes, at = _indexes(content, at)
        if (found := self._paths.get(indexes)) is None:
            found = self._paths[indexes] = self._path(indexes)
        path, names = found
        wanted = frozenset(used(names))
        made = self._classes.get((indexes, wanted))
        if made is None:
            if len(self._classes) >= _KEPT_CLASSES:
                self._classes.clear()
            try:
                made = self._made(indexes, path, wanted)
            except _BROKEN as error:
                made = f"the message {path[-1].name[:80]} cannot be read: {type(error).__name__} {str(error)[:200]}"
            self._classes[indexes, wanted] = made
        if isinstance(made, str):
            raise FieldError(made)
        return dict.fromkeys(names) | made.read(content[at:])

    def _path(self, indexes: tuple[int, ...]) -> tuple[list[DescriptorProto], tuple[str, ...]]:
        path: list[DescriptorProto] = []
        for index in indexes:
            within = path[-1].nested_type if path else self._root.message_type
            if not 0 <= index < len(within):
                raise FieldError(f"it is message {index} of a schema of {len(within)}")
            path.append(within[index])
        return path, tuple(field.name for field in path[-1].field)

    def _made(self, indexes: tuple[int, ...], path: list[DescriptorProto], used: frozenset[str]) -> _Class:
        """The class of the message at the end of a path, with only its used fields."""
        pool, known = DescriptorPool(), set[str]()
        root = _outline(self._root, _ROOT)
        target = root.message_type[indexes[0]]
        for index in indexes[1:]:
            target = target.nested_type[index]
        for field in path[-1].field:
            if field.name in used:
                _keep(field, target)
        for file in (*_WELL_KNOWN, *(_outline(imported, name) for name, imported in self._imported), root):
            if file.name in known:  # Some serialisers register well-known imports, too.
                continue
            # An import without a reference: what it has is not used, or the pool does not find it.
            for name in {*file.dependency} - known:
                pool.AddSerializedFile(FileDescriptorProto(name=name).SerializeToString())
            known |= {file.name, *file.dependency}
            pool.AddSerializedFile(file.SerializeToString())
        package = [root.package] if root.package else []
        full_name = ".".join([*package, *(message.name for message in path)])
        made = message_factory.GetMessageClass(pool.FindMessageTypeByName(full_name))
        lists = {field.name for field in target.field if field.label == FieldDescriptorProto.LABEL_REPEATED}
        return _Class(made, [_Field(field, field.name in lists) for field in made.DESCRIPTOR.fields])


def _indexes(content: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """The indexes at a position, and the position after them. Raises FieldError."""
    try:
        count, at = zigzag(content, at)
        if count < 0:
            raise FieldError("its message indexes are no zigzag numbers: unset use.deprecated.format in the producer")
        if count > _MOST_INDEXES:
            raise FieldError(f"it has {count:,} message indexes, expected at most {_MOST_INDEXES}")
        found = []
        for _ in range(count):
            index, at = zigzag(content, at)
            found.append(index)
    except IndexError as error:
        raise FieldError("its message indexes are not complete") from error
    return tuple(found) or (0,), at


def _outline(file: FileDescriptorProto, name: str) -> FileDescriptorProto:
    """The messages of a file without their fields, and its enums."""
    kept = FileDescriptorProto(name=name, package=file.package, syntax=file.syntax, enum_type=file.enum_type)
    kept.dependency.extend(file.dependency)
    kept.public_dependency.extend(file.public_dependency)
    kept.message_type.extend(_without_fields(each) for each in file.message_type)
    if file.HasField("edition"):
        kept.edition = file.edition
        kept.options.features.CopyFrom(file.options.features)
    return kept


def _without_fields(message: DescriptorProto) -> DescriptorProto:
    nested = [_without_fields(each) for each in message.nested_type]
    return DescriptorProto(name=message.name, nested_type=nested, enum_type=message.enum_type)


def _keep(field: FieldDescriptorProto, target: DescriptorProto) -> None:
    """Adds a field. One that may be absent gets a `oneof` of its own, which says so in each syntax: registries give
    `optional` in several forms.
    """
    kept = target.field.add()
    kept.CopyFrom(field)
    kept.ClearField("oneof_index")
    kept.ClearField("proto3_optional")
    if field.HasField("oneof_index") or field.proto3_optional:
        kept.oneof_index = len(target.oneof_decl)
        target.oneof_decl.add(name=f"only_{field.name}")


class _Field:
    def __init__(self, field: FieldDescriptor, is_list: bool) -> None:
        self.name = field.name
        self._is_list = is_list
        self._convert = _convert(field)
        can_be_absent = field.has_presence and not field.has_default_value
        self._default = None if can_be_absent or field.message_type is not None else field.default_value

    def value(self, given: Mapping[str, Any]) -> Any:
        """Raises ValueError or ArithmeticError."""
        if self._is_list:
            values = given.get(self.name, ())
            check_length(len(values))
            return [self._convert(each) for each in values]
        value = given.get(self.name, self._default)
        return None if value is None else self._convert(value)


class _Class:
    """A class of messages, and its fields."""

    def __init__(self, made: type[Message], fields: list[_Field]) -> None:
        self._made, self._fields = made, fields

    def read(self, content: bytes) -> dict[str, Any]:
        """The fields of a message by name. Raises ValueError."""
        try:
            given = {field.name: value for field, value in self._made.FromString(content).ListFields()}
        except DecodeError as error:
            raise FieldError(f"not Protobuf of its schema: {error}") from error
        values = {}
        for field in self._fields:
            try:
                values[field.name] = field.value(given)
            except (ValueError, ArithmeticError) as error:
                raise FieldError(f"{field.name}: {error}") from error
        return values


def _convert(field: FieldDescriptor) -> Convert:
    if field.message_type is not None:
        return _MESSAGES.get(field.message_type.full_name, _refuse_message)
    if field.enum_type is not None:
        # The first of several names. A number without a name is of a later schema.
        names = {each.number: each.name for each in reversed(field.enum_type.values)}
        return lambda number: names.get(number, number)
    return refuse_bytes if field.type == FieldDescriptor.TYPE_BYTES else _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _refuse_message(_: Any) -> NoReturn:
    raise FieldError("it is a message or a map, expected a text, a number or a list")


_nanos_text: Final = time_text(1_000_000_000)
_MESSAGES: Final[dict[str, Convert]] = {
    "google.protobuf.Timestamp": lambda value: _nanos_text(value.seconds * 1_000_000_000 + value.nanos),
    "google.type.Date": lambda value: date(value.year, value.month, value.day).isoformat(),
    "confluent.type.Decimal": lambda value: decimal_text(value.value, value.scale),
    **{
        f"google.protobuf.{kind}Value": lambda value: value.value
        for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String")
    },
}
"""What a message of these types is in JSON."""


def _file(name: str, package: str, message: str, **types: FieldDescriptorProto.Type.ValueType) -> FileDescriptorProto:
    """A file of one message, whose fields have the numbers 1, 2 and so on."""
    file = FileDescriptorProto(name=name, package=package, syntax="proto3")
    fields = file.message_type.add(name=message).field
    for number, (field, kind) in enumerate(types.items(), 1):
        fields.add(name=field, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
    return file


_INT32: Final = FieldDescriptorProto.TYPE_INT32
_DECIMAL: Final = _file(
    "confluent/type/decimal.proto",
    "confluent.type",
    "Decimal",
    value=FieldDescriptorProto.TYPE_BYTES,
    precision=FieldDescriptorProto.TYPE_UINT32,
    scale=_INT32,
)
_WELL_KNOWN: Final = (
    FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb),
    FileDescriptorProto.FromString(wrappers_pb2.DESCRIPTOR.serialized_pb),
    _file("google/type/date.proto", "google.type", "Date", year=_INT32, month=_INT32, day=_INT32),
    _DECIMAL,
    # Its earlier place.
    FileDescriptorProto(
        name="confluent/types/decimal.proto", dependency=[_DECIMAL.name], public_dependency=[0], syntax="proto3"
    ),
)
"""Files that schemas import without a reference, and whose messages are read."""
