"""Logs as teams have them: columns and events of any name, JSON lines, times of ISO 8601, folders, repeated rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.ingest.gather import Interactions, hashed_item
from relaygr.ingest.json_lines import parse_log_object
from relaygr.ingest.known import named_log
from relaygr.ingest.layouts import LayoutKind
from relaygr.ingest.log_map import NO_MAP, log_map
from relaygr.ingest.log_objects import MappedObjects
from relaygr.ingest.reading import read_interactions
from relaygr.runtime.errors import RelayError
from relaygr.schemas.limits import MAX_BEHAVIOURS
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.inputs.known import write_action_names
from tests.cli.test_interactions import of
from tests.worlds.model import small_config

T0 = 1_600_000_000_000
COLUMNS = "user=uid,item=sku,time=at,action=event"
ACTIONS = "view=1,click=2"
ROWS: list[dict[str, Any]] = [
    {"uid": "ann", "sku": "B00X", "at": "2020-09-13T12:26:41Z", "event": "click", "price": 3},
    {"uid": "ann", "sku": "B00Y", "at": "2020-09-13T14:26:40+02:00", "event": "view", "price": 2.5},
    {"uid": "7", "sku": "B00X", "at": "2020-09-13 12:26:40.250", "event": "view", "price": None},
]
WANTED = {
    "ann": [(hashed_item("B00Y"), 1, T0), (hashed_item("B00X"), 2, T0 + 1000)],
    "7": [(hashed_item("B00X"), 1, T0 + 250)],
}


def csv_text(separator: str = ",") -> str:
    lines = [separator.join(ROWS[0]), *(separator.join(map(str, row.values())) for row in ROWS)]
    return "\n".join(lines) + "\n"


def json_text(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path: Path) -> None:
    pq.write_table(pa.table({name: [row[name] for row in ROWS] for name in ("uid", "sku", "at", "event")}), path)


def read(path: Path, columns: str | None = COLUMNS, actions: str | None = ACTIONS) -> Interactions:
    return read_interactions(path, log_map=log_map(columns, actions))


def dry_run(path: Path, *options: str | Path) -> Result:
    words = ["publish", "history", "--interactions", str(path), "--dry-run", *map(str, options)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"})


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda path: path.write_text(csv_text()), LayoutKind.CSV),
        (lambda path: path.write_text(csv_text("\t")), LayoutKind.CSV),
        (lambda path: path.write_text(csv_text(";")), LayoutKind.CSV),
        (lambda path: path.write_text(json_text(ROWS)), LayoutKind.JSON_LINES),
        (lambda path: path.write_bytes(gzip.compress(json_text(ROWS).encode())), LayoutKind.JSON_LINES),
        (parquet, LayoutKind.PARQUET),
    ],
    ids=["CSV", "tabs", "semicolons", "JSON lines", "JSON lines .gz", "Parquet"],
)
def test_every_layout_takes_own_columns_events_and_iso_times(
    tmp_path: Path, write: Callable[[Path], Any], kind: LayoutKind
) -> None:
    write(tmp_path / "log")
    found = read(tmp_path / "log")
    assert found.report.layout.kind is kind
    assert {user: of(found, user) for user in found.users} == WANTED


def test_json_lines_with_known_names_need_no_options(tmp_path: Path) -> None:
    rows = [{"userId": 5, "item_id": 2.0, "timestamp": T0 // 1000, "rating": 4}, {"item_id": 3, "userId": 5}]
    (tmp_path / "log").write_text(json_text(rows) + '{"userId": 5, "item_id": [1], "timestamp": 1}\n{broken\n')
    found = read(tmp_path / "log", None, None)
    assert of(found, "5") == [(2, 8, T0)]
    assert [(bad.number, bad.reason) for bad in found.report.bad_lines] == [
        (2, "timestamp is '', expected a number or 2026-11-27T08:30:00Z"),
        (3, "item_id is a list, expected one value"),
        (4, "not JSON: Expecting property name enclosed in double quotes at column 2"),
    ]


@pytest.mark.parametrize(
    ("columns", "actions", "said"),
    [
        ("user=uid,item=sku,time=when", None, "time=when: there is no such column among uid, sku, at, event"),
        ("user=uid,item=skus", None, "item=skus: there is no such column; did you mean sku?"),
        ("user=uid", None, "no column for the item among .*: name it by --columns item=NAME"),
        ("user=uid,item=sku", ACTIONS, "no column for the action among .*: name it by --columns action=NAME"),
        ("who=uid", None, "'who' is no role: give user, item, time, action, rating"),
        ("user", None, "give NAME=VALUE between commas"),
        ("user=a,user=b", None, "gives 'user' twice"),
        ("action=a,rating=b", None, "comes from one of them"),
        (None, "view=one", "the code of 'view' is 'one', expected 0 to 65535"),
        (None, "view=65536", "expected 0 to 65535"),
    ],
)
def test_a_wrong_map_is_refused_with_its_cure(
    tmp_path: Path, columns: str | None, actions: str | None, said: str
) -> None:
    for write in (lambda path: path.write_text(csv_text()), lambda path: path.write_text(json_text(ROWS)), parquet):
        write(tmp_path / "log")
        with pytest.raises(RelayError, match=said):
            read(tmp_path / "log", columns, actions)


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ("click=2", "action is 'view', which --actions gives no code"),
        (None, "action is 'click', expected a code of 0 to 65535: give names a code by --actions"),
    ],
)
def test_an_event_without_a_code_is_a_counted_bad_line(tmp_path: Path, actions: str | None, reason: str) -> None:
    (tmp_path / "log").write_text(json_text(ROWS))
    found = read(tmp_path / "log", COLUMNS, actions)
    assert len(found.report.bad_lines) == (2 if actions else 3)
    assert found.report.bad_lines[0].reason == reason


@pytest.mark.parametrize("kind", ["int32", "float64", "string"])
def test_actions_also_takes_the_codes_that_it_names(tmp_path: Path, kind: str) -> None:
    """Logs of `relaygr train collect` have codes, and a model trained on them should keep the names."""
    codes = pa.array([1, 2, 3]).cast(kind)
    pq.write_table(
        pa.table({"user": ["ann"] * 3, "item": [1, 2, 3], "time": [T0] * 3, "action": codes}), tmp_path / "log"
    )
    found = read(tmp_path / "log", None, ACTIONS)
    assert of(found, "ann") == [(1, 1, T0), (2, 2, T0)]
    (bad,) = found.report.bad_lines
    assert bad.number == 3 and "which --actions gives no code" in bad.reason
    assert log_map(None, "1=2,2=1").code("1") == 2, "a name goes before a code"


@pytest.mark.parametrize(
    "header", ["userId,itemId,eventTime,kind", "user_id:token\titem_id:token\tat:float\tkind:token"]
)
def test_a_log_whose_times_have_an_unknown_name_is_told_how_to_name_them(tmp_path: Path, header: str) -> None:
    """Without a word the order of the file would be the order in time."""
    separator = "\t" if "\t" in header else ","
    rows = [separator.join(("ann", str(item), str(T0), "view")) for item in (1, 2)]
    (tmp_path / "log").write_text("\n".join([header, *rows]))
    said = " ".join(dry_run(tmp_path / "log").output.split())
    assert "all times are 0 (if a column has them: --columns time=NAME)" in said
    assert "all action codes are 0 (if a column has them: --columns action=NAME, or rating=NAME)" in said
    (tmp_path / "log").write_text("user_id,item_id\n1,2\n")
    assert "--columns" not in dry_run(tmp_path / "log").output


def test_a_headerless_file_cannot_have_own_columns(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t2\t3\t900000000\n")
    with pytest.raises(RelayError, match=r"no header with names .*: add one as its first line"):
        read(tmp_path / "u.data")


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    """Times are equal, so that the order of the files decides, as asked for. Spark writes `_SUCCESS` too."""
    for day, item in ((10, 3), (2, 2), (1, 1)):
        folder = tmp_path / "log" / f"day={day}"
        folder.mkdir(parents=True)
        (folder / "part.csv").write_text(f"uid,sku,at\nann,{item},{T0}\n")
    (tmp_path / "log" / "_SUCCESS").write_text("")
    found = read_interactions(tmp_path / "log", log_map=log_map("user=uid,item=sku,time=at", None, "file"))
    assert [item for item, _, _ in of(found, "ann")] == [1, 2, 3]
    (tmp_path / "log" / "day=10" / "part.csv").write_text("uid,sku\nann,3\n")
    with pytest.raises(RelayError, match="there is no such column among uid, sku"):
        read(tmp_path / "log", "user=uid,item=sku,time=at", None)


def test_a_bad_line_of_a_folder_names_its_file(tmp_path: Path) -> None:
    for name, time in (("a.csv", T0), ("b.csv", "noon")):
        (tmp_path / name).write_text(f"user,item,time\nann,1,{time}\n")
    (bad,) = read(tmp_path, None, None).report.bad_lines
    assert bad.number == 2 and bad.reason.startswith("b.csv: timestamp is 'noon'")


def test_repeated_rows_are_counted_and_said(tmp_path: Path) -> None:
    rows = [f"ann,{item},{T0 + item % 2}" for item in (1, 2, 1, 3, 2, 1)] + [f"bob,1,{T0 + 1}"]
    (tmp_path / "log").write_text("user,item,time\n" + "\n".join(rows) + "\n")
    done = dry_run(tmp_path / "log")
    assert "3 rows repeat another one exactly, and count like any other" in done.output
    assert "7 interactions" in done.output


def test_rows_that_two_files_share_are_counted_and_said(tmp_path: Path) -> None:
    for name, items in (("a.csv", (1, 2, 3)), ("b.csv", (2, 3, 4))):
        (tmp_path / name).write_text("user,item,time\n" + "".join(f"ann,{item},{T0 + item}\n" for item in items))
    done = dry_run(tmp_path / "a.csv", "--interactions", tmp_path / "b.csv")
    assert "2 rows of all files together repeat another one exactly" in done.output


@pytest.mark.parametrize(
    ("fields", "behaviour"),
    [
        ({"time": T0 // 1000}, (1, 0, T0)),
        ({"timestamp": T0 / 1000 + 0.25}, (1, 0, T0 + 250)),
        ({"ts": "2020-09-13T12:26:40Z", "rating": 2.5}, (1, 5, T0)),
        ({"time_ms": T0, "action": "7"}, (1, 7, T0)),
        ({}, (1, 0, T0 + 9)),
        ({"time_ms": T0 // 1000}, "a time in seconds: give it in milliseconds"),
        ({"time": [T0, T0]}, "1 items, 1 actions, 2 times: give as many of each"),
        ({"time": None}, (1, 0, T0 + 9)),
        ({"rating": "inf"}, "rating is 'inf', expected 0 to 32767"),
        ({"rating": "abc"}, "rating is 'abc', expected a number"),
        ({"rating": -1}, "rating is '-1', expected 0 to 32767"),
        ({"time": [None]}, "timestamp is '', expected a number"),
        ({"rating": {"stars": 1}}, "rating is an object, expected one value"),
        ({"action": "click"}, "give names a code by --actions"),
        ({"item": None}, "an id is empty"),
    ],
)
def test_an_object_becomes_behaviours(fields: dict[str, Any], behaviour: tuple[int, int, int] | str) -> None:
    content = {"user": 7, "item": 1, **fields}
    if isinstance(behaviour, str):
        with pytest.raises(ValueError, match=behaviour):
            MappedObjects(NO_MAP).event(content, T0 + 9)
        return
    event = MappedObjects(NO_MAP).event(content, T0 + 9)
    assert (event.user_id, event.behaviours) == ("7", Behaviours.of([behaviour]))


def test_an_envelope_of_kafka_connect_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"value\.converter\.schemas\.enable=false"):
        MappedObjects(NO_MAP).event({"schema": {}, "payload": {"user": 7, "item": 1}}, T0)
    event = MappedObjects(NO_MAP).event({"schema": 1, "payload": 2, "user": 7, "item": 1}, T0)
    assert event.user_id == "7"


def test_a_history_has_a_list_of_items() -> None:
    mapped = MappedObjects(NO_MAP)
    assert mapped.history({"user": 7, "item": [1], "time": [T0]}, T0).number == T0
    with pytest.raises(ValueError, match=r"item is no list, .* by `relaygr publish behaviours`"):
        mapped.history({"user": 7, "item": 1, "time": T0}, T0)


def test_a_list_longer_than_any_history_is_refused_by_the_name_of_its_field() -> None:
    mapped, many = MappedObjects(NO_MAP), [1] * (MAX_BEHAVIOURS + 1)
    with pytest.raises(ValueError, match=r"^time is a list of 131,073 values"):
        mapped.history({"user": 7, "item": [1], "time": many}, T0)
    with pytest.raises(ValueError, match=r"^item is a list of 131,073 values"):
        mapped.event({"user": 7, "item": many}, T0)


KUAIRAND: dict[str, Any] = {"user_id": 1, "video_id": 2, "time_ms": T0, "is_click": 1, "is_like": True, "long_view": 0}


@pytest.mark.parametrize(
    ("good", "other"),
    [
        (KUAIRAND, {**KUAIRAND, "is_like": 0, "long_view": None}),
        (KUAIRAND, {**KUAIRAND, "is_like": 2}),
        (KUAIRAND, {**KUAIRAND, "user_id": True}),
        (KUAIRAND, {**KUAIRAND, "video_id": False}),
        (KUAIRAND, {**KUAIRAND, "user_id": 1e400}),
        (KUAIRAND, {**KUAIRAND, "video_id": {"id": 1}}),
        ({"user": 1, "item": 2, "time": T0, "action": 3}, {"user": 1, "item": 2, "time": T0}),
        ({"user": 1, "item": 2, "time": T0, "rating": 3}, {"user": 1, "item": 2, "time": T0}),
    ],
)
def test_an_object_of_a_topic_is_read_as_the_line_of_a_log(
    tmp_path: Path, good: dict[str, Any], other: dict[str, Any]
) -> None:
    lines = [json.dumps(each).replace("Infinity", "1e400") for each in (good, other)]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    log, mapped = read(tmp_path / "log", None, None), MappedObjects(NO_MAP)
    event = mapped.event(parse_log_object(lines[0].encode()), T0)
    assert of(log, event.user_id)[0] == (event.behaviours.items[0], event.behaviours.actions[0], T0)
    if not log.report.bad_lines:
        event = mapped.event(parse_log_object(lines[1].encode()), T0)
        assert of(log, event.user_id)[1] == (event.behaviours.items[0], event.behaviours.actions[0], T0)
        return
    with pytest.raises(ValueError, match=r"the object has no action|expected|too large"):
        mapped.event(parse_log_object(lines[1].encode()), T0)


@pytest.mark.parametrize("time", [0, 20_000, 20261127, "20261127", "1989-12-31T23:59:59Z", 5e18])
def test_a_time_that_no_unit_brings_into_these_years_is_bad(time: object) -> None:
    with pytest.raises(ValueError, match=r"timestamp is .*, expected"):
        MappedObjects(NO_MAP).event({"user": 1, "item": [2, 3], "time": [T0, time]}, T0)


@pytest.mark.parametrize("field", ["user", "item", "time"])
def test_a_number_of_json_that_has_lost_digits_is_bad(tmp_path: Path, field: str) -> None:
    """Its float does not show it."""
    texts = {"user": "7", "item": "3", "time": "1.512345678e+09"}
    log = [json_of(texts | change) for change in ({}, {field: "1.700e+09"}, {"time": "1.51E9"})]
    (tmp_path / "log").write_text("\n".join(log))
    found = read(tmp_path / "log", None, None)
    assert of(found, "7") == [(3, 0, 1_510_000_000_000), (3, 0, 1_512_345_678_000)]
    assert [bad.number for bad in found.report.bad_lines] == [2]
    assert "last digits" in found.report.bad_lines[0].reason
    mapped = MappedObjects(NO_MAP)
    assert mapped.event(parse_log_object(log[0].encode()), T0).behaviours.timestamps_ms.tolist() == [1_512_345_678_000]
    with pytest.raises(ValueError, match="last digits"):
        mapped.event(parse_log_object(log[1].encode()), T0)


def json_of(texts: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}"


def test_only_the_first_objects_decide_whether_each_has_an_action() -> None:
    mapped, plain = MappedObjects(NO_MAP), {"user": 1, "item": 2, "time": T0}
    for content in (*[plain] * 20, {**plain, "action": 3}, plain):
        mapped.event(content, T0)


def test_lists_of_flags_have_one_length() -> None:
    lists = {"user_id": 1, "video_id": [2, 3], "time_ms": [T0, T0], "is_click": [1, 0], "is_like": [1, 1]}
    assert MappedObjects(NO_MAP).history(lists, T0).behaviours.actions.tolist() == [3, 2]
    with pytest.raises(ValueError, match="several lengths"):
        MappedObjects(NO_MAP).history({**lists, "is_like": [1]}, T0)


@pytest.mark.parametrize(
    ("key", "user"),
    [
        (b"7", "7"),
        (b" 7.0", "7"),
        (b'"7"', "7"),
        (b'{"uid": 7.0, "shop": 1}', "7"),
        (b'{"uid": 1.7e+09}', "id 1.7e\\+09 is a float, whose last digits may be lost"),
        (b'"{7}"', "{7}"),
        (b'"7", "8"', "Extra data"),
        (b'{"user_id": 7}', "no field for the user among user_id: name it by --columns user=NAME"),
        (b'"7', "Unterminated string"),
        (b"{7", "not JSON: "),
        (b"", "an id is empty"),
        (b"\0\0\0\7", "user id: text contains control characters"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_the_key_of_a_deletion_is_read_as_an_id_is(key: bytes, user: str) -> None:
    mapped = MappedObjects(log_map(COLUMNS, ACTIONS))
    if " " not in user:
        assert mapped.deleted_user(key) == user
        return
    with pytest.raises(ValueError, match=f"^the key: {user}"):
        mapped.deleted_user(key)


def test_the_user_of_a_key_has_a_known_name_without_a_map() -> None:
    assert MappedObjects(NO_MAP).deleted_user(b'{"userId": "ann"}') == "ann"


@pytest.mark.parametrize("late", ["timestamp", "rating", "action"])
def test_a_field_of_json_lines_that_comes_after_the_first_ones_is_not_lost(tmp_path: Path, late: str) -> None:
    """Writers that leave out null make such logs. All codes would be 0, all times too."""
    every = {"user_id": "ann", "item_id": 7, "timestamp": 1_700_000_000}
    first = {name: value for name, value in every.items() if name != late} | {"price": 3}
    lines = [*[first] * 30, first | {late: 5}, first | {"note": "a field that is not read may come at any time"}]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(RelayError, match=rf"log\.jsonl: line 31: {late} is in none of the first 20 lines"):
        read_interactions(path)
    path.write_text("\n".join(map(json.dumps, [*lines[:30], lines[31]])))
    assert read_interactions(path).report.interactions == 31


def test_the_command_says_which_code_an_event_has(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(json_text(ROWS))
    done = dry_run(tmp_path / "log", "--columns", COLUMNS, "--actions", ACTIONS)
    assert done.exit_code == 0, done.output
    assert "Layout       JSON lines (an object on each line, with uid and sku)" in done.output
    assert "Actions      1, 2 (view=1, click=2)" in done.output
    assert "columns not used: price" in done.output


@pytest.mark.parametrize(
    ("actions", "wrong"),
    [("view=1", None), ("click=2,view=1", None), ("view=2,click=1", "view=2, click=1"), ("view=1,buy=3", "buy=3")],
)
def test_codes_of_events_are_compared_with_those_of_the_model(tmp_path: Path, actions: str, wrong: str | None) -> None:
    write_action_names(tmp_path, {"view": 1, "click": 2})
    if wrong is None:
        assert named_log(None, actions, tmp_path).actions == log_map(None, actions).actions
        return
    with pytest.raises(RelayError, match=f"--actions gives {wrong}, but .* was trained with view=1,click=2"):
        named_log(None, actions, tmp_path)
    write_action_names(tmp_path, {})
    assert named_log(None, actions, tmp_path).actions, "a model that keeps no names has none to compare"


def test_a_model_that_keeps_the_codes_of_events_gives_them(tmp_path: Path) -> None:
    config = small_config()
    save_checkpoint(tmp_path / "model", config, random_checkpoint(config, seed=1).tensors)
    write_action_names(tmp_path / "model", {"view": 1, "click": 2})
    rows = [row | {"sku": 1} for row in ROWS]
    (tmp_path / "log").write_text(json_text(rows))
    done = dry_run(tmp_path / "log", "--columns", COLUMNS, "--model", tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert "Actions      1, 2 (view=1, click=2)" in done.output
    (tmp_path / "model" / "actions.json").write_text("[1]")
    done = dry_run(tmp_path / "log", "--columns", COLUMNS, "--model", tmp_path / "model")
    assert "actions.json is no object of event names and codes" in done.output.replace("\n", " ")


def test_only_a_column_of_a_like_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"uid,sku,shopped\nann,1,{T0}\n")
    with pytest.raises(RelayError, match=r"there is no such column among uid, sku, shopped\."):
        read(tmp_path / "log", "user=uid,item=sku,time=happened@", None)
