"""Interaction logs of Parquet: files of other programs, folders, bad rows, and rows that repeat others."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.ingest import parquet
from relaygr.ingest.gather import Limits, hashed_item
from relaygr.ingest.layouts import LayoutKind
from relaygr.ingest.log_map import LogMap
from relaygr.ingest.reading import joined, log_files, read_interactions, recognise
from relaygr.runtime.errors import RelayError
from relaygr.training.logs import Ties
from tests.cli.test_interactions import of

Write = Callable[..., Path]
T0 = 1_600_000_000


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a Parquet file of columns."""

    def write_file(name: str = "log.parquet", options: dict[str, Any] | None = None, **columns: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, **(options or {}))
        return path

    return write_file


def test_amazon_reviews(write: Write) -> None:
    path = write(
        rating=[5.0, 1.0, 4.0],
        title=["a", None, "b"],
        asin=["B1", "B2", "B3"],
        parent_asin=["P1", "P2", "P1"],
        user_id=["U", "U", "V"],
        timestamp=[T0 * 1000 + 5, T0 * 1000, T0 * 1000],
    )
    read = read_interactions(path)
    assert of(read, "U") == [(hashed_item("P2"), 2, T0 * 1000), (hashed_item("P1"), 10, T0 * 1000 + 5)]
    report = read.report
    assert report.layout.kind is LayoutKind.PARQUET and report.layout.has_ratings and report.layout.has_times
    assert "columns not used: title, asin" in report.notes and "timestamps are taken as milliseconds" in report.notes


def test_the_same_log_as_text_and_as_parquet_is_the_same(write: Write, tmp_path: Path) -> None:
    rows = [(f"u{n % 7}", n % 5, n % 10 / 2, T0 + 97 * n % 50) for n in range(200)]
    text = tmp_path / "ratings.csv"
    text.write_text("userId,movieId,rating,timestamp\n" + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in rows))
    users, items, ratings, times = zip(*rows, strict=True)
    wanted = read_interactions(text)
    for path in (
        write("a.parquet", userId=users, movieId=items, rating=ratings, timestamp=times),
        write("b.parquet", {"row_group_size": 7}, user=users, item=map(str, items), rating=ratings, ts=times),
    ):
        found = read_interactions(path)
        assert found.users == wanted.users and found.behaviours == wanted.behaviours
        assert found.item_numbers == wanted.item_numbers and found.report.actions == wanted.report.actions


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (pa.array([T0], pa.timestamp("s")), {}),
        (pa.array([T0 * 1000], pa.timestamp("ms", "UTC")), {}),
        (pa.array([T0 * 10**6 + 999], pa.timestamp("us")), {}),
        (pa.array([T0 * 10**9 + 999_999], pa.timestamp("ns", "Europe/Berlin")), {}),
        (pa.array([T0 * 1000], pa.timestamp("ms")), {"use_deprecated_int96_timestamps": True}),
        (pa.array([T0], pa.int32()), {}),
        (pa.array([T0 * 10**9], pa.uint64()), {}),
        (pa.array([T0 + 0.0004], pa.float64()), {}),
    ],
    ids=["s", "ms", "us", "ns", "int96", "int32 seconds", "nanoseconds", "float seconds"],
)
def test_times_of_each_type_are_ms(write: Write, column: Any, options: dict[str, Any]) -> None:
    read = read_interactions(write(options=options, user_id=["a"], item_id=[1], timestamp=column))
    assert of(read, "a") == [(1, 0, T0 * 1000)]


def test_a_date_is_its_midnight(write: Write) -> None:
    read = read_interactions(write(user=["a"], item=[1], time=[datetime.date(2020, 9, 13)]))
    assert of(read, "a") == [(1, 0, 1_599_955_200_000)]


def test_ids_of_each_type(write: Write) -> None:
    """An id of text and of a number is the same id, as is a float that pandas made of it."""
    users = [pa.array([7]), pa.array(["7"]), pa.array([7.0]), pa.array([b"7"]), pa.array(["7"]).dictionary_encode()]
    logs = [read_interactions(write(user_id=column, item_id=column, timestamp=[T0])) for column in users]
    assert [(log.users, log.item_numbers.get("7")) for log in logs] == [(["7"], 7)] * 5
    assert len(joined(logs).of(0)) == 5


@pytest.mark.parametrize(
    "column",
    [
        pa.array([Decimal(0)], pa.decimal128(38, 10)),
        pa.array(["0"], pa.string_view()),
        pa.array([b"0"], pa.large_binary()),
        pa.array([b"0"], pa.binary_view()),
        pa.array([0.0], pa.float32()),
    ],
    ids=lambda column: str(column.type),
)
def test_ids_of_rare_types(write: Write, column: Any) -> None:
    read = read_interactions(write(user_id=column, item_id=column, timestamp=[T0]))
    assert (read.users, read.item_numbers.get("0")) == (["0"], 0)


def test_a_float_of_32_bits_that_may_have_lost_digits_is_no_id(write: Write) -> None:
    ids = pa.array([2.0**24, 2.0**24 + 2], pa.float32())
    read = read_interactions(write(user_id=["a", "a"], item_id=ids, timestamp=[T0, T0]))
    assert [item for item, _, _ in of(read, "a")] == [2**24]
    assert "id 1.677721800e+07 is a float, whose last digits may be lost" in read.report.bad_lines[0].reason


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array([1]), pa.array([2]), pa.array([T0])]
    path = tmp_path / "log.parquet"
    pq.write_table(pa.Table.from_arrays(columns, names=["user_id", "item_id", "item_id", "timestamp"]), path)
    with pytest.raises(RelayError, match="has two columns item_id"):
        read_interactions(path)


@pytest.mark.filterwarnings("error")
def test_a_file_with_bad_rows_only(write: Write) -> None:
    read = read_interactions(write(user_id=pa.array([None], pa.string()), item_id=[1], timestamp=[T0]))
    assert read.users == [] and len(read.report.bad_lines) == 1


def test_columns_of_folder_names_are_noted(write: Write, tmp_path: Path) -> None:
    write("logs/action=1/p.parquet", user_id=["a"], item_id=[1], timestamp=[T0])
    assert "columns in the names of folders are not used: action" in recognise(tmp_path / "logs").notes


def test_rows_without_a_user_an_item_a_time_or_a_rating_are_bad_lines(write: Write) -> None:
    path = write(
        user_id=["a", None, "a", "a", "a", "", "a"],
        item_id=pa.array([1.0, 2, None, 4, 1e17, 6, 7]),
        timestamp=pa.array([T0, T0, T0, None, T0, T0, -5], pa.int64()),
        rating=[1.0, 1, 1, 1, 1, 1, 1],
    )
    read = read_interactions(path)
    assert of(read, "a") == [(1, 2, T0 * 1000)]
    assert [(bad.number, bad.reason.split(":")[0]) for bad in read.report.bad_lines] == [
        (2, "an id is empty"),
        (3, "an id is empty"),
        (4, "timestamp is '', expected a number or 2026-11-27T08"),
        (5, "id 1e+17 is a float, whose last digits may be lost"),
        (6, "an id is empty"),
        (7, "timestamp is '-5', expected 0 to 4000000000000000000"),
    ]
    with pytest.raises(RelayError, match="more than 2 bad lines, read as Parquet"):
        read_interactions(path, Limits(max_bad_lines=2))
    with pytest.raises(RelayError, match="more than 3 lines"):
        read_interactions(path, Limits(max_lines=3))


def test_a_time_of_another_unit_is_a_bad_line_with_its_file(write: Write, tmp_path: Path) -> None:
    write("logs/part-0.parquet", user_id=["a"] * 3, item_id=[1, 2, 3], timestamp=[T0, T0 + 1, T0 + 2])
    write("logs/part-1.parquet", user_id=["a"] * 2, item_id=[4, 5], timestamp=[T0 + 3, T0 * 1000])
    read = read_interactions(tmp_path / "logs")
    assert [item for item, _, _ in of(read, "a")] == [1, 2, 3, 4]
    assert [(bad.number, bad.reason) for bad in read.report.bad_lines] == [
        (2, "part-1.parquet: timestamp is 1600000000000, milliseconds among seconds")
    ]


def test_codes_and_flags(write: Write) -> None:
    read = read_interactions(write(user_id=["a"], item_id=[1], timestamp=[T0], action=[300]))
    assert of(read, "a") == [(1, 300, T0 * 1000)] and not read.report.layout.has_ratings
    flags = read_interactions(write(user_id=[1], video_id=[2], time_ms=[T0 * 1000], is_click=[1], long_view=[True]))
    assert of(flags, "1") == [(2, 65, T0 * 1000)]
    floats = write(user_id=["a"] * 3, item_id=[1, 2, 3], timestamp=[T0] * 3, Action=[5.0, None, 1.5])
    read = read_interactions(floats)
    assert of(read, "a") == [(1, 5, T0 * 1000)]
    assert [bad.reason for bad in read.report.bad_lines] == [
        f"action is '{text}', expected a code of 0 to 65535: give names a code by --actions" for text in ("", "1.5")
    ]


@pytest.mark.parametrize("zone", [None, "Asia/Seoul"])
def test_times_without_a_zone_are_taken_as_utc_and_a_note_says_so(
    write: Write, tmp_path: Path, zone: str | None
) -> None:
    """Some writers mean the clock on their wall, which nothing in the file says."""
    log = write("1.parquet", user_id=["a"], item_id=[1], timestamp=pa.array([T0 * 10**6], pa.timestamp("us", zone)))
    text = tmp_path / "log.csv"
    text.write_text(f"user_id,item_id,timestamp\na,1,2020-09-13 12:26:40{'+09:00' if zone else ''}\n")
    for path in (log, text):
        assert ("times without a zone are taken as UTC" in read_interactions(path).report.notes) is (zone is None)


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(write: Write, tmp_path: Path) -> None:
    for name, item in (("b/1.parquet", 2), ("a/2.parquet", 1), ("_temporary/0.parquet", 9), (".hidden.parquet", 9)):
        write(f"logs/{name}", user_id=["a"], item_id=[item], timestamp=[T0])
    (tmp_path / "logs" / "_SUCCESS").write_text("")
    seen: list[int] = []
    read = read_interactions(tmp_path / "logs", on_progress=seen.append, log_map=LogMap(ties=Ties.FILE))
    assert [item for item, _, _ in of(read, "a")] == [1, 2]
    assert seen == sorted(seen) and seen[-1] == parquet_bytes(tmp_path / "logs")


def parquet_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in log_files(folder))


def test_folders_that_links_name_are_read_once_and_a_link_that_leads_nowhere_is_an_error(
    write: Write, tmp_path: Path
) -> None:
    for name, item in (("elsewhere/1.parquet", 1), ("logs/day=2/1.parquet", 2)):
        write(name, user_id=["a"], item_id=[item], timestamp=[T0])
    for name, target in (("day=1", "../elsewhere"), ("latest", "day=2"), ("day=2/up", "..")):
        (tmp_path / "logs" / name).symlink_to(target)
    read = read_interactions(tmp_path / "logs", log_map=LogMap(ties=Ties.FILE))
    assert [item for item, _, _ in of(read, "a")] == [1, 2]
    (tmp_path / "logs" / "day=3.parquet").symlink_to("gone")
    with pytest.raises(RelayError, match=r"day=3\.parquet cannot be read: No such file"):
        read_interactions(tmp_path / "logs")


@pytest.mark.parametrize(
    ("beside", "what"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table"),
        (".hoodie/hoodie.properties", "a Hudi table"),
        ("metadata/00000-1.metadata.json", "an Iceberg table"),
        ("_spark_metadata/0", "a table that a Spark stream wrote"),
    ],
)
@pytest.mark.parametrize("given", ["", "data/day=1"], ids=["the table", "a part of it"])
def test_a_table_of_which_a_log_says_what_counts_is_refused(
    write: Write, tmp_path: Path, beside: str, what: str, given: str
) -> None:
    """Its folder has the rows of deleted users, and those of each rewrite once more."""
    write("shop/data/day=1/1.parquet", user_id=["a"], item_id=[1], timestamp=[T0])
    (tmp_path / "shop" / beside).parent.mkdir()
    (tmp_path / "shop" / beside).write_text("{}")
    with pytest.raises(RelayError, match=f"shop is {what}: .* Write its rows to another folder"):
        read_interactions(tmp_path / "shop" / given)


@pytest.mark.parametrize("places", [("0", "3"), ("5", "6")], ids=["first", "last"])
def test_files_of_empty_partitions_have_no_rows_and_need_no_types(
    write: Write, tmp_path: Path, places: tuple[str, str]
) -> None:
    """Spark writes a file without bytes, Dask one whose columns have no type."""
    hour = pa.array([T0 * 1000, (T0 + 3600) * 1000], pa.timestamp("ms"))
    write("logs/part-4.parquet", user_id=["kim", "lea"], item_id=[8, 9], timestamp=hour)
    (tmp_path / "logs" / f"part-{places[0]}.parquet").write_bytes(b"")
    write(f"logs/part-{places[1]}.parquet", user_id=pa.nulls(0), item_id=pa.nulls(0), timestamp=pa.nulls(0))
    read = read_interactions(tmp_path / "logs")
    assert [item for item, _, _ in of(read, "lea")] == [9] and read.report.interactions == 2
    assert "2 files have no rows" in read.report.notes


def test_a_folder_of_text_may_have_files_without_bytes_and_those_of_the_file_system(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "#131").write_bytes(b"\0")
    (tmp_path / "part-00000.csv").write_text("")
    (tmp_path / "part-00001.csv").write_text("user_id,item_id,timestamp\nada,5,1600000000\n")
    (tmp_path / "part-00002.csv").write_text("")
    read = read_interactions(tmp_path)
    assert read.users == ["ada"] and "2 files have no rows" in read.report.notes
    (tmp_path / "part-00001.csv").write_text("")
    with pytest.raises(RelayError, match=r"part-00000\.csv is empty"):
        read_interactions(tmp_path)


@pytest.mark.parametrize("missing", ["user_id", "item_id", "timestamp", "rating"])
@pytest.mark.parametrize("name", ["a.parquet", "c.parquet"], ids=["first", "last"])
def test_a_column_whose_values_are_all_missing_makes_bad_lines(
    write: Write, tmp_path: Path, missing: str, name: str
) -> None:
    hour = pa.array([T0 * 1000], pa.timestamp("ms"))
    columns = {"user_id": ["kim"], "item_id": [8], "timestamp": hour, "rating": [4.5]}
    write("logs/b.parquet", **columns)
    write(f"logs/{name}", **{**columns, missing: pa.nulls(1)})
    read = read_interactions(tmp_path / "logs")
    assert of(read, "kim") == [(8, 9, T0 * 1000)] and len(read.report.bad_lines) == 1


def test_files_that_do_not_fit_together_are_refused(write: Write, tmp_path: Path) -> None:
    write("logs/1.parquet", user_id=["a"], item_id=[1], timestamp=[T0])
    other = write("logs/2.parquet", user_id=["a"], item_id=[1])
    with pytest.raises(
        RelayError, match=r"2\.parquet differs from the first file of the folder in its column of times"
    ):
        read_interactions(tmp_path / "logs")
    for name, flag in (("1", "is_click"), ("2", "is_like")):
        write(f"flags/{name}.parquet", user_id=[1], video_id=[2], time_ms=[T0 * 1000], **{flag: [1]})
    with pytest.raises(RelayError, match=r"2\.parquet differs from the first file of the folder in its flags"):
        read_interactions(tmp_path / "flags")
    other.write_bytes(other.read_bytes()[:-10])
    with pytest.raises(RelayError, match=r"2\.parquet is not a Parquet file that can be read"):
        read_interactions(tmp_path / "logs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RelayError, match="a folder without files"):
        recognise(tmp_path / "empty")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"user_id": ["a"], "timestamp": [T0]},
            "no column for the item among user_id, timestamp",
        ),
        (
            {"user_id": ["a"], "item_id": [[1]], "timestamp": [T0]},
            r"item_id is list<.*>, expected numbers .*a row for each",
        ),
        ({"user_id": ["a"], "item_id": [1], "timestamp": [True]}, "timestamp is bool, expected timestamps"),
        (
            {"user_id": ["a"], "item_id": [1], "timestamp": pa.array([2.0**30], pa.float32())},
            "timestamp is float, expected timestamps, whole numbers, floats of 64 bits",
        ),
        ({"user_id": [True], "item_id": [1], "timestamp": [T0]}, "user_id is bool"),
    ],
    ids=["no item", "lists", "times of bool", "times of 32 bits", "users of bool"],
)
def test_columns_that_cannot_be_read_are_refused(write: Write, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(RelayError, match=said):
        read_interactions(write(**columns))


def test_without_pyarrow_the_error_names_the_extra(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(user_id=["a"], item_id=[1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for command in (
        ["publish", "history", "--dry-run", "--interactions", str(path)],
        ["train", "collect", str(path.parent / "folder"), "--bootstrap", "127.0.0.1:1"],
    ):
        done = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
        assert done.exit_code == 1 and "pip install 'relaygr[training]'" in done.output
        assert not (path.parent / "folder").exists()


def test_memory_is_bounded_by_a_batch_and_the_columns(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch has more rows than asked, however large a row group is."""
    count = 5000
    path = write(
        options={"row_group_size": count}, user_id=["a"] * count, item_id=list(range(count)), timestamp=[T0] * count
    )
    monkeypatch.setattr(parquet, "BATCH_ROWS", 512)
    sizes = [len(block.rows) for block in parquet.read_rows(path, ("user_id", "item_id"))]
    assert max(sizes) <= 512 and len(sizes) >= 10
    assert len(read_interactions(path).of(0)) == count


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"store_schema": False}], ids=["arrow's dictionary", "dictionary"])
def test_a_small_file_with_one_long_text_for_all_rows_takes_little_memory(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """As copies for 50,000 rows it would be 2.5 GB."""
    path, rows, text = tmp_path / "log.parquet", 50_000, "y" * 50_000
    item = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), [text])
    pq.write_table(pa.table({"user_id": ["a"] * rows, "item_id": item, "timestamp": [T0] * rows}), path, **options)
    code = (
        "import sys, pathlib\n"
        "from relaygr.ingest.reading import read_interactions\n"
        "from relaygr.runtime.errors import RelayError\n"
        "try:\n    read_interactions(pathlib.Path(sys.argv[1]))\n"
        "except RelayError as error:\n    print(error)\n"
        "print(pathlib.Path('/proc/self/status').read_text())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert path.stat().st_size < 1 << 20
    assert "item id: 50000 bytes of text, expected 1 to 4096" in done.stdout
    assert int(done.stdout.partition("VmHWM:")[2].split()[0]) < 1_000_000, "KiB"


def test_gaps_and_repeated_texts_of_a_dictionary_are_read(write: Write) -> None:
    places = pa.array([1, None, 0, 1], pa.int8())
    users = pa.DictionaryArray.from_arrays(places, ["b", "a", "unused"])
    items = pa.DictionaryArray.from_arrays(places.fill_null(0), pa.array([40, 50]))
    read = read_interactions(write(user_id=users, item_id=items, timestamp=[T0, T0, T0, T0 + 1]))
    assert (of(read, "a"), of(read, "b")) == ([(50, 0, T0 * 1000), (50, 0, T0 * 1000 + 1000)], [(40, 0, T0 * 1000)])
    assert [(bad.number, bad.reason) for bad in read.report.bad_lines] == [(2, "an id is empty")]


def test_a_file_whose_bytes_were_changed_is_read_or_refused_with_a_sentence(write: Write) -> None:
    """Also names that are no UTF-8, and columns that the schema has and the data has not."""
    path = write(
        user_id=[f"u{n % 9}" for n in range(200)], item_id=list(range(200)), timestamp=[T0 + n for n in range(200)]
    )
    whole, random, refused = path.read_bytes(), np.random.default_rng(11), 0
    for _ in range(120):
        changed = bytearray(whole)
        for _ in range(int(random.integers(1, 4))):
            changed[-1 - int(random.integers(1200))] = int(random.integers(256))
        path.write_bytes(changed)
        try:
            read_interactions(path)
        except RelayError:
            refused += 1
    assert refused > 30
    for name, other in ((b"user_id", b"user_\xffd"), (b"item_id", b"item_ix")):
        # Of the columns' paths, and not of the schema before them.
        head, _, tail = whole.rpartition(name)
        for changed in head + other + tail, whole.replace(name, other):
            path.write_bytes(changed)
            with contextlib.suppress(RelayError):
                read_interactions(path)
