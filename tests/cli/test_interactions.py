"""Interaction logs: each layout is recognised by content and read whole; a bad file is refused with a reason."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.ingest import layouts
from relaygr.ingest.gather import BadIdError, BadLine, Interactions, ItemIndex, Limits, UserIndex, hashed_item
from relaygr.ingest.layouts import LayoutKind
from relaygr.ingest.log_map import LogMap, recorded_map
from relaygr.ingest.reading import joined, read_interactions, recognise
from relaygr.runtime.errors import RelayError
from relaygr.training import logs
from relaygr.training.logs import Ties, usable
from relaygr.training.options import Protocol
from relaygr.training.splits import Part, split_log
from relaygr.training_progress import training_log

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
KUAIRAND = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)

IN_FILE = LogMap(ties=Ties.FILE)
REVIEWS = "userId,movieId,rating,timestamp,review\n"
INTER_REVIEWS = "user_id:token\titem_id:token\trating:float\ttimestamp:float\treview:token_seq\n"
Behaviour = tuple[int, int, int]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of interactions."""

    def write_file(content: str | bytes, name: str = "log.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


def as_recbole(log: str) -> str:
    """A log with the header `REVIEWS`, as RecBole reads it: by pandas, which honours quotes."""
    return log.replace(REVIEWS.strip(), INTER_REVIEWS.strip()).replace(",", "\t")


def as_csv(log: str) -> str:
    return log


def of(read: Interactions, user: str) -> list[Behaviour]:
    """(item, action, time) of a user's behaviours."""
    behaviours = read.of(read.users.index(user))
    behaviours.check()
    columns = (behaviours.items, behaviours.actions, behaviours.timestamps_ms)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_recbole_inter(write: Write) -> None:
    path = write(INTER + "a\t10\t3.5\t1000000002\na\t11\t5\t1000000001\nb\t10\t0.5\t1000000003.25\n")
    read = read_interactions(path)
    assert read.report.layout.kind is LayoutKind.RECBOLE
    assert read.users == ["a", "b"]
    assert of(read, "a") == [(11, 10, 1_000_000_001_000), (10, 7, 1_000_000_002_000)]
    assert of(read, "b") == [(10, 1, 1_000_000_003_250)]
    assert (read.report.lines, read.report.interactions, read.report.users, read.report.items) == (4, 3, 2, 2)
    assert (read.report.first_ms, read.report.last_ms) == (1_000_000_001_000, 1_000_000_003_250)


def test_recbole_columns_in_any_order_with_others_among_them(write: Write) -> None:
    header = "timestamp:float\ttags:token_seq\titem_id:token\tuser_id:token\n"
    read = read_interactions(write(header + "1000000001\tx y z\t7\tu\n"))
    assert of(read, "u") == [(7, 0, 1_000_000_001_000)]
    assert "columns not used: tags" in read.report.notes
    assert any("no rating column" in note for note in read.report.notes)


def test_recbole_without_timestamps_keeps_the_order_of_the_file(write: Write) -> None:
    read = read_interactions(write("user_id:token\tartist_id:token\nu\t9\nu\t3\nu\t5\n"))
    assert of(read, "u") == [(9, 0, 0), (3, 0, 0), (5, 0, 0)]
    assert "artist_id is taken as the item" in read.report.notes
    assert any("order of lines" in note for note in read.report.notes)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("user_id:token\titem_id:int\n", "item_id:int: RecBole's types are token, token_seq, float, float_seq"),
        ("user_id:token\titem_id:token_seq\n", "item_id:token_seq, expected item_id:token"),
        ("user_id:token\titem_id:token\ttimestamp:token\n", "expected timestamp:float"),
        ("user_id:token\titem_id:token\trating:token\n", "expected rating:float"),
        ("item_id:token\tprice:float\n", "no user_id:token"),
        ("user_id:token\tage:token\n", "no item_id:token"),
        ("user_id:token\tshop_id:token\tcity_id:token\n", "no item_id:token"),
        ("user_id:token\titem_id:token\tuser_id:token\n", "occurs twice"),
        ("user_id:token item_id:token timestamp:float\n", "not separated by tabs"),
    ],
)
def test_a_recbole_header_that_does_not_fit_is_refused(write: Write, header: str, text: str) -> None:
    with pytest.raises(RelayError, match=text):
        recognise(write(header + "1\t2\t3\n"))


def test_movielens_csv(write: Write) -> None:
    read = read_interactions(write("userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n1,1029,3.0,1260759179\n"))
    assert read.report.layout.kind is LayoutKind.CSV
    assert of(read, "1") == [(31, 5, 1_260_759_144_000), (1029, 6, 1_260_759_179_000)]


def test_quoted_csv(write: Write) -> None:
    path = write('"userId","movieId","rating","timestamp"\n"Smith, J.","a ""b""",4,1260759144\nx,7,4,1260759144\n')
    read = read_interactions(path)
    assert of(read, "Smith, J.") == [(hashed_item('a "b"'), 8, 1_260_759_144_000)]
    assert of(read, "x") == [(7, 8, 1_260_759_144_000)]


def test_u_data(write: Write) -> None:
    read = read_interactions(write("196\t242\t3\t881250949\n186\t302\t3\t891717742\n", "u.data"))
    assert read.report.layout.kind is LayoutKind.MOVIELENS_TAB
    assert of(read, "186") == [(302, 6, 891_717_742_000)]


def test_ratings_dat(write: Write) -> None:
    read = read_interactions(write("1::1193::5::978300760\n1::661::3::978302109\n", "ratings.dat"))
    assert read.report.layout.kind is LayoutKind.MOVIELENS_DAT
    assert of(read, "1") == [(1193, 10, 978_300_760_000), (661, 6, 978_302_109_000)]


def test_latin1_ids_in_ratings_dat(write: Write) -> None:
    read = read_interactions(write("José::Amélie::5::978300760\nZoë::1::5::978300760\n".encode("latin-1")))
    assert read.users == ["José", "Zoë"]
    assert of(read, "José")[0][0] == hashed_item("Amélie")


def test_kuairand(write: Write) -> None:
    rows = (
        "0,3784,20220421,600,1650530400123,1,0,1,0,0,0,1,5000,9000,0,0,1,0,4\n"
        "0,99,20220421,600,1650530400122,0,1,0,0,0,1,0,5000,9000,0,0,0,0,4\n"
        "0,98,20220421,600,1650530400124,0,0,0,0,0,0,0,5000,9000,0,0,0,0,4\n"
    )
    read = read_interactions(write(KUAIRAND + rows))
    assert read.report.layout.kind is LayoutKind.KUAIRAND
    assert of(read, "0") == [
        (99, 2 + 32, 1_650_530_400_122),
        (3784, 1 + 4 + 64 + 128, 1_650_530_400_123),
        (98, 0, 1_650_530_400_124),
    ]


def test_the_files_of_kuairand_as_published_are_one_log_that_is_split_at_one_time(tmp_path: Path) -> None:
    """`log_standard_4_08_to_4_21` and `log_standard_4_22_to_5_08`."""
    parts = []
    for name, first_ms in (("4_08_to_4_21", 1_649_400_000_000), ("4_22_to_5_08", 1_650_600_000_000)):
        rows = "".join(
            f"{user},{at % 40},20220421,600,{first_ms + 60_000 * at},{at % 2},0,0,0,0,0,{at % 3 // 2},9,9,0,0,0,0,1\n"
            for user in range(3)
            for at in range(50)
        )
        path = tmp_path / f"log_standard_{name}_1k.csv"
        path.write_text(KUAIRAND + rows)
        parts.append(read_interactions(path))
    log = usable(training_log(parts))
    split = split_log(log, Protocol.GLOBAL_TIME)
    assert log.lengths.tolist() == [100] * 3 and not log.has_ratings and not split.has_liked
    assert split.num_actions == 66 and split.judged_users(Part.TEST).size == 3


def test_the_name_of_the_file_decides_nothing(write: Write) -> None:
    assert recognise(write("1::2::3::4\n", "u.data")).kind is LayoutKind.MOVIELENS_DAT


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("last", ["", "END", "ENDEND"])
def test_line_ends_byte_order_marks_and_gzip(write: Write, line_end: str, bom: bytes, packed: bool, last: str) -> None:
    rows = ["userId,movieId,rating,timestamp", "1,2,3,1000000000", "1,3,3,1000000001"]
    content = bom + (line_end.join(rows) + last.replace("END", line_end)).encode()
    read = read_interactions(write(gzip.compress(content) if packed else content))
    assert of(read, "1") == [(2, 6, 1_000_000_000_000), (3, 6, 1_000_000_001_000)]
    assert read.report.bad_lines == ()


def test_equal_times_keep_the_order_of_the_file_if_that_is_asked_for(write: Write) -> None:
    rows = [f"u\t{item}\t1\t{1_000_000_000 + item // 50}\n" for item in range(200)]
    shuffled = [rows[index] for index in np.random.default_rng(3).permutation(200)]
    read = read_interactions(write(INTER + "".join(shuffled)), log_map=IN_FILE)
    expected = sorted((int(row.split("\t")[1]) // 50, place) for place, row in enumerate(shuffled))
    assert [item for item, _, _ in of(read, "u")] == [int(shuffled[place].split("\t")[1]) for _, place in expected]


@pytest.mark.parametrize(
    ("time", "expected_ms", "unit"),
    [
        ("978300760", 978_300_760_000, "seconds"),
        ("978300760.5", 978_300_760_500, "seconds"),
        ("9.7830076e8", 978_300_760_000, "seconds"),
        ("978300760123", 978_300_760_123, "milliseconds"),
        ("978300760123000", 978_300_760_123, "microseconds"),
    ],
)
def test_the_unit_of_time_is_told_from_the_values(write: Write, time: str, expected_ms: int, unit: str) -> None:
    read = read_interactions(write(INTER + f"u\t1\t1\t{time}\n"))
    assert of(read, "u")[0][2] == expected_ms
    assert f"timestamps are taken as {unit}" in read.report.notes


def test_bad_lines_are_left_out_with_number_and_reason(write: Write) -> None:
    bad = {
        3: ("u\t1\t1", "3 fields, expected 4"),
        5: ("u\t1\t1\tnoon", "timestamp is 'noon', expected a number or 2026-11-27T08:30:00Z"),
        6: ("u\t1\tnan\t1000000000", "rating is 'nan', expected 0 to 32767"),
        7: ("u\t1\t-1\t1000000000", "rating is '-1', expected 0 to 32767"),
        8: ("u\t1\t1\tinf", "timestamp is 'inf', expected 0 to 4000000000000000000"),
        10: ("\t1\t1\t1000000000", "an id is empty"),
        11: ("u\t \t1\t1000000000", "an id is empty"),
        12: (f"{'x' * 300}\t1\t1\t1000000000", "user id: 300 bytes of text, expected 1 to 256"),
        13: ("u\x07\t1\t1\t1000000000", "user id: text contains control characters"),
        14: ("u\t1\t1\t1000000000\textra", "5 fields, expected 4"),
    }
    rows = [
        bad[number][0] if number in bad else "" if number == 9 else f"good\t{number}\t1\t1000000000"
        for number in range(2, 20)
    ]
    read = read_interactions(write(INTER + "\n".join(rows)))
    assert read.report.bad_lines == tuple(BadLine(number, reason) for number, (_, reason) in bad.items())
    assert sorted(item for item, _, _ in of(read, "good")) == [2, 4, 15, 16, 17, 18, 19]
    assert read.users == ["good"]
    assert read.report.lines == 18


def test_bytes_that_are_no_utf8_are_a_bad_line(write: Write) -> None:
    read = read_interactions(write(INTER.encode() + b"u\xe9\t1\t1\t1000000000\nu\t1\t1\t1000000000\n"))
    assert read.report.bad_lines == (BadLine(2, "an id is not UTF-8"),)
    assert read.users == ["u"]


def test_a_bad_flag_and_broken_quotes_are_bad_lines(write: Write) -> None:
    good = "0,3784,20220421,600,1650530400123,1,0,0,0,0,0,0,1,1,0,0,0,0,1\n"
    read = read_interactions(write(KUAIRAND + good.replace("123,1,", "123,2,") + good + '0,"37' + good[3:]))
    assert [bad.number for bad in read.report.bad_lines] == [2, 4]
    assert read.report.bad_lines[0].reason == "flag is '2', expected 0 or 1"
    assert read.report.interactions == 1


def test_one_field_too_many_here_and_too_few_there_do_not_even_out(write: Write) -> None:
    good = "1,2,3,1000000000\n"
    path = write("userId,movieId,rating,timestamp\n" + good * 10 + "1,2,3,4,1000000000\n1,2,1000000000\n" + good)
    assert [bad.number for bad in read_interactions(path).report.bad_lines] == [12, 13]


def test_too_many_bad_lines_stop_with_the_first_of_them(write: Write) -> None:
    path = write(INTER + "u\t1\t1\t1000000000\n" + "broken\n" * 8)
    assert len(read_interactions(path, Limits(max_bad_lines=8)).report.bad_lines) == 8
    with pytest.raises(
        RelayError, match=r"more than 7 bad lines, read as RecBole .inter .* line 3: 1 fields, expected 4"
    ):
        read_interactions(path, Limits(max_bad_lines=7))


def test_more_lines_than_the_limit_are_refused(write: Write) -> None:
    with pytest.raises(RelayError, match="more than 3 lines: split it by user"):
        read_interactions(write("1::2::3::4\n" * 4), Limits(max_lines=3))


def test_blocks_of_any_size_read_the_same(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        INTER + "".join(f"u{i % 7}\t{i}\t1\t{1_000_000_000 + i}\r\n" + "x\n" * (i % 9 == 0) for i in range(90))
    )
    whole = read_interactions(path)
    assert len(whole.report.bad_lines) == 10
    for block_bytes in (1, 7, 50, 1000):
        by_blocks = functools.partial(layouts.read_blocks, block_bytes=block_bytes)
        monkeypatch.setattr("relaygr.ingest.reading.read_blocks", by_blocks)
        parts = read_interactions(path)
        assert parts.users == whole.users
        assert parts.behaviours == whole.behaviours
        assert parts.report == whole.report


def test_progress_ends_at_the_size_of_the_file(write: Write) -> None:
    path, told = write("1::2::3::4\n" * 1000), []
    read_interactions(path, on_progress=told.append)
    assert told[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"\n  \n\r\n", "is empty"),
        (b"PK\x03\x04rest of an archive", "zip archive: unpack it"),
        ("userId,movieId\n".encode("utf-16"), "UTF-16"),
        (bytes(range(256)) * 20, "is not text"),
        (b"movieId,title,genres\n1,Toy Story (1995),Comedy\n", "no column for the user among .*--columns user=NAME"),
        (
            b"hello world\nthis is prose\n",
            "the layout is unknown, its first line is 'hello world'. Known are CSV",
        ),
        (b'{"user_id": 1}\n{"user_id": 2}\n', "no column for the item among user_id: name it by --columns item=NAME"),
        (b'{\n "user_id": 1\n}\n', "no line is an object: write each on one line"),
        (b'[{"user_id": 1}]', "a list of JSON: write one object on each line"),
        (b"1\t2\t3\n4\t5\t6\n", "no column for the user and item among 1, 2, 3"),
        (gzip.compress(b"1::2::3::4\n" * 1000, mtime=0)[:-9], "broken gzip"),
        (b"\x1f\x8bno gzip at all", "broken gzip"),
        (b"x" * (layouts.MAX_LINE_BYTES * 3), "line 1 is longer than"),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_a_sentence(write: Write, content: bytes, text: str) -> None:
    with pytest.raises(RelayError, match=text):
        read_interactions(write(content))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="No such file"):
        recognise(tmp_path / "none.csv")
    with pytest.raises(RelayError, match="is a folder"):
        recognise(tmp_path)


def test_a_header_alone_has_no_interactions(write: Write) -> None:
    read = read_interactions(write(INTER))
    assert (read.users, read.report.interactions, read.report.first_ms) == ([], 0, None)


def test_a_broken_first_line_does_not_hide_the_layout(write: Write) -> None:
    read = read_interactions(write("garbage\n" + "1::2::3::978300760\n" * 5))
    assert read.report.layout.kind is LayoutKind.MOVIELENS_DAT
    assert [bad.number for bad in read.report.bad_lines] == [1]


@pytest.mark.parametrize("text", ["0", "7", "-5", str(2**63 - 1), str(-(2**63))])
def test_decimal_item_ids_stay_as_they_are(text: str) -> None:
    assert ItemIndex(False)[text] == int(text)


@pytest.mark.parametrize("text", ["007", "+7", "-0", "1.5", "1e5", "B00X4WHP5E", "ключ"])
def test_other_item_ids_are_hashed_to_63_bits(text: str) -> None:
    items = ItemIndex(False)
    assert items[text] == hashed_item(text)
    assert 0 <= items[text] < 2**63
    assert items.hashed_count == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("1193.0", 1193), ("0.0", 0), ("-5.00", -5), (" 7.0 ", 7), (f"{2**53}.0", 2**53)],
)
def test_an_id_that_was_written_as_a_float_is_the_whole_number(text: str, number: int) -> None:
    """Such as pandas writes a column with gaps. The hash was another item, which no gateway asks for."""
    items, users = ItemIndex(False), UserIndex(False)
    assert items[text] == items[str(number)] == number
    assert users[text] == users[str(number)] and users.names == [str(number)]
    assert (items.hashed_count, items.float_example) == (0, text.strip())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{2**53 + 2}.0", "last digits"),
        ("9" * 400 + ".0", "last digits"),
        ("1.8446744073709552e+19", "last digits"),
        ("nan", "missing"),
        (" ", "empty"),
    ],
)
def test_an_id_that_is_not_certain_is_refused(text: str, said: str) -> None:
    for index in (ItemIndex(False, has_gaps=True), UserIndex(False, has_gaps=True)):
        with pytest.raises(BadIdError, match=said):
            index[text]


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**63) - 1, 10**200])
def test_an_item_id_that_no_message_can_carry_is_refused(number: int) -> None:
    """Half of the ids of an unsigned hash are above the largest: they were hashed again, unlike the gateway's."""
    with pytest.raises(BadIdError, match="does not fit into 64 bits"):
        ItemIndex(False)[str(number)]
    assert UserIndex(False)[str(number)] == 0


def test_a_log_of_pandas_with_gaps_is_read_and_said_to_be_one(write: Callable[..., Path]) -> None:
    rows = "196.0,1193.0,3.0,881250949\n196.0,nan,3.0,881250950\n196,1193,4.0,881250951\n"
    read = read_interactions(write("userId,movieId,rating,timestamp\n" + rows))
    assert of(read, "196") == [(1193, 6, 881_250_949_000), (1193, 8, 881_250_951_000)]
    assert [bad.number for bad in read.report.bad_lines] == [3]
    assert "ids written as floats are read as whole numbers, 1193.0 as 1193" in read.report.notes
    assert read.report.actions == {6: 1, 8: 1}


@pytest.mark.parametrize("name", ["null", "NULL", "NA", "N/A", "None", "<NA>", r"\N"])
def test_a_user_may_have_the_name_of_a_missing_value(write: Callable[..., Path], name: str) -> None:
    read = read_interactions(write(f"userId,movieId,timestamp\n{name},{name},881250949\nann,2,881250950\n"))
    assert read.users == [name, "ann"] and not read.report.bad_lines
    assert [note.split(":")[0] for note in read.report.notes if name in note] == [f"`{name}` is read as an id"] * 2


def test_the_hash_of_an_item_is_the_same_in_every_run() -> None:
    assert hashed_item("B00X4WHP5E") == 6756471395739022606


def test_a_gateway_that_follows_the_page_gives_an_item_the_number_that_publishing_gives_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"`(int\.from_bytes\(.+?)`", page)
    for text in ("B00X4WHP5E", "größer als"):
        assert eval(written, {"hashlib": hashlib, "text": text}) == hashed_item(text)


def test_two_items_with_one_number_stop_the_run() -> None:
    items = ItemIndex(False)
    assert items["abc"]
    with pytest.raises(RelayError, match="have the same number"):
        items[str(hashed_item("abc"))]
    items = ItemIndex(False)
    assert items[str(hashed_item("abc"))]
    with pytest.raises(RelayError, match="'abc' have the same number"):
        items["abc"]


def test_ids_lose_the_blanks_around_them() -> None:
    users = UserIndex(False)
    assert users["a"] == users[" a "] == 0
    assert users.names == ["a"]
    with pytest.raises(BadIdError):
        users["  "]


@settings(max_examples=150, deadline=None)
@given(
    head=st.sampled_from(
        [b"", INTER.encode(), b"userId,movieId,rating,timestamp\n", KUAIRAND.encode(), b"1::2::3::4\n"]
    ),
    body=st.binary(max_size=200) | st.text(st.sampled_from('0123456789,.:\t\n"-ea '), max_size=200).map(str.encode),
)
def test_any_bytes_are_read_or_refused_with_a_sentence(head: bytes, body: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(head + body)
        file.flush()
        with contextlib.suppress(RelayError):
            read = read_interactions(Path(file.name))
            read.behaviours.items.astype("<i8")
            assert read.starts[-1] == len(read.behaviours) == read.report.interactions
            assert all(len(read.of(index)) for index in range(len(read.users)))
            for index in range(len(read.users)):
                read.of(index).check()


def test_lines_in_another_unit_than_most_are_bad_lines(write: Write) -> None:
    good = [f"u\t{item}\t1\t{1_700_000_000 + item}" for item in range(5)]
    odd = ["u\t7\t1\t1700000009000", "u\t8\t1\t1700000010000000", "u\t9\t1\t1.7e18", "v\t9\t1\t1700000009000"]
    read = read_interactions(write(INTER + "\n".join([*good[:2], *odd, *good[2:]])))
    assert read.users == ["u"]
    assert [item for item, _, _ in of(read, "u")] == list(range(5))
    units = ("milliseconds", "microseconds", "nanoseconds", "milliseconds")
    assert [(bad.number, bad.reason.split(", ")[1]) for bad in read.report.bad_lines] == [
        (line, f"{unit} among seconds") for line, unit in enumerate(units, start=4)
    ]


def test_seconds_among_milliseconds_are_bad_lines_up_to_the_limit(write: Write) -> None:
    rows = [f"u\t{item}\t1\t{(1_700_000_000 + item) * (1000 if item % 3 else 1)}" for item in range(30)]
    path = write(INTER + "\n".join(rows))
    assert len(read_interactions(path).report.bad_lines) == 10
    with pytest.raises(RelayError, match=r"more than 9 bad lines.*seconds among milliseconds"):
        read_interactions(path, Limits(max_bad_lines=9))


def test_nanoseconds_are_read(write: Write) -> None:
    read = read_interactions(write(INTER + "u\t1\t1\t1700000000123000000\n"))
    assert of(read, "u") == [(1, 2, 1_700_000_000_123)]


def test_several_files_are_one_log_and_equal_times_keep_the_order_of_the_files(write: Write) -> None:
    inter = INTER + "a\t1\t1\t1000000001\nb\t2\t1\t1000000009\nb\tx\t1\t1000000003\n"
    first = read_interactions(write(inter), log_map=IN_FILE)
    second = read_interactions(
        write("c::4::5::1000000000\nb::5::5::1000000009\na::6::5::1000000001\n", "two"), log_map=IN_FILE
    )
    log = joined([first, second])
    assert log.users == ["a", "b", "c"]
    x = first.item_numbers["x"]
    assert [[item for item, _, _ in of(log, user)] for user in "abc"] == [[1, 6], [x, 2, 5], [4]]
    assert log.item_numbers == {"1": 1, "2": 2, "x": x, "4": 4, "5": 5, "6": 6}
    until = log.until(1_000_000_001_000)
    assert [(user, [item for item, _, _ in of(until, user)]) for user in until.users] == [("a", [1, 6]), ("c", [4])]


def test_two_items_of_two_files_with_one_number_are_refused(write: Write) -> None:
    number = hashed_item("x")
    parts = [read_interactions(write(INTER + f"u\t{item}\t1\t1000000000\n", str(item))) for item in ("x", number)]
    with pytest.raises(RelayError, match="have the same number"):
        joined(parts)


def test_an_item_of_two_files_is_one_however_its_id_is_written(write: Write) -> None:
    """Such as an export with gaps after one without."""
    texts = ("1193", "1193.0", " 1193", "1193.00")
    parts = [read_interactions(write(INTER + f"u\t{text}\t1\t100000000{at}\n", text)) for at, text in enumerate(texts)]
    log = joined([*parts, parts[1]])
    assert [item for item, _, _ in of(log, "u")] == [1193] * 5
    assert log.item_numbers == dict.fromkeys(texts, 1193)


def test_files_with_and_without_times_are_no_log(write: Write) -> None:
    timed = read_interactions(write(INTER + "u\t1\t1\t1000000000\n"))
    untimed = read_interactions(write("userId,movieId\nu,2\n", "two"))
    assert [item for item, _, _ in of(joined([untimed, untimed]), "u")] == [2, 2]
    with pytest.raises(RelayError, match="some of the files have no times"):
        joined([timed, untimed])


def histories(read: Interactions) -> dict[str, list[Behaviour]]:
    return {user: of(read, user) for user in read.users}


def test_the_order_of_the_file_says_nothing_about_behaviours_of_equal_time(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each user has the same history, whatever the file is sorted by, also in several files and as JSON."""
    random = np.random.default_rng(5)
    rows = [
        (f"u{user}", item, rating, 1_500_000_000 + 86_400 * day)
        for user, item, rating, day in random.integers([0, 0, 1, 0], [6, 40, 6, 3], (500, 4)).tolist()
    ]
    header = "userId,movieId,rating,timestamp\n"

    def log(chosen: list[tuple[str, int, int, int]], name: str = "log") -> Interactions:
        return read_interactions(write(header + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in chosen), name))

    wanted = histories(log(rows))
    json = "".join(f'{{"user":"{u}","item":"{i}","rating":{r},"time":{t}}}\n' for u, i, r, t in rows[::-1])
    parts = joined([log(rows[300:], "one"), log(rows[:300], "two")])
    monkeypatch.setattr(logs, "_SORTED_AT_ONCE", 7)
    digest = training_log([log(rows)]).digest()
    for found in log(sorted(rows)), log(sorted(rows, key=lambda row: row[2])), parts, read_interactions(write(json)):
        assert histories(found) == wanted
        assert training_log([found]).digest() == digest, "so the same model is trained"
    assert training_log([read_interactions(write(json), log_map=IN_FILE)]).users == list(
        dict.fromkeys(user for user, _, _, _ in rows[::-1])
    ), "runs of earlier releases have their digests"


def test_no_item_stands_before_another_for_most_users_of_equal_times(write: Write) -> None:
    """Else a model would learn which one comes first, and it would be true of every user."""
    rows = "".join(f"u{user}\t{item}\t3\t1400000000\n" for user in range(400) for item in (1, 2))
    read = read_interactions(write(INTER + rows))
    first = sum(of(read, f"u{user}")[0][0] == 1 for user in range(400))
    assert 150 < first < 250


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("layout", [as_csv, as_recbole])
def test_line_breaks_in_quoted_fields_are_text_and_no_rows(
    write: Write, monkeypatch: pytest.MonkeyPatch, layout: Callable[[str], str], line_end: str, packed: bool
) -> None:
    """Whatever stands in them, such as a row of another user, and wherever a block of the file ends."""
    rows = [
        REVIEWS.strip(),
        'ann,3,4,1500000001,"good',
        "",
        'eve,8,5,1500000777,""from inside""',
        "1::2::3::4",
        'bye"',
        "bob,4,2,1500000002,short",
        '"bob","5","3","1500000003","a ""quote"", a comma and \u2028 a line separator"',
        'cyd,6,1,1500000004,"',
        '"',
    ]
    content = ("\ufeff" + layout(line_end.join(rows)) + line_end).encode()
    path = write(gzip.compress(content) if packed else content)
    for block_bytes in (1, 9, 60, 1 << 20):
        by_blocks = functools.partial(layouts.read_blocks, block_bytes=block_bytes)
        monkeypatch.setattr("relaygr.ingest.reading.read_blocks", by_blocks)
        read = read_interactions(path)
        assert {user: [item for item, _, _ in shown] for user, shown in histories(read).items()} == {
            "ann": [3], "bob": [4, 5], "cyd": [6],
        }  # fmt: skip
        assert read.report.bad_lines == () and read.report.lines == 5
        assert "5 lines go on with a field in quotes, and are no rows" in read.report.notes


def test_a_bad_record_of_several_lines_has_the_number_of_its_first_one(write: Write) -> None:
    path = write(REVIEWS + 'ann,3,4,1500000001,"a\nb"\nann,3,none,1500000001,"c\nd"\n"an\nn",3,4,1500000001,x\n')
    assert [(bad.number, bad.reason.split(",")[0]) for bad in read_interactions(path).report.bad_lines] == [
        (4, "rating is 'none'"),
        (6, "user id: text contains control characters"),
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('ann,3,4,1500000001,"good\n' + "bob,4,2,1500000002,short\n" * 3, "line 3: a field in quotes does not end"),
        (
            'ann,3,4,1500000001,"good\nbob,4,2,1500000002,short\nbob,5,2,1500000003,"fine"\n',
            "line 3: the quotes are broken",
        ),
        ('ann,3,4,1500000001, "good\neve,8,5,1500000777,bye"\n', "line 3: a space stands before a quote"),
        (' "ann",3,4,1500000001,  "go ""on""\neve,8,5,1500000777,x"\n', "line 3: a space stands before a quote"),
        ('ann,3,4,1500000001,"she said "no" \neve,8,5,1500000777,x\nbye"\n', "line 3: the quotes are broken"),
        ('ann,3,4,1500000001,"no\\"\neve,8,5,1500000777,x\n\\""\n', "line 3: a backslash stands before a quote"),
        ('ann,3,4,1500000001,"she said \\"no\\""\n', "line 3: a backslash stands before a quote"),
        ('ann,3,4,1500000001,"' + ("x" * 5000 + "\n") * 500, "line 3: (a field in quotes|the quotes)"),
    ],
    ids=[
        "no end",
        "another quote ends it",
        "space",
        "more spaces",
        "quotes in quotes",
        "backslash at the end",
        "backslash",
        "too long",
    ],
)
def test_quotes_that_leave_open_what_is_a_row_are_refused(write: Write, rows: str, said: str) -> None:
    """At most a record of the largest size is in memory, and not the rest of the file."""
    for layout in (as_csv, as_recbole):
        path = write(layout(REVIEWS + "bob,4,2,1500000002,short\n" + rows))
        with pytest.raises(RelayError, match=f"{said}.*unknown which of the lines after it are rows.*without columns"):
            read_interactions(path)


def test_quotes_that_decide_nothing_are_read_or_are_bad_lines(write: Write) -> None:
    """Backslashes of JSON in a field, long fields, a quote inside an unquoted field, and a file that was cut off."""
    rows = [
        'ann,3,4,1500000001,"{""a"": ""says \\""no\\"" then""}"',
        f'ann,4,4,1500000002,"{"x" * 200_000}"',
        'ann,5,4,1500000003,the 5" disk',
        'ann,6,4,1500000004,"fine" or not',
        'ann,8,4,1500000006, "fine"',
        'ann,9,4,1500000007," ""no"", he said"',
        'ann,7,4,1500000005,"cut o',
    ]
    read = read_interactions(write(REVIEWS + "\n".join(rows)))
    assert [item for item, _, _ in of(read, "ann")] == [3, 4, 5, 8, 9]
    assert [bad.number for bad in read.report.bad_lines] == [5, 8]


def test_text_that_looks_like_a_log_without_a_header_does_not_decide_the_layout(write: Write) -> None:
    read = read_interactions(write(REVIEWS + 'ann,3,4,1500000001,"' + "8::8::5::1500000777\n" * 25 + '"\n'))
    assert read.report.layout.kind is LayoutKind.CSV and read.users == ["ann"]


def test_lines_that_end_with_cr_alone_are_refused_with_the_cure(write: Write) -> None:
    with pytest.raises(RelayError, match=r"CR alone: convert it \(tr"):
        read_interactions(write((REVIEWS + "ann,3,4,1500000001,a\n" * 3).replace("\n", "\r")))


def test_times_that_have_lost_digits_are_bad_lines(write: Write) -> None:
    texts = ["1.512e+09", "1.51E+9", "2e+09", "1.512345678e+09", "1.51E9", "1.5e+18", "1512345679"]
    rows = "".join(f"ann\t{item}\t4\t{text}\n" for item, text in enumerate(texts))
    read = read_interactions(write(INTER + rows))
    assert [item for item, _, _ in of(read, "ann")] == [4, 3, 6]
    reasons = {bad.number: bad.reason for bad in read.report.bad_lines}
    assert sorted(reasons) == [2, 3, 4, 7]
    assert reasons[2] == "timestamp '1.512e+09' has lost its last digits: write whole numbers"
    assert "nanoseconds among seconds" in reasons[7], "all large floats are written so"


def test_a_time_that_no_message_can_carry_is_a_bad_line(write: Write) -> None:
    times = (1_512_345_678, 1_512_345_679, 90_000_000_000_000_000)
    read = read_interactions(write(INTER + "".join(f"ann\t1\t4\t{time}\n" for time in times)))
    assert [(bad.number, bad.reason.split(", ")[1]) for bad in read.report.bad_lines] == [(4, "no time among seconds")]


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("user,item,time,action\n", "ann,5,1500000001,3\n", "those of its column of actions"),
        ("user,item,time\n", "ann,5,1500000001\n", "all 0, since it has no column of them"),
        ("user,video_id,time_ms,is_like\n", "ann,5,1500000001000,1\n", "sums of the bits of is_like"),
    ],
)
def test_logs_whose_codes_mean_different_things_are_not_one_log(write: Write, header: str, row: str, said: str) -> None:
    ratings = read_interactions(write(INTER + "ann\t1\t4\t1500000000\n", "stars"))
    other = read_interactions(write(header + row, "other"))
    assert len(joined([other, other]).of(0)) == 2
    for parts in [ratings, other], [other, ratings]:
        with pytest.raises(RelayError, match=rf"(?=.*stars)(?=.*other)(?=.*twice the rating)(?=.*{said}).*Give each"):
            joined(parts)


def test_files_with_other_flags_are_not_one_log(write: Write) -> None:
    one, other = (
        read_interactions(write(f"user_id,video_id,time_ms,{flag}\n7,5,1500000001000,1\n", flag))
        for flag in ("is_click", "long_view")
    )
    with pytest.raises(RelayError, match="bits of is_click, those of the other are sums of the bits of long_view"):
        joined([one, other])


def test_a_run_of_an_earlier_release_is_read_in_the_order_of_its_file() -> None:
    """So that its log has the digest that it recorded."""
    assert recorded_map({"columns": {}, "actions": {}}).ties is Ties.FILE
    assert recorded_map({"ties": "hash"}) == LogMap()
    with pytest.raises(RelayError, match="not of this release"):
        recorded_map({"ties": "stars"})
