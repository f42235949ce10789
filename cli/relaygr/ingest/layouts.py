"""The layout of an interaction log, found from its content and not from its name, and its lines in blocks.

| layout | recognised by | user, item, time |
|---|---|---|
| RecBole `.inter` | tab-separated header of `name:type` | `user_id`, `item_id`, `timestamp` |
| CSV, such as MovieLens `ratings.csv` | header with user and item, between commas, tabs, `;` or `|` | by name |
| JSON lines | an object on each line | by name |
| MovieLens `u.data` | four values between tabs, the last two numbers | in that order |
| MovieLens `ratings.dat` | four values between `::`, the last two numbers | in that order |
| KuaiRand `log_*.csv` | comma-separated header with `video_id`, `time_ms` | `user_id`, `video_id`, `time_ms` |
| Parquet | its first bytes, or a folder of such files | as in CSV |

Names are those of a `LogMap`, else those that are known, without case and underscores. The action comes from `action`,
from `rating` (which goes first, unless the map names actions), from the third value, or for KuaiRand from the flags of
`KUAIRAND_BITS`. In a RecBole file without `item_id`, the only other token `*_id` is the item.

A file may be plain or gzipped text. A line ends with LF or CRLF. A field of CSV in quotes may have line breaks
(`relaygr.ingest.quoted`), as may one of RecBole, which reads its files as CSV. Reading stops at a line above
`MAX_LINE_BYTES`, before a file without line ends fills the memory.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, cast

from relaygr.ingest.json_lines import JsonLineError, parse_log_object, parse_object
from relaygr.ingest.log_map import NO_MAP, LogMap
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import LOST, files_below, open_regular

KUAIRAND_BITS: Final = {
    "is_click": 1,
    "is_like": 2,
    "is_follow": 4,
    "is_comment": 8,
    "is_forward": 16,
    "is_hate": 32,
    "long_view": 64,
    "is_profile_enter": 128,
}
"""A KuaiRand behaviour's action code is the sum of the bits of the flags that are set."""

FLAG_VALUES: Final = {"0": False, "1": True, "0.0": False, "1.0": True, "": False}
"""Texts of a flag. One that is missing is not set."""

RECBOLE_TYPES: Final = ("token", "token_seq", "float", "float_seq")
_SAMPLE_BYTES: Final = 256 * 1024
SAMPLE_LINES: Final = 20
"""The first lines, which decide what columns a log has."""
_RECBOLE_FIELD = re.compile(r"[^:\s]+:\w+")
_MS_NAMES: Final = ("timems", "timestampms")
_KNOWN_NAMES: Final = {
    "user": ("userid", "user"),
    "item": ("movieid", "itemid", "item", "movie", "videoid", "parentasin", "asin"),
    "time": ("timestamp", "ts", "time", *_MS_NAMES),
}
"""Of a role, without case and underscores; a role that is not here has its own name only."""
_SEPARATORS: Final = ",\t;|"
_KNOWN: Final = (
    "Known are CSV with a header, JSON lines, RecBole .inter (tabs, header such as user_id:token), MovieLens u.data "
    "and ratings.dat, each also as .gz, and Parquet"
)


BLOCK_BYTES: Final = 1024 * 1024
MAX_LINE_BYTES: Final = 1024 * 1024
Line = str | tuple[str, ...]
"""A line of text; or a record of CSV with quotes, or a row of Parquet: the texts of its columns."""
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive lines. `text` has LF between lines; bytes that are not UTF-8 are lone surrogates."""

    first_number: int
    text: str
    bytes_read: int
    """Bytes of the file on disk up to the end of this block."""

    def numbered(self) -> tuple[Sequence[int], list[str]]:
        """The lines that are not blank, and their numbers."""
        lines = self.text.split("\n")
        numbers: Sequence[int] = range(self.first_number, self.first_number + len(lines))
        if all(lines) and not any(map(str.isspace, lines)):
            return numbers, lines
        kept = [(number, line) for number, line in zip(numbers, lines, strict=True) if line.strip()]
        return [number for number, _ in kept], [line for _, line in kept]


def read_blocks(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[LineBlock]:
    """The lines of a file. Raises RelayError if it cannot be read or a line is too long."""
    try:
        with open_regular(path) as file:
            yield from _blocks(file, path, block_bytes)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise RelayError(f"{path}: broken gzip file: {error}. Download or compress it again") from error
    except OSError as error:
        raise RelayError(
            f"{path} cannot be read: {error.strerror or error}. Give the path of a log of interactions"
        ) from error


def _blocks(file: IO[bytes], path: Path, block_bytes: int) -> Iterator[LineBlock]:
    packed = file.read(2) == _GZIP
    file.seek(0)
    stream = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if packed else file
    number = 1
    rest = b""
    first = True
    while True:
        data = stream.read(block_bytes)
        if first:
            data = data.removeprefix(_BOM)
            first = False
        whole, found, tail = (rest + data).rpartition(b"\n")
        if not data:
            if rest:
                yield LineBlock(number, _text(rest), file.tell())
            return
        if len(tail) > MAX_LINE_BYTES:
            line = number + whole.count(b"\n") + len(found)
            raise RelayError(
                f"{path}: line {line} is longer than {MAX_LINE_BYTES} bytes: the file is not an interaction log"
            )
        rest = tail
        if found:
            text = _text(whole)
            yield LineBlock(number, text, file.tell())
            number += text.count("\n") + 1


def _text(data: bytes) -> str:
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").removesuffix(b"\r")
    return data.decode("utf-8", "surrogateescape")


class LateFieldError(ValueError):
    """A line has a field of a log that the first lines lack, from which it is found what a line has."""


class LayoutKind(enum.StrEnum):
    """The known layouts."""

    RECBOLE = "RecBole .inter"
    CSV = "CSV"
    JSON_LINES = "JSON lines"
    MOVIELENS_TAB = "MovieLens u.data"
    MOVIELENS_DAT = "MovieLens ratings.dat"
    KUAIRAND = "KuaiRand log"
    PARQUET = "Parquet"


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of the fields in a line. Columns count from 0."""

    kind: LayoutKind
    separator: str
    has_header: bool
    column_count: int
    user: int
    item: int
    time: int | None
    rating: int | None = None
    flags: tuple[tuple[int, int], ...] = ()
    """(column, bit of the action code) of each flag."""
    time_is_ms: bool | None = False
    """Whether times are milliseconds. Otherwise the unit is derived from the values; None: there are no values."""
    latin1_ids: bool = False
    """Whether bytes that are not UTF-8 are read as latin-1."""
    quoted: bool = False
    because: str = ""
    notes: tuple[str, ...] = ()
    codes: int | None = None
    """The column of action codes or event names."""
    map: LogMap = NO_MAP
    keys: tuple[str, ...] = ()
    """The columns of JSON lines and Parquet: their names."""
    first_fields: frozenset[str] = frozenset()
    """The fields of the first lines, of JSON lines."""

    @property
    def has_times(self) -> bool:
        return self.time is not None

    @property
    def has_gaps(self) -> bool:
        """Whether `nan` is a missing id: of text without types, which JSON and Parquet have."""
        return not self.keys

    @property
    def has_ratings(self) -> bool:
        """Whether the action codes are ratings: twice the stars."""
        return self.rating is not None

    @property
    def codes_are(self) -> str:
        """What the action codes mean, in words: the same words in logs that may be one."""
        if self.flags:
            bits = dict(self.flags).values()
            return f"sums of the bits of {', '.join(name for name, bit in KUAIRAND_BITS.items() if bit in bits)}"
        if self.has_ratings:
            return "twice the rating"
        return "all 0, since it has no column of them" if self.codes is None else "those of its column of actions"

    def split(self, line: Line) -> Sequence[str]:
        """The fields of a line. Raises csv.Error for broken quotes, JsonLineError for broken JSON, LateFieldError."""
        if isinstance(line, tuple):
            return line
        if self.keys:
            found = parse_log_object(line.encode("utf-8", "surrogateescape"))
            if not found.keys() <= self.first_fields:
                self._refuse_late(found)
            ids = (self.user, self.item)
            return [(id_text if at in ids else json_text)(found.get(key), key) for at, key in enumerate(self.keys)]
        if self.quoted and '"' in line:
            return next(csv.reader((line,), delimiter=self.separator, strict=True))
        return line.split(self.separator)

    def _refuse_late(self, found: Mapping[str, object]) -> None:
        """Raises LateFieldError for a field that would have been read, had one of the first lines had it."""
        late = [name for name in found if name not in self.first_fields]
        has_actions = bool(self.flags) or self.rating is not None or self.codes is not None
        for role, is_read in (("time", self.has_times), ("rating", has_actions), ("action", has_actions)):
            if not is_read and (at := column_of(role, late, self.map)) is not None:
                raise LateFieldError(f"{late[at]} is in none of the first {SAMPLE_LINES} lines")

    def columns(self, lines: Sequence[Line]) -> list[Sequence[str]]:
        """The fields of all lines by column. Raises ValueError unless every line has `column_count` fields."""
        has_fields = bool(self.keys) or isinstance(lines[0], tuple)
        text = "" if has_fields else "\n".join(cast(Sequence[str], lines))
        if has_fields or (self.quoted and '"' in text):
            columns: list[Sequence[str]] = list(zip(*map(self.split, lines), strict=True))
            if len(columns) != self.column_count:
                raise ValueError(f"{len(columns)} fields, expected {self.column_count}")
            return columns
        separators = self.column_count - 1
        if any(line.count(self.separator) != separators for line in cast(Sequence[str], lines)):
            raise ValueError(f"a line does not have {self.column_count} fields")
        # One split of the whole text: a list for every line would take more time than everything else together.
        fields = text.replace("\n", self.separator).split(self.separator)
        return [fields[column :: self.column_count] for column in range(self.column_count)]


def json_text(value: object, field: str) -> str:
    """A value of JSON as the text that CSV would have. Raises JsonLineError for one that is no single value."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | dict):
        raise JsonLineError(f"{field} is {'a list' if isinstance(value, list) else 'an object'}, expected one value")
    if isinstance(value, float) and not math.isfinite(value):
        raise JsonLineError(f"{field} is too large a number")
    return str(int(value)) if isinstance(value, bool) else str(value)


def id_text(value: object, field: str) -> str:
    """The same of an id, which is not true or false."""
    if isinstance(value, bool):
        raise JsonLineError(f"{field} is {str(value).lower()}, expected an id")
    return json_text(value, field)


_TABLES: Final = {
    "_delta_log": "a Delta table",
    ".hoodie": "a Hudi table",
    "metadata/*.metadata.json*": "an Iceberg table",
    "_spark_metadata": "a table that a Spark stream wrote",
}
"""What lies beside the files of tables of which only a log says which files, and which rows of them, count."""


def files_of(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders by name, numbers in names by their value, without hidden ones and those
    of the file system. A folder that several links name is read once; a link that leads nowhere is a file that cannot
    be read. Raises RelayError if a folder cannot be read, or is of a table.
    """
    try:
        found = list(files_below(folder, lambda name: name[0] in "._" or name == LOST))
        of_folder: dict[Path, Path] = {}
        found = [
            each
            for each in sorted(found, key=lambda each: _in_order(each.relative_to(folder)))
            if each.is_file() or not each.exists()
            if of_folder.setdefault(each.parent.resolve(), each.parent) == each.parent
        ]
        for place in {place for each in of_folder for place in (each, *each.parents)}:
            for pattern, what in _TABLES.items():
                if next(place.glob(pattern), None):
                    raise RelayError(
                        f"{place} is {what}: its files may have rows that were deleted or replaced, and only its log "
                        "says which. Write its rows to another folder as Parquet files, and give that."
                    )
    except OSError as error:
        raise RelayError(f"{folder} cannot be read: {error}.") from error
    return found


def _in_order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def recognise_text(path: Path, names: LogMap) -> Layout:
    """The layout of a file of text. Raises RelayError, with the first line, if the layout is unknown."""
    lines = _first_lines(path)
    header = lines[0]
    if header.lstrip().startswith("{"):
        return _json_lines(path, lines, names)
    if "\t" in header and all(_RECBOLE_FIELD.fullmatch(name.strip()) for name in header.split("\t")):
        return _recbole(path, [name.strip() for name in header.split("\t")], names)
    if named := _named_header(header, names):
        # Before layouts without a header: what looks like their lines may be the text of a field.
        return _with_names(path, header, named, names)
    layout = _values(lines, "::", LayoutKind.MOVIELENS_DAT) or _values(lines, "\t", LayoutKind.MOVIELENS_TAB)
    if layout is not None:
        if names.has_names:
            raise RelayError(f"{path} has no header with names for --columns and --actions: add one as its first line.")
        return layout
    if header.lstrip().startswith("["):
        raise RelayError(f"{path} begins with a list of JSON: write one object on each line (jq -c '.[]').")
    if separator := next((each for each in _SEPARATORS if each in header), ""):
        return _with_names(path, header, separator, names)
    seen = f"its first line is {header[:80]!r}"
    if re.search(r"\w:(token|float)\b", header):
        raise RelayError(f"{path}: the header looks like RecBole's, but its fields are not separated by tabs: {seen}")
    raise RelayError(f"{path}: the layout is unknown, {seen}. {_KNOWN}")


def _named_header(header: str, names: LogMap) -> str:
    """The separator of a header that names user and item; empty: it is none."""
    for separator in _SEPARATORS:
        fields = [name.strip(' "') for name in header.split(separator)]
        if all(column_of(role, fields, names) is not None for role in ("user", "item")):
            return separator
    return ""


def _first_lines(path: Path) -> list[str]:
    if path.is_dir():
        raise RelayError(f"{path} is a folder without files: give the one that has the log")
    text = ""
    for block in read_blocks(path, _SAMPLE_BYTES):
        text = block.text
        break
    if not text.strip():
        raise RelayError(f"{path} is empty")
    if text.startswith("PK\x03\x04"):
        raise RelayError(f"{path} is a zip archive: unpack it and give the file of interactions in it")
    if text.encode("utf-8", "surrogateescape").startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RelayError(f"{path} is UTF-16 text: convert it to UTF-8 (iconv -f utf-16 -t utf-8)")
    if "\x00" in text:
        raise RelayError(f"{path} is not text. {_KNOWN}")
    if "\r" in text and "\n" not in text:
        raise RelayError(f"{path}: lines end with CR alone: convert it (tr '\\r' '\\n' < FILE > NEW).")
    return [line for line in text.split("\n") if line.strip()][:SAMPLE_LINES]


def _json_lines(path: Path, lines: Sequence[str], log_map: LogMap) -> Layout:
    fields: dict[str, None] = {}
    for line in lines:
        with contextlib.suppress(JsonLineError):  # A bad line, which the reader counts.
            fields |= dict.fromkeys(parse_object(line.encode("utf-8", "surrogateescape")))
    if not fields:
        raise RelayError(f"{path} begins with '{{', but no line is an object: write each on one line (jq -c .).")
    found = named_columns(path, list(fields), log_map)
    layout = with_keys(LayoutKind.JSON_LINES, found, log_map, f"an object on each line, with {found.shown}")
    return replace(layout, first_fields=frozenset(fields))


def with_keys(kind: LayoutKind, found: NamedColumns, log_map: LogMap, because: str) -> Layout:
    """The layout of a log of which only the named columns are taken."""
    place: dict[int | None, int] = {column: at for at, column in enumerate(found.used)}
    return Layout(
        kind, "", False, len(place), place[found.user], place[found.item], place.get(found.time),
        place.get(found.rating), tuple((place[column], bit) for column, bit in found.flags), found.time_is_ms,
        because=because, notes=found.notes, codes=place.get(found.action), map=log_map,
        keys=tuple(found.fields[column] for column in found.used),
    )  # fmt: skip


def _recbole(path: Path, fields: Sequence[str], log_map: LogMap) -> Layout:
    names, types = zip(*(field.rsplit(":", 1) for field in fields), strict=True)
    for name, kind in zip(names, types, strict=True):
        if kind not in RECBOLE_TYPES:
            raise RelayError(f"{path}: header field {name}:{kind}: RecBole's types are {', '.join(RECBOLE_TYPES)}")
    if len(set(names)) != len(names):
        raise RelayError(f"{path}: a name occurs twice in the header: {', '.join(names)}")

    def column(name: str, wanted: str) -> int | None:
        if name not in names:
            return None
        at = names.index(name)
        if types[at] != wanted:
            raise RelayError(f"{path}: header has {name}:{types[at]}, expected {name}:{wanted}")
        return at

    notes = []
    log_map.require(path, names)
    called = {"user": "user_id", "item": "item_id", "time": "timestamp"} | dict(log_map.columns)
    user, item = column(called["user"], "token"), column(called["item"], "token")
    if user is None:
        raise RelayError(f"{path}: header has no user_id:token, only {', '.join(fields)}: is it the .inter file?")
    if item is None:
        others = [
            at
            for at, (name, kind) in enumerate(zip(names, types, strict=True))
            if at != user and name.endswith("_id") and kind == "token"
        ]
        if len(others) != 1:
            raise RelayError(f"{path}: header has no item_id:token, only {', '.join(fields)}: is it the .inter file?")
        item = others[0]
        notes.append(f"{names[item]} is taken as the item")
    time = column(called["time"], "float")
    rating = None if log_map.wants_actions else column(called.get("rating", "rating"), "float")
    action = names.index(called.get("action", "action")) if log_map.wants_actions else None
    used = {user, item, time, rating, action}
    ignored = [name for at, name in enumerate(names) if at not in used]
    if ignored:
        notes.append(f"columns not used: {', '.join(ignored)}")
    return Layout(
        LayoutKind.RECBOLE, "\t", True, len(fields), user, item, time, rating, quoted=True,
        because=f"header of tab-separated name:type, {fields[user]} and {fields[item]} among them",
        notes=(*notes, *_absent_columns(time, rating if action is None else action, ignored)), codes=action,
        map=log_map,
    )  # fmt: skip


def _with_names(path: Path, header: str, separator: str, log_map: LogMap) -> Layout:
    try:
        fields = [name.strip() for name in next(csv.reader((header,), delimiter=separator, strict=True))]
    except csv.Error as error:
        raise RelayError(f"{path}: the header is not valid CSV: {error}") from error
    found = named_columns(path, fields, log_map)
    shown = "comma-separated header" if separator == "," else f"header between {separator!r}"
    return Layout(
        LayoutKind.KUAIRAND if found.flags else LayoutKind.CSV, separator, True, len(fields), found.user, found.item,
        found.time, found.rating, found.flags, found.time_is_ms, quoted=True, codes=found.action, map=log_map,
        because=f"{shown} with {found.shown}", notes=found.notes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """The columns of a log with names, counted from 0."""

    fields: Sequence[str]
    user: int
    item: int
    time: int | None
    rating: int | None
    action: int | None
    flags: tuple[tuple[int, int], ...]
    """(column, bit of the action code) of each flag of KuaiRand."""
    time_is_ms: bool | None

    @property
    def used(self) -> list[int]:
        every = (self.user, self.item, self.time, self.rating, self.action, *(column for column, _ in self.flags))
        return list(dict.fromkeys(column for column in every if column is not None))

    @property
    def has_actions(self) -> bool:
        """Whether any column gives the action."""
        return bool(self.flags) or self.rating is not None or self.action is not None

    @property
    def shown(self) -> str:
        return f"{self.fields[self.user]} and {self.fields[self.item]}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is absent, and what is not used."""
        absent = [name for name in KUAIRAND_BITS if name not in self.fields] if self.flags else []
        ignored = [name for at, name in enumerate(self.fields) if at not in self.used]
        return (
            *_absent_columns(self.time, self.flags or self.rating if self.action is None else self.action, ignored),
            *((f"flags absent: {', '.join(absent)}",) if absent else ()),
            *((f"columns not used: {', '.join(ignored)[:200]}",) if ignored else ()),
        )


def column_of(role: str, fields: Sequence[str], log_map: LogMap) -> int | None:
    """The column that the map names for a role, else the first by the names that are known; None: there is none."""
    if role in log_map.columns:
        return fields.index(log_map.columns[role]) if log_map.columns[role] in fields else None
    plain = [_plain(name) for name in fields]
    return next((plain.index(name) for name in _KNOWN_NAMES.get(role, (role,)) if name in plain), None)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def named_columns(path: Path | str, fields: Sequence[str], log_map: LogMap) -> NamedColumns:
    """The columns that the map names, else by the names that are known. Raises RelayError with the cure."""
    log_map.require(path, fields)
    user, item, time = (column_of(role, fields, log_map) for role in ("user", "item", "time"))
    seen = f"among {', '.join(fields)[:200]}"
    if user is None or item is None:
        lacking = [role for role, at in (("user", user), ("item", item)) if at is None]
        cure = ",".join(f"{role}=NAME" for role in lacking)
        raise RelayError(f"{path}: no column for the {' and '.join(lacking)} {seen}: name it by --columns {cure}.")
    rating = None if log_map.wants_actions else column_of("rating", fields, log_map)
    has_flags = "video_id" in fields and "time_ms" in fields and rating is None and not log_map.wants_actions
    flags = tuple((fields.index(name), bit) for name, bit in KUAIRAND_BITS.items() if name in fields and has_flags)
    action = column_of("action", fields, log_map) if rating is None and not flags else None
    if log_map.actions and action is None:
        raise RelayError(f"{path}: no column for the action {seen}: name it by --columns action=NAME.")
    is_ms = time is not None and _plain(fields[time]) in _MS_NAMES
    found = NamedColumns(fields, user, item, time, rating, action, flags, is_ms)
    if twice := sorted({fields[at] for at in found.used if fields.count(fields[at]) > 1}):
        raise RelayError(f"{path} has two columns {', '.join(twice)}: remove or rename one of them.")
    return found


def _values(lines: Sequence[str], separator: str, kind: LayoutKind) -> Layout | None:
    """A layout without a header, if more than half of the first lines have it. Some lines may be broken."""

    def fits(line: str) -> bool:
        values = line.split(separator)
        return len(values) == 4 and all(map(_is_number, values[2:]))

    matching = sum(fits(line) for line in lines)
    if matching * 2 <= len(lines):
        return None
    shown = "::" if separator == "::" else "tabs"
    return Layout(
        kind, separator, False, 4, 0, 1, 3, 2, latin1_ids=kind is LayoutKind.MOVIELENS_DAT,
        because=f"{matching} of the first {len(lines)} lines are four values between {shown}",
    )  # fmt: skip


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _absent_columns(time: int | None, rating: object, unused: Sequence[str]) -> tuple[str, ...]:
    """Notes on what a log without times or ratings means. One of the unused columns may have them."""
    notes = []
    if time is None:
        cure = " (if a column has them: --columns time=NAME)" * bool(unused)
        notes.append(f"no timestamp column: the order of lines is taken as the order in time, all times are 0{cure}")
    if rating in (None, ()):
        cure = " (if a column has them: --columns action=NAME, or rating=NAME)" * bool(unused)
        notes.append(f"no rating column: all action codes are 0{cure}")
    return tuple(notes)
