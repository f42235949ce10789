"""`relaygr data yambda`: files with the published columns and types become a log, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.ingest import yambda
from relaygr.ingest.gather import Limits
from relaygr.ingest.reading import read_interactions
from relaygr.ingest.yambda import BEGINNING, convert
from relaygr.runtime.errors import RelayError
from relaygr.training.logs import usable
from relaygr.training.options import Protocol
from relaygr.training.splits import Part, split_log
from relaygr.training_progress import training_log

T0_MS = int(BEGINNING.timestamp() * 1000)
SCHEMA = pa.schema(
    [
        ("uid", pa.uint32()),
        ("timestamp", pa.uint32()),
        ("item_id", pa.uint32()),
        ("is_organic", pa.uint8()),
        ("played_ratio_pct", pa.uint16()),
        ("track_length_seconds", pa.uint32()),
        ("event_type", pa.dictionary(pa.uint32(), pa.large_string())),
    ]
)
"""Of `flat/50m/multi_event.parquet`."""
EVENTS: list[tuple[Any, ...]] = [
    (100, 0, 7, 1, 100, 210, "listen"),
    (100, 0, 7, 1, None, None, "like"),
    (100, 25_999_995, 9_390_623, 0, 49, 180, "listen"),
    (200, 5, 8, 0, 159, 180, "listen"),
    (200, 5, 8, 0, None, None, "dislike"),
    (200, 10, 8, 0, None, None, "undislike"),
    (200, 15, 9, 1, 50, 200, "listen"),
    (300, 20, 9, 1, None, None, "unlike"),
]


def write(path: Path, rows: list[tuple[Any, ...]], schema: pa.Schema = SCHEMA) -> Path:
    columns = {
        field.name: pa.array(values, field.type) for field, values in zip(schema, zip(*rows, strict=True), strict=True)
    }
    pq.write_table(pa.table(columns, schema), path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write(tmp_path / "multi_event.parquet", EVENTS)


def histories(folder: Path) -> dict[str, list[tuple[int, int, int]]]:
    """User -> item, action code and ms after the beginning."""
    read = read_interactions(folder / "log.parquet")
    return {
        user: [
            (item, code, at_ms - T0_MS)
            for item, code, at_ms in zip(
                own.items.tolist(), own.actions.tolist(), own.timestamps_ms.tolist(), strict=True
            )
        ]
        for user, own in ((user, read.of(place)) for place, user in enumerate(read.users))
    }


def many(users: int = 200, each: int = 40) -> list[tuple[Any, ...]]:
    random = np.random.default_rng(0)
    return [
        (10 * user, 5 * at + 5 * user % 50, int(random.integers(50)), 1, int(random.integers(101)), 200, "listen")
        for user in range(1, users + 1)
        for at in range(each)
    ]


def test_the_listens_of_the_published_columns_are_a_log_with_listen_plus_as_its_good_ratings(
    files: Path, tmp_path: Path
) -> None:
    converted = convert([files], tmp_path / "out")
    assert histories(tmp_path / "out") == {
        "100": [(7, 10, 0), (9_390_623, 2, 25_999_995_000)],
        "200": [(8, 10, 5000), (9, 10, 15_000)],
    }
    found = (converted.rows, converted.listens, converted.listen_plus, converted.users, converted.longest)
    assert found == (8, 4, 3, 2, 2)
    report = read_interactions(tmp_path / "out" / "log.parquet").report
    assert report.layout.has_ratings and report.time_unit == "milliseconds"
    assert "made up" in (tmp_path / "out" / "SOURCE.txt").read_text()


def test_the_file_of_listens_alone_gives_the_same_log(files: Path, tmp_path: Path) -> None:
    listens = [row[:-1] for row in EVENTS if row[-1] == "listen"]
    alone = write(tmp_path / "listens.parquet", listens, SCHEMA.remove(6))
    convert([files], tmp_path / "both")
    convert([alone], tmp_path / "alone")
    assert histories(tmp_path / "alone") == histories(tmp_path / "both")


def test_a_log_of_yambda_trains_with_listen_plus_as_its_task_and_is_split_at_one_time(tmp_path: Path) -> None:
    convert([write(tmp_path / "multi_event.parquet", many())], tmp_path / "out")
    log = usable(training_log([read_interactions(tmp_path / "out" / "log.parquet")]))
    split = split_log(log, Protocol.GLOBAL_TIME)
    assert split.has_liked and split.liked_note() == ""
    assert split.liked.mean() == pytest.approx(sum(row[4] >= 50 for row in many()) / len(many()))
    assert split.judged_users(Part.TEST).size > 50


def test_a_share_of_the_users_is_the_same_in_every_file_and_has_their_whole_histories(tmp_path: Path) -> None:
    rows = many()
    whole = write(tmp_path / "multi_event.parquet", rows)
    parts = [write(tmp_path / f"{place}.parquet", rows[place::2]) for place in range(2)]
    convert([whole], tmp_path / "all")
    everyone = histories(tmp_path / "all")
    convert([whole], tmp_path / "some", 0.25)
    some = histories(tmp_path / "some")
    convert(parts, tmp_path / "parts", 0.25)
    assert 25 < len(some) < 75 and some == {user: everyone[user] for user in some}
    assert histories(tmp_path / "parts") == some
    convert([whole], tmp_path / "more", 0.5)
    assert set(some) < set(histories(tmp_path / "more")), "a larger share has the users of a smaller one"


def test_small_batches_give_the_same_log_as_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "multi_event.parquet", many(20))
    convert([whole], tmp_path / "large")
    monkeypatch.setattr(yambda, "_GROUP_ROWS", 64)
    seen: list[int] = []
    convert([whole], tmp_path / "small", reached=seen.append, batch_rows=7)
    assert seen[:2] == [7, 14] and seen[-1] == 800
    assert histories(tmp_path / "small") == histories(tmp_path / "large")


def test_the_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """One row group, as large as a writer likes."""
    count = 1_000_000
    table = pa.table(
        {
            "uid": pa.array(np.repeat(np.arange(count // 1000), 1000).astype(np.uint32)),
            "timestamp": pa.array((5 * np.arange(count)).astype(np.uint32)),
            "item_id": pa.array(np.random.default_rng(0).integers(0, 2**32, count).astype(np.uint32)),
            "played_ratio_pct": pa.array(np.full(count, 60, np.uint16)),
        }
    )
    path, size_bytes = tmp_path / "listens.parquet", table.nbytes
    pq.write_table(table, path, row_group_size=count, use_dictionary=False)
    del table
    pool, held = pa.default_memory_pool(), []
    before = pool.bytes_allocated()
    convert([path], tmp_path / "out", 0.01, reached=lambda rows: held.append(pool.bytes_allocated()), batch_rows=4096)
    assert len(held) > 200 and max(held) - before < size_bytes / 3


def changed(**values: Any) -> Callable[[Path], Path]:
    """The published file with a column of other values; None: without it."""

    def write_changed(folder: Path) -> Path:
        table = pa.table(dict(zip(SCHEMA.names, map(list, zip(*EVENTS, strict=True)), strict=True)))
        for name, value in values.items():
            at = table.schema.get_field_index(name)
            table = table.remove_column(at)
            if value is not None:
                table = table.append_column(name, pa.array(value))
        pq.write_table(table, folder / "multi_event.parquet")
        return folder / "multi_event.parquet"

    return write_changed


def text_file(folder: Path) -> Path:
    (folder / "multi_event.csv").write_text("uid,item_id\n1,2\n")
    return folder / "multi_event.csv"


COUNT = len(EVENTS)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (changed(played_ratio_pct=None), "has no column played_ratio_pct, only"),
        (changed(item_id=[[1, 2]] * COUNT), "lists in item_id.*the folder `flat`"),
        (changed(uid=["a"] * COUNT), "the column uid is string, and Yambda's is integer"),
        (changed(event_type=[1] * COUNT), "the column event_type is int64, and Yambda's is text"),
        (changed(event_type=["listen", "skip"] * (COUNT // 2)), "row 2 has another event than listen, like"),
        (changed(event_type=["listen", None] * (COUNT // 2)), "row 2 has another event"),
        (changed(event_type=["listen"] * COUNT), "row 2 is a listen without played_ratio_pct"),
        (changed(uid=[*range(COUNT - 1), None]), "row 8 has no uid"),
        (changed(timestamp=[5, 6, *range(COUNT - 2)]), "row 2 has a time that is no multiple of 5 s"),
        (changed(timestamp=[1_700_000_000] * COUNT), "row 1 has a time that is not within two years"),
        (changed(event_type=["like"] * COUNT), "None of the 8 events is a listen"),
        (text_file, "is not a Parquet file"),
        (lambda folder: folder / "nowhere.parquet", "nowhere.parquet is no file"),
    ],
)  # fmt: skip
def test_a_file_that_differs_is_refused_with_what_differs_and_nothing_is_left(
    tmp_path: Path, other: Callable[[Path], Path], said: str
) -> None:
    with pytest.raises(RelayError, match=said):
        convert([other(tmp_path)], tmp_path / "out", batch_rows=3)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_log_is_not_written_over_a_file_that_it_is_made_of(files: Path, tmp_path: Path) -> None:
    moved = files.rename(tmp_path / "log.parquet")
    with pytest.raises(RelayError, match="written over itself"):
        convert([moved], tmp_path)
    assert pq.read_metadata(moved).num_rows == COUNT


def test_more_events_than_a_training_reads_are_refused_with_the_share_that_fits(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yambda, "Limits", lambda: Limits(max_lines=4))
    with pytest.raises(RelayError, match=r"8 events.*at most 4.*--user-share 0\.45"):
        convert([files], tmp_path / "out")
    convert([write(tmp_path / "many.parquet", many(20, 40)[:8])], tmp_path / "out", 0.5)


def test_the_command_says_what_was_written_and_how_to_go_on(files: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", "yambda", str(files), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "8 events" in result.output and "4 listens of 2 users (median 2, longest 2); 75.0% played" in result.output
    assert f"relaygr train ranker {tmp_path / 'out' / 'log.parquet'} --out RUN --protocol global-time" in result.output
