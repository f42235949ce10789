"""The documentation: links resolve in the repository and in the site, and every snippet is true.

The site is built once, in strict mode. Nothing in it may come from another host.
"""

from __future__ import annotations

import html.parser
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from relaygr.cli.app import app
from relaygr.kafka.settings import KafkaSettings
from relaygr.settings import load, setting_fields
from tests.echo_worker import echo_worker
from tests.worlds.compose import exported_metrics

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(?P<language>\w*)(?: (?P<name>\w+))?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
ROOTS = ("schemas", "streams", "workers", "training", "cli", "benchmarks")
FOLDERS = (*ROOTS, "tests", "docs", "compose", ".github", ".ci")
MADE_BY_USERS = ("compose/settings.env",)
TESTS = "docs/testing.md"
"""Its paths may count from `tests/`."""
FOLDERS_OF_TESTS = ("pipeline", "worlds")
FORMS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*.yml"))


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page."""

    page: str
    language: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.language or 'text'}:{self.text.splitlines()[0][:40]}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def snippets(*languages: str) -> list[Snippet]:
    """Every fenced block in one of these languages, `` for none."""
    return [
        Snippet(page, block["language"], block["name"] or "", block["text"])
        for page in PAGES
        for block in FENCE.finditer(text_of(page))
        if block["language"] in languages
    ]


def slug_of(heading: str) -> str:
    """The anchor that public forges give a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip().replace(" ", "-")


# Links


def internal_links() -> list[tuple[str, str]]:
    return [
        (page, target) for page in PAGES for target in LINK.findall(prose_of(page)) if not re.match(r"\w+:", target)
    ]


@pytest.mark.parametrize(("page", "target"), internal_links())
def test_a_link_resolves_in_the_repository(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.exists()
    assert not anchor or anchor in {slug_of(heading) for heading in HEADING.findall(prose_of(str(file)))}


def inline_paths() -> list[tuple[str, str]]:
    """Inline code that names a file or folder of the repository."""
    return sorted(
        {
            (page, code)
            for page in PAGES
            for code in CODE.findall(prose_of(page))
            if code.partition("/")[0] in (*FOLDERS, *FOLDERS_OF_TESTS) and re.fullmatch(r"[\w./-]+/[\w./-]*", code)
        }
    )


@pytest.mark.parametrize(("page", "path"), inline_paths())
def test_a_path_in_the_text_is_there(page: str, path: str) -> None:
    assert (ROOT / path).exists() or path in MADE_BY_USERS or (page == TESTS and (ROOT / "tests" / path).exists())


def test_the_index_lists_every_page_and_the_architecture_every_package() -> None:
    index, architecture = text_of("docs/index.md"), text_of("docs/architecture.md")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"]({page}" not in index} == set()
    packages = {place.parent.name for place in ROOT.glob("*/relaygr/*/__init__.py")} - {"worker"}
    packages |= {f"worker.{place.parent.name}" for place in ROOT.glob("workers/relaygr/worker/*/__init__.py")}
    assert {package for package in packages if f"`relaygr.{package}`" not in architecture} == set()


def test_the_steps_of_one_request_begin_at_methods_that_exist() -> None:
    """A step names a file by the end of its path, and then a class with its method."""
    steps = (
        text_of("docs/architecture.md")
        .partition("## One request, from HTTP to score and back")[2]
        .partition("\n## ")[0]
    )
    named = re.findall(r"`([\w/]+\.py)`[,:]\s+`([A-Z]\w+)\.(\w+)`", steps)
    assert len(named) > 10
    sources = [path for path in ROOT.glob("*/relaygr/**/*.py") if "tests" not in path.parts]

    def is_there(file: str, owner: str, method: str) -> bool:
        places = [path for path in sources if path.as_posix().endswith("/" + file)]
        return any(f" def {method}(" in path.read_text().partition(f"\nclass {owner}")[2] for path in places)

    assert [each for each in named if not is_there(*each)] == []


def test_a_bare_file_name_in_the_text_is_there() -> None:
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    found = {(page, code) for page in PAGES for code in CODE.findall(prose_of(page)) if re.fullmatch(r"\w+\.py", code)}
    assert {(page, name) for page, name in found if name not in names} == set()


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode: a warning is a failure."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass
class Page(html.parser.HTMLParser):
    """What a built page links to, what it loads, and its anchors."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name == "class" and value:
                self.classes.update(value.split())
            elif name in ("src", "srcset", "data", "poster") or (name == "href" and tag == "link"):
                self.loads.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")


def built(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        yield path, page


def is_foreign(address: str) -> bool:
    parts = urllib.parse.urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    pages = dict(built(site))
    assert len(pages) > 15
    foreign = {(path.name, load) for path, page in pages.items() for load in page.loads if is_foreign(load)}
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        named = re.findall(r"url\(\s*[\"']?([^\"')]+)", text) + re.findall(r"@import\s+[\"']([^\"']+)", text)
        foreign |= {(sheet.name, address) for address in named if is_foreign(address)}
    for image in site.rglob("*.svg"):
        text = image.read_text(encoding="utf-8")
        foreign |= {(image.name, address) for address in re.findall(r"href=\"([^\"]+)\"", text) if is_foreign(address)}
    assert foreign == set()


@pytest.mark.slow
def test_the_site_has_none_of_what_makes_the_theme_fetch(site: Path) -> None:
    """The theme's script loads Mermaid from a CDN for a diagram in Mermaid, and asks a forge about a `repo_url`."""
    for path, page in built(site):
        assert "mermaid" not in page.classes, path.name
        assert "md-source" not in page.classes, path.name
    assert [snippet.page for snippet in snippets("mermaid")] == []


@pytest.mark.slow
def test_the_site_has_the_products_logo_and_no_leftovers(site: Path) -> None:
    icon = (ROOT / "cli/relaygr/ui/static/icon.svg").read_bytes()
    assert (site / "images" / "icon.svg").read_bytes() == icon
    assert 'href="images/icon.svg"' in (site / "index.html").read_text(encoding="utf-8")
    assert list(site.rglob("__pycache__")) == []


def test_every_link_of_the_site_resolves(site: Path) -> None:
    pages = dict(built(site))
    broken = []
    for path, page in pages.items():
        for address in page.links + page.loads:
            parts = urllib.parse.urlsplit(address)
            if is_foreign(address) or parts.scheme == "data" or path.name == "404.html":
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and parts.fragment not in known | {"__skip"}):
                broken.append((path.name, address))
    assert broken == []


def test_a_list_follows_an_empty_line() -> None:
    """Else the site shows it as text; forges do not mind."""
    joined = []
    for page in PAGES:
        lines = prose_of(page).splitlines()
        for before, line in itertools.pairwise(lines):
            starts = re.match(r"(\*|-|\d+\.) ", line) is not None
            if starts and before.strip() and not re.match(r"(\*|-|\d+\.|\s) ?", before):
                joined.append((page, line))
    assert joined == []


# Snippets


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_python_compiles(snippet: Snippet) -> None:
    compile(textwrap.dedent(snippet.text), snippet.page, "exec")


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_yaml_holds_settings_that_exist(snippet: Snippet, tmp_path: Path) -> None:
    assert yaml.safe_load(snippet.text)
    file = tmp_path / "relaygr.yaml"
    file.write_text(snippet.text, encoding="utf-8")
    secrets = {"RELAYGR_SECURITY__SASL_PASSWORD": "secret"} if "sasl_" in snippet.text else {}
    load(file, secrets)


def test_every_language_of_a_snippet_is_checked() -> None:
    """`jsonl` by tests/cli/test_publish.py, the others here."""
    languages = {block["language"] for page in PAGES for block in FENCE.finditer(text_of(page))}
    assert languages <= {"", "bash", "python", "yaml", "jsonl"}


def test_the_gateway_of_the_readme_runs(
    kafka_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = (each.text for each in snippets("python") if each.page == "README.md" and each.name == "gateway")
    # Its cluster and a deadline for a busy machine; all else is as documented.
    for written, meant in (("kafka-1:9092", kafka_settings.bootstrap), (" budget_ms=50", " budget_ms=9000")):
        assert script.count(written) == 1
        script = script.replace(written, meant)
    for name in ("topic_prefix", "group_prefix", "partitions", "fetch_wait_max_ms"):
        monkeypatch.setenv(f"RELAYGR_{name.upper()}", str(getattr(kafka_settings, name)))
    with echo_worker(kafka_settings):
        exec(script, {})
    assert capsys.readouterr().out == "ranked [101. 102. 103.]\n"


# Commands


@dataclass(frozen=True)
class Command:
    """A command line of a page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{' '.join(self.words)[:60]}"

    @property
    def options(self) -> list[str]:
        return [word.partition("=")[0] for word in self.words if re.match(r"--?[a-z]", word)]


def lines_of(snippet: Snippet) -> Iterator[str]:
    """Command lines: continued ones joined, those joined by `&&` apart."""
    yield from re.split(r"\n| && ", re.sub(r"\\\n\s*", "", snippet.text))


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each line in a block of text, and of inline code."""
    for snippet in snippets("", "bash"):
        for line in lines_of(snippet):
            if re.search(r"\b(relaygr|make|benchmarks\.\w+|docker) ", line):
                yield snippet.page, shlex.split(line, comments=True)
    for page in PAGES:
        for code in CODE.findall(prose_of(page)):
            if re.match(r"(relaygr|make|python -m benchmarks\.\w+) ?", code) and "'" not in code:
                yield from ((page, each.split()) for each in code.split(" && "))


def after(start: tuple[str, ...], words: list[str]) -> tuple[str, ...] | None:
    """The words behind `start`, where a line calls it: alone, behind variables, or in a container."""
    rest = [*words]
    while rest and re.match(r"[A-Z_]+=", rest[0]):
        rest = rest[1:]
    if rest[:3] == ["docker", "compose", "exec"]:
        rest = rest[4:]
    elif rest[:3] == ["docker", "run", "--rm"]:
        rest = rest[3:]
    return tuple(rest[len(start) :]) if tuple(rest[: len(start)]) == start else None


def relaygr_commands() -> list[Command]:
    found = {Command(page, rest) for page, words in command_lines() if (rest := after(("relaygr",), words)) is not None}
    return sorted(found, key=str)


def resolved(words: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The command that these words call, and the words that are left for it. A word in capitals stands for any."""
    command: Any = typer.main.get_command(app)
    left = list(words)
    while hasattr(command, "resolve_command") and left and not left[0].startswith("-") and not left[0].isupper():
        context = command.make_context(command.name, [], resilient_parsing=True)
        _, command, left = command.resolve_command(context, left)
    return command, left


def test_the_pages_call_commands() -> None:
    assert len(relaygr_commands()) > 20


@pytest.mark.parametrize("line", relaygr_commands(), ids=str)
def test_a_command_line_names_a_command_and_options_that_exist(line: Command) -> None:
    command, left = resolved(line.words)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert set(Command(line.page, tuple(left)).options) <= known
    keys = [value.partition("=")[0] for option, value in itertools.pairwise(left) if option == "--set"]
    assert set(keys) <= {*setting_fields(), "KEY"}


def benchmark_commands() -> list[Command]:
    return [
        Command(page, (name.removeprefix("benchmarks."), *rest[1:]))
        for page, words in command_lines()
        if (rest := after(("python", "-m"), words))
        and (name := rest[0]).startswith("benchmarks.")
        and name != "benchmarks.NAME"
    ]


@pytest.mark.parametrize("line", benchmark_commands(), ids=str)
def test_a_benchmark_and_its_options_exist(line: Command) -> None:
    found = importlib.util.find_spec(f"relaygr.bench.{line.words[0]}")
    assert found is not None and found.origin is not None
    file = Path(found.origin)
    entry = file if file.name != "__init__.py" else file.with_name("__main__.py")
    parameters = set(re.findall(r"^    (\w+): ", entry.read_text(encoding="utf-8"), re.MULTILINE))
    assert {option.lstrip("-").replace("-", "_") for option in line.options} <= parameters


def make_targets() -> list[tuple[str, str]]:
    return sorted({(page, words[1]) for page, words in command_lines() if words[0] == "make" and len(words) > 1})


@pytest.mark.parametrize(("page", "target"), make_targets())
def test_a_target_of_make_exists(page: str, target: str) -> None:
    assert re.search(rf"^{re.escape(target)}:", text_of("Makefile"), re.MULTILINE)


def test_settings_in_the_text_exist() -> None:
    keys = {*setting_fields()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    keys |= {key.rpartition(".")[0] for key in keys}
    unknown = [
        (page, code)
        for page in PAGES
        for code in CODE.findall(prose_of(page))
        if re.fullmatch(r"[a-z]+\.[a-z_0-9]+", code)
        and code.partition(".")[0] in sections
        and code not in keys
        and not code.endswith(".py")
    ]
    assert unknown == []


def test_variables_in_blocks_are_settings() -> None:
    names = {each.variable for each in setting_fields().values()}
    lines = [(snippet.page, line) for snippet in snippets("", "bash") for line in lines_of(snippet)]
    used = {(page, match[1]) for page, line in lines for match in re.finditer(r"\b(RELAYGR_[A-Z_]+)=", line)}
    assert {(page, name) for page, name in used if name not in names and "TEST" not in name} == set()


@pytest.mark.slow
def test_metrics_in_the_text_exist() -> None:
    exported = exported_metrics()
    named = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"`((?:relaygr|kafka_(?:consumergroup|partition))_[a-z0-9_]+)", prose_of(page))
    }
    assert {(page, name) for page, name in named if not {name, f"{name}_bucket"} & exported} == set()


# Project files


def test_extras_in_the_text_exist() -> None:
    known = set(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])
    named = {(page, extra) for page in PAGES for extra in re.findall(r"relaygr\[(\w+)\]", text_of(page))}
    assert named
    assert {(page, extra) for page, extra in named if extra not in known} == set()


def test_the_workflow_runs_the_test_command_of_the_readme_and_installs_extras_that_exist() -> None:
    jobs = yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"] if "run" in step]
    runs = [step["run"] for step in steps]
    assert "make test" in runs and "make test " in text_of("README.md")
    given = {name for step in steps if step["run"].startswith("make") for name in step.get("env", {})}
    assert given <= {"RELAYGR_TEST_REQUIRE"}  # What must not be skipped; nothing that changes what is installed.
    assert text_of(".ci/run").endswith("exec make test\n") and "PIP_ARGS" not in text_of(".ci/run")
    extras = re.findall(r"whl\)\[(\w+)\]", "\n".join(runs))
    assert extras and set(extras) <= set(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])


@pytest.mark.parametrize("target", ["demo", "test"])
@pytest.mark.parametrize(
    ("given", "installs_with"),
    [
        ([], "--constraint constraints.txt"),
        (["PIP_ARGS=--index-url http://127.0.0.1/"], "--index-url http://127.0.0.1/"),
    ],
    ids=["by default", "as asked"],
)
def test_a_command_of_the_readme_installs_the_tested_versions_unless_it_is_told_otherwise(
    target: str, given: list[str], installs_with: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_ARGS", "MAKEFLAGS")}
    command = ["make", "--dry-run", target, f"VENV={tmp_path}", *given]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert f"pip install {installs_with} --editable" in installs[0]
    assert all(f"pip install {installs_with} " in line for line in installs)


@pytest.mark.parametrize("file", [".pre-commit-config.yaml", "mkdocs.yml", *FORMS])
def test_a_project_file_is_yaml(file: str) -> None:
    assert yaml.safe_load(text_of(file))
