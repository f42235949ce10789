"""`relaygr data movielens` from archives of both kinds; the files have the layouts that their sources have."""

from __future__ import annotations

import hashlib
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.ingest.layouts import LayoutKind
from relaygr.ingest.reading import read_interactions
from relaygr.runtime.errors import RelayError
from relaygr.training import movielens
from relaygr.training.movielens import Film, Size, domain_of, get_movielens

RATINGS = [
    ("1", 2, "5", "978300760"),
    ("1", 1, "3", "978302109"),
    ("2", 3, "4", "978301968"),
    ("2", 2, "1", "978301970"),
]
TITLES = {
    1: ("Toy Story", "1995", "Animation Comedy"),
    2: ("Été", "1990", "Drama Comedy"),
    3: ("Heat", "1995", "Drama"),
}


def wheel_of(path: Path, size: Size) -> Path:
    """A wheel with the files of RecBole's layout."""
    names = {
        item: str(item) if size is Size.SMALL else f"{title} ({year})" for item, (title, year, _) in TITLES.items()
    }
    inter = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(
        f"{'1m_' if size is Size.MEDIUM else ''}{user}\t{names[item]}\t{rating}\t{time}\n"
        for user, item, rating, time in RATINGS
    )
    items = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n" + "".join(
        f"{names[item]}\t{title}\t{year}\t{genres}\n" for item, (title, year, genres) in TITLES.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        folder = movielens._SOURCES[size].wheel_folder
        archive.writestr(f"{folder}.inter", inter)
        archive.writestr(f"{folder}.item", items)
    return path


def grouplens_of(path: Path, size: Size) -> Path:
    """A zip with the files of GroupLens' layout, in its encoding. The numbers of 1M have gaps."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"ml-{size}/README", "terms")
        if size is Size.SMALL:
            genres = movielens._GENRES_100K
            lines = [
                f"{item}|{title} ({year})|01-Jan-{year}||http://x/|"
                + "|".join(str(int(genre in own.split())) for genre in genres)
                for item, (title, year, own) in TITLES.items()
            ]
            archive.writestr("ml-100k/u.item", "\n".join(lines).encode("latin-1"))
            archive.writestr("ml-100k/u.data", "\n".join("\t".join(map(str, rating)) for rating in RATINGS))
        else:
            lines = [
                f"{10 * item}::{title} ({year})::{own.replace(' ', '|')}" for item, (title, year, own) in TITLES.items()
            ]
            archive.writestr("ml-1m/movies.dat", "\n".join(lines).encode("latin-1"))
            ratings = [f"{user}::{10 * item}::{rating}::{time}" for user, item, rating, time in RATINGS]
            archive.writestr("ml-1m/ratings.dat", "\n".join(ratings))
    return path


def expects(monkeypatch: pytest.MonkeyPatch, size: Size, path: Path) -> None:
    """Makes the digests of this archive the expected ones: the real data may not be in the repository."""
    source = replace(movielens._SOURCES[size], zip_md5=hashlib.md5(path.read_bytes()).hexdigest())
    with zipfile.ZipFile(path) as archive:
        if f"{source.wheel_folder}.inter" in archive.namelist():
            digests = [
                hashlib.sha256(archive.read(f"{source.wheel_folder}.{suffix}")).hexdigest()
                for suffix in ("inter", "item")
            ]
            source = replace(source, inter_sha256=digests[0], item_sha256=digests[1])
    monkeypatch.setattr(movielens, "_SOURCES", {**movielens._SOURCES, size: source})


@pytest.mark.parametrize("size", Size)
def test_both_sources_give_the_same_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: Size) -> None:
    for name, made in (("wheel", wheel_of), ("zip", grouplens_of)):
        archive = made(tmp_path / f"{name}.zip", size)
        expects(monkeypatch, size, archive)
        found = get_movielens(tmp_path / name, size, archive)
        assert (found.behaviours, found.users, found.items) == (4, 2, 3)
    for file in ("log.inter", "items.csv", "drama.inter", "comedy.inter"):
        assert (tmp_path / "wheel" / file).read_text() == (tmp_path / "zip" / file).read_text()
    read = read_interactions(tmp_path / "zip" / "log.inter")
    assert read.report.layout.kind is LayoutKind.RECBOLE and read.users == ["1", "2"]
    assert read.of(0).items.tolist() == [2, 1] and read.of(0).actions.tolist() == [10, 6]
    assert "no redistribution" in (tmp_path / "zip" / "SOURCE.txt").read_text()
    assert (tmp_path / "zip" / "items.csv").read_text().splitlines()[2] == "2,Été,1990,Comedy|Drama"


def test_an_item_of_both_genres_is_in_the_domain_with_more_behaviours() -> None:
    films = [Film(1, "a", "", ("Drama",)), Film(2, "b", "", ("Comedy", "Drama")), Film(3, "c", "", ("War",))]
    ratings = [("u", item, "5", "0") for item in (1, 1, 2, 3)]
    assert domain_of(films, ratings) == {1: "Drama", 2: "Drama"}


@pytest.mark.parametrize("made", [wheel_of, grouplens_of])
def test_other_data_than_expected_is_refused(tmp_path: Path, made) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RelayError, match="its digest is"):
        get_movielens(tmp_path / "out", Size.SMALL, made(tmp_path / "other.zip", Size.SMALL))
    assert not (tmp_path / "out").exists()


def test_an_archive_of_the_other_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="or the other --size"):
        get_movielens(tmp_path / "out", Size.SMALL, wheel_of(tmp_path / "1m.whl", Size.MEDIUM))


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n")
    done = CliRunner().invoke(app, ["data", "movielens", str(tmp_path / "out"), "--archive", str(tmp_path / "u.data")])
    assert done.exit_code == 1 and "Give a zip archive or a wheel" in done.output


def encrypted(content: bytearray, entry: int, record: int) -> None:
    content[entry + 8] |= 1
    content[record + 6] |= 1


def of_an_unknown_compression(content: bytearray, entry: int, record: int) -> None:
    content[entry + 10] = content[record + 8] = 97


def that_is_no_deflate(content: bytearray, entry: int, record: int) -> None:
    content[entry + 10] = content[record + 8] = zipfile.ZIP_DEFLATED


@pytest.mark.parametrize("change", [encrypted, of_an_unknown_compression, that_is_no_deflate])
@pytest.mark.parametrize("made", [wheel_of, grouplens_of])
def test_an_archive_with_a_file_that_can_not_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    made: Callable[[Path, Size], Path],
    change: Callable[[bytearray, int, int], None],
) -> None:
    path = made(tmp_path / "1m.zip", Size.MEDIUM)
    with zipfile.ZipFile(path) as archive:
        # The last file, since the README is not read; of the wheel the first, whose digest comes before the other.
        member = archive.infolist()[0 if made is wheel_of else -1]
        directory = archive.start_dir
    content = bytearray(path.read_bytes())
    entry = content.index(member.filename.encode(), directory) - 46
    change(content, entry, member.header_offset)
    path.write_bytes(content)
    source = replace(movielens._SOURCES[Size.MEDIUM], zip_md5=hashlib.md5(content).hexdigest())
    monkeypatch.setattr(movielens, "_SOURCES", {Size.MEDIUM: source})
    done = CliRunner().invoke(app, ["data", "movielens", str(tmp_path / "out"), "--size", "1m", "--archive", str(path)])
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), said
    assert "cannot be read" in said and "Give a zip archive or a wheel" in said


@pytest.mark.parametrize("size", Size)
@pytest.mark.parametrize("suffix", ["inter", "item"])
def test_a_file_that_is_larger_when_unpacked_than_the_data_is_refused_unread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: Size, suffix: str
) -> None:
    path = wheel_of(tmp_path / "a.whl", size)
    expects(monkeypatch, size, path)
    source = movielens._SOURCES[size]
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    held[f"{source.wheel_folder}.{suffix}"] = bytes(source.largest_bytes + 1)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    with pytest.raises(RelayError, match=rf"{suffix} of the archive is larger than \d+ MiB"):
        get_movielens(tmp_path / "out", size, path)


def test_a_file_is_unpacked_only_as_far_as_its_archive_says(tmp_path: Path) -> None:
    """The archive says 100 bytes, and the file has 64 MiB."""
    path = tmp_path / "a.whl"
    name = f"{movielens._SOURCES[Size.SMALL].wheel_folder}.inter"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(name, bytes(1 << 26))
    content = bytearray(path.read_bytes())
    entry = content.rindex(name.encode()) - 46
    content[entry + 24 : entry + 28] = (100).to_bytes(4, "little")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(RelayError, match="cannot be read"):
            get_movielens(tmp_path / "out", Size.SMALL, path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_without_the_wheel_on_an_index_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an index of nothing, as on a machine without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = CliRunner().invoke(app, ["data", "movielens", str(tmp_path / "out")])
    assert done.exit_code == 1 and "pip did not download recbole==1.2.1" in done.output
    assert "--archive" in done.output.replace("\n", " ")


def test_what_pip_says_is_shown_without_the_password_of_its_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "ERROR: Could not find a version of recbole in https://ann:S3cret@index.example/simple/" + "x" * 473
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr("relaygr.training.movielens.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(RelayError, match=r"\*\*\*@index.example") as refused:
        get_movielens(tmp_path / "out", Size.SMALL)
    assert "cret" not in str(refused.value)
