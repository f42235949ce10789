"""The report of a folder: `report.md` and `report.html`, from `runs.csv`, `paths.csv` and `plans` in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from relaygr.bench.headline.decision import LEAST_SEEDS
from relaygr.bench.headline.document import Block, Bullets, Grid, Heading, Picture, Text, as_html, as_markdown
from relaygr.bench.headline.figures import (
    NO_LENGTHS,
    SEARCHED,
    Reached,
    Search,
    broken_in,
    counts_for_b,
    figures_of,
    same_load,
)
from relaygr.bench.headline.grid import BY_NAME, GRID_NAMES, LENGTH_FACTORS, PUBLISHED, REUSES, Cell, family_name_of
from relaygr.bench.headline.outlook import MOST_LATE, Demand, verdict_of, work_of
from relaygr.bench.headline.plan import CellPlan, load_plan
from relaygr.bench.headline.plots import plot_cell, plot_overview
from relaygr.bench.headline.points import unfinished_in
from relaygr.bench.headline.rows import (
    AT_RATE,
    CHECKED,
    LAG_LIMIT,
    OF_LOG,
    OF_TRACE,
    SLOW_LIMIT,
    RunRow,
    read_dicts,
    read_rows,
)
from relaygr.bench.headline.summary import (
    BASELINE_LIMIT,
    CHUNK_MS,
    HIT_FACTOR,
    against_others,
    against_simulation,
    amount,
    at_rates,
    baseline,
    by_cell,
    by_family,
    by_reuse,
    hits_beside_preinfer,
    limits_by_seed,
    measured_once,
    plan_of,
    ratio,
    reached,
    share,
    times,
)
from relaygr.bench.headline.systems import FLAGS, System
from relaygr.bench.simulated.agreement import LATE_LIMIT, MIX_LIMIT, P50_LIMIT, P99_LIMIT
from relaygr.cli.texts import plain_console
from relaygr.runtime.errors import RelayError

TITLE = "The headline figures"
EMBEDDED = "embedded cluster"
"""A part of a broker's description that says that it is none."""
FIGURES, GRID_FIGURES, OTHERS_FIGURES = "figures", "grid", "cells of others"
"""What stands between marks of a page: the live figures, and those of a simulation."""
LOADS = (0.1, 0.3, 0.6, 1.2)
LONG_GAP_S = 600.0
"""The return gap in the table of verdicts beside the cell's own."""
OTHERS = (
    "RelayGR (arXiv 2601.01712): up to 1.5 times longer sequences and up to 3.6 times the throughput, on Ascend. "
    "Nothing else of its figures is public: not the model, the lengths, the load, the hit share or the time of "
    "transfers. The figures here are of another machine, another model and a baseline of our own, so they are no "
    "comparison with it.",
    "UniPinRec (12 layers, 992 behaviours, 656 candidates, batch 8, L40S): 2.4 times by reuse of K,V alone.",
    "MTServe (8 layers, 4 heads of 128, up to 20,000, 512 candidates): up to 3.1 times, hit ratio above 98.5 %.",
    "SequenceO1 (ByteDance): hit rate 0.6 at a time to live of one hour, the only public one of production.",
    "MLPerf's DLRM-v3 prohibits caching across queries: no figure here is a result of MLPerf.",
)


def write_report(out: Path) -> None:
    """Writes the report of a folder. Raises RelayError if nothing was measured there."""
    runs = out / "runs.csv"
    if not runs.exists():
        raise RelayError(
            f"{runs} does not exist: run with --quick, --full, --simulated, --rates RATES or --trace FILE first"
        )
    rows, paths = read_rows(runs), read_dicts(out / "paths.csv")
    plans = _read_plans(out)
    blocks: list[Block] = []
    for mode in dict.fromkeys(row.mode for row in rows):
        blocks += _mode(out, mode, [row for row in rows if row.mode == mode], paths, plans)
    blocks += [*_against_simulation(out), Heading("Figures of others"), Bullets(OTHERS)]
    (out / "report.md").write_text(f"# {TITLE}\n\n{as_markdown(blocks, out)}", encoding="utf-8")
    (out / "report.html").write_text(as_html(TITLE, blocks), encoding="utf-8")
    plain_console().print(f"report: {out / 'report.md'} and {out / 'report.html'}", soft_wrap=True)


def fill_page(out: Path, mode: str | None, page: Path) -> None:
    """Writes the main figures of a mode (None: of that of the last search, else of the last run) between marks of a
    page. Raises RelayError without the marks, and for a mode without such figures.

    Simulated figures of the grid and of the cells of others have names of their own, those of given rates that of their
    folder. Others stand under the name of their folder if the page has it, else under `FIGURES`, with a plot in the
    folder `images` beside the page.
    """
    every, text = read_rows(out / "runs.csv"), read_page(page)
    mode = mode or next((row.mode for row in reversed(every) if row.figure in SEARCHED), every[-1].mode)
    rows, folder, plans = [row for row in every if row.mode == mode], out.resolve().name, _read_plans(out)
    unfinished = unfinished_in(rows, mode, plans)
    figures, given_rates = figures_of(rows, mode, unfinished), at_rates(rows)
    if _is_simulated(rows):
        parts = _simulated_figures(rows, mode, plans)
    elif given_rates.rows:
        checks = [*_honest_baseline(rows, plans), *_against_simulation(out)]
        parts = {folder: [*_about(rows), given_rates, *_searching_seeds(rows), *checks]}
    elif figures:
        name = marked_name(page, text, folder, FIGURES)
        parts = {name: _live_figures(rows, figures, unfinished, mode, plans)}
        if name == FIGURES:
            plot = page.parent / "images" / f"{page.stem}.png"
            parts[name].insert(0, plot_overview(plot, rows, figures, _transport(rows)))
    else:
        why = ": no search is finished" if unfinished else ""
        raise RelayError(f"{out}: the runs of mode {mode} have no figures for a page{why}")
    for name, blocks in parts.items():
        begin, end = marks_for(marked_name(page, text, name))
        before, rest = text.split(begin, 1)
        after = rest.split(end, 1)[1]
        # The page has headings of its own.
        told: list[Block] = [Text(f"{block.text}:") if isinstance(block, Heading) else block for block in blocks]
        told.insert(0, Text(f"Rows: folder `{folder}`."))
        shown = as_markdown([block for block in told if not isinstance(block, Grid) or block.rows], page.parent)
        text = f"{before}{begin}\n\n{shown}\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def read_page(page: Path) -> str:
    """The text of a page. Raises RelayError if it cannot be read."""
    try:
        return page.read_text(encoding="utf-8")
    except OSError as error:
        raise RelayError(f"{page} cannot be read: {error}. --page takes a page with marks to write between") from error


def marks_for(name: str) -> tuple[str, str]:
    """The lines of a page between which the figures of this name stand."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def marked_name(page: Path, text: str, *names: str) -> str:
    """The first of these names whose marks the text of the page has. Raises RelayError if it has those of none."""
    for name in names:
        begin, end = marks_for(name)
        if end in text.partition(begin)[2]:
            return name
    raise RelayError(f"{page} has no lines `{begin}` and `{end}` to write between")


def _about(rows: Sequence[RunRow]) -> list[Block]:
    """Where and how the rows were measured, and whether they may decide."""
    speeds: list[Block] = [] if _is_simulated(rows) else [Text(_speeds(rows))]
    return [_conditions(rows), *speeds, *_indicative(rows)]


def _indicative(rows: Sequence[RunRow]) -> list[Block]:
    seeds = {row.seed for row in rows}
    if len(seeds) >= LEAST_SEEDS:
        return []
    text = f"Indicative: {len(seeds)} of at least {LEAST_SEEDS} seeds. No figure of this run is decided."
    return [Text(text, is_note=True)]


def _live_figures(
    rows: Sequence[RunRow],
    figures: Sequence[Reached],
    unfinished: Sequence[Search],
    mode: str,
    plans: dict[str, CellPlan],
) -> list[Block]:
    first = rows[0].cell
    same = same_load(rows, mode, first)
    return [
        *_about(rows),
        *_unfinished(unfinished),
        by_reuse(rows, figures, mode),
        *measured_once(figures),
        against_others(figures),
        *_honest_baseline(rows, plans),
        *_broken(rows, mode),
        *(_costs(f"{first}: all systems on the same trace{_transport(rows)}", same) if same else []),
    ]


def _simulated_figures(rows: Sequence[RunRow], mode: str, plans: dict[str, CellPlan]) -> dict[str, list[Block]]:
    families = {cell.family for cell in PUBLISHED}
    of_others = {name for name, cell in BY_NAME.items() if cell.family in families}
    parts: dict[str, list[Block]] = {}
    for name, is_of_others in ((GRID_FIGURES, False), (OTHERS_FIGURES, True)):
        own = [row for row in rows if (row.cell in of_others) is is_of_others]
        if not own:
            continue
        unfinished = unfinished_in(own, mode, plans)
        figures = figures_of(own, mode, unfinished)
        blocks = [*_about(own), *_unfinished(unfinished), by_family(own, figures, plans, mode)]
        if not is_of_others:
            blocks += [by_cell(own, figures, mode).ratios, Text(_coverage({row.cell for row in own}))]
        parts[name] = [*blocks, *_broken(own, mode)]
    return parts


def _coverage(cells: set[str]) -> str:
    """How much of the grid was played, and what was not."""
    missing = [name for name in GRID_NAMES if name not in cells]
    whole = {family_name_of(name) for name in missing} - {family_name_of(name) for name in cells}
    told = dict.fromkeys(family_name_of(name) if family_name_of(name) in whole else name for name in missing)
    count = f"{len(cells.intersection(GRID_NAMES))} of {len(GRID_NAMES)} cells were played"
    return f"{count}. Not played: {', '.join(told)}." if told else f"{count}."


def _read_plans(out: Path) -> dict[str, CellPlan]:
    # Names of cells have dots, too.
    return {path.stem: load_plan(path) for path in sorted((out / "plans").glob("*.json"))}


def _mode(
    out: Path, mode: str, rows: Sequence[RunRow], paths: Sequence[dict[str, str]], plans: dict[str, CellPlan]
) -> list[Block]:
    unfinished = unfinished_in(rows, mode, plans)
    figures = figures_of(rows, mode, unfinished)
    is_simulated = _is_simulated(rows)
    transport = _transport(rows)
    blocks: list[Block] = [Heading(f"Run: {mode}"), _conditions(rows), *_indicative(rows), *_unfinished(unfinished)]
    if figures and not is_simulated:
        blocks.append(plot_overview(out / "plots" / f"{mode}-overview.png", rows, figures, transport))
    if figures:
        cells = by_cell(rows, figures, mode)
        blocks += [Heading(f"The systems by cell{transport}"), cells.table, cells.ratios]
        table = by_reuse(rows, figures, mode)
        if table.rows:
            blocks += [
                Heading(f"R against B0, by the share of returning users{transport}"),
                table,
                *measured_once(figures),
            ]
        others = against_others(figures)
        if others.rows:
            text = "R / C is what pre-infer adds to a cache (goal in B: 1.5), R / O what is left to gain (goal: 0.9)."
            blocks += [Heading(f"R against the others{transport}"), Text(text), others]
    hits = hits_beside_preinfer(rows, paths)
    if hits.rows:
        text = f"The limit is {HIT_FACTOR:g} times O's P99 plus the longest chunk, {CHUNK_MS:g} ms."
        blocks += [Heading(f"Hits while prefixes are computed{transport}"), Text(text), hits]
    rates = at_rates(rows)
    if rates.rows:
        blocks += [Heading(f"The systems by rate{transport}"), rates, *_searching_seeds(rows)]
    blocks += _plans(rows, plans)
    if figures:
        blocks += _headlines(figures, rows, mode, transport)
    blocks += _checks(rows, plans, mode)
    for cell in dict.fromkeys(row.cell for row in rows):
        same = same_load(rows, mode, cell)
        own_rows = [row for row in rows if row.cell == cell and row.valid]
        played: dict[tuple[str, int], list[RunRow]] = {}
        for row in own_rows:
            if row.figure.startswith((AT_RATE, OF_TRACE)):
                played.setdefault((row.figure, row.history), []).append(row)
        compared = [(f"{cell}: all systems on the same trace", same)] if same else []
        compared += [(f"{cell}: {figure}", those) for (figure, _), those in played.items()]
        for title, those in compared:
            blocks += _costs(title + transport, those)
        if is_simulated:
            continue
        own_figures = [each for each in figures if each.cell == cell]
        own_paths = [each for each in paths if (each["mode"], each["cell"]) == (mode, cell)]
        shown = compared[0][1] if compared else []
        pictures: list[Picture] = plot_cell(
            out / "plots", f"{mode}-{cell}", own_rows, own_paths, own_figures, shown, transport
        )
        blocks += pictures
    if is_simulated:
        # Thousands of runs: their rows are in `runs.csv`.
        return blocks
    blocks += _every_run(rows)
    for name in dict.fromkeys(row.cell for row in rows):
        plan = plan_of(name, plans)
        # A cell with another share of returning users has the same table.
        if plan is not None and name in BY_NAME and not BY_NAME[name].planned_as:
            blocks += break_even(
                BY_NAME[name], plan, [row for row in rows if row.cell == name and not row.has_other_reuse]
            )
    return blocks


def _searching_seeds(rows: Sequence[RunRow]) -> list[Block]:
    table = limits_by_seed(rows)
    if not table.rows:
        return []
    text = (
        "What each seed reached, with one run at each value: the highest that passed below the lowest that failed. "
        "These seeds search, so they do not decide. Pairs have the same traffic, not the same speed of the machine."
    )
    return [Text(text), table]


def _conditions(rows: Sequence[RunRow]) -> Bullets:
    seeds = sorted({row.seed for row in rows})
    brokers = "; ".join(dict.fromkeys(row.broker for row in rows))
    is_simulated = _is_simulated(rows)
    return Bullets(
        [
            f"Machine: {'; '.join(dict.fromkeys(row.machine for row in rows))}",
            f"Code: {', '.join(dict.fromkeys(row.code or 'unknown' for row in rows))}",
            f"Times learnt from real runs: {brokers}" if is_simulated else f"Broker: {brokers}, on the same cores",
            f"Measured: {min(row.measured_at for row in rows)} to {max(row.measured_at for row in rows)}, "
            f"{len(rows)} runs, seeds {', '.join(map(str, seeds))}, "
            f"{min(row.seconds for row in rows):.0f} to {max(row.seconds for row in rows):.0f} s each",
            *(
                ["No real broker: messages go through librdkafka's own cluster, in memory and without replicas"]
                if _is_embedded(rows)
                else []
            ),
            "Every figure is simulated, in virtual time: the decisions of trigger, worker and cache are the product's, "
            "device times are those of the engine alone with the noise of the real runs."
            if is_simulated
            else "Whole pipeline: load generator, Kafka, trigger, one worker.",
            "Latencies count from the scheduled time. Truncated, stale, refused, expired and lost requests are late.",
        ]
    )


def _transport(rows: Sequence[RunRow]) -> str:
    """What every figure says if there was no real broker, or no run at all."""
    if _is_simulated(rows):
        return "; simulated"
    return "; no real broker" if _is_embedded(rows) else ""


def _is_simulated(rows: Sequence[RunRow]) -> bool:
    return any(row.is_simulated for row in rows)


def _is_embedded(rows: Sequence[RunRow]) -> bool:
    return any(EMBEDDED in row.broker for row in rows)


def _plans(rows: Sequence[RunRow], plans: dict[str, CellPlan]) -> list[Block]:
    lines = []
    for name in dict.fromkeys(row.cell for row in rows):
        plan, cell = plan_of(name, plans), BY_NAME.get(name)
        if plan is not None and cell is not None:
            lines.append(
                [
                    name, f"{cell.history:,}", f"{cell.layers} x {cell.heads * cell.head_width}", str(cell.candidates),
                    f"{plan.full_ms:.1f} ms", f"{plan.hit_ms:.1f} ms", times(plan.slowdown), f"{plan.deadline_ms} ms",
                    f"{plan.lead_ms:.0f} ms", f"{cell.reuse:g}",
                    f"{plan.hbm_bytes >> 20} + {plan.dram_bytes >> 20} MiB",
                ]
            )  # fmt: skip
    header = (
        "cell", "median history", "layers x width", "candidates", "full, engine alone", "hit, engine alone",
        "slowdown while measured", "deadline", "median lead time", "reuse asked for", "HBM + DRAM",
    )  # fmt: skip
    shown = [BY_NAME[line[0]] for line in lines]
    origins = [f"{cell.name}: {cell.origin}." for cell in shown if cell.origin and not cell.planned_as]
    notes: list[Block] = [Bullets(origins)] if origins else []
    return [Heading("Cells"), Grid(header, lines), *notes] if lines else []


def _headlines(figures: Sequence[Reached], rows: Sequence[RunRow], mode: str, transport: str) -> list[Block]:
    blocks: list[Block] = []
    for figure, title in (
        ("A", "A: longest median history with 99 % of the offered requests in time, at a fixed rate"),
        ("B", "B: most requests a second with 99 % of the offered in time"),
    ):
        own = [each for each in figures if each.figure == figure]
        if not own:
            if figure == "A" and OF_LOG in mode:
                blocks += [Heading(title + transport), Text(NO_LENGTHS)]
            continue
        lines = []
        for each in own:
            at = [row for row in rows if (row.cell, row.system, row.figure) == (each.measured_in, each.system, figure)]
            reuse = statistics.median(row.reuse for row in at)
            lines.append(
                [
                    each.cell,
                    f"{each.rate_per_s:g}" if figure == "A" else f"{at[0].history:,}",
                    f"{reuse:.2f}",
                    each.system,
                    ("at least " if each.is_at_least and each.value else "") + reached(each),
                    amount(each.decided) if each.decided is not None else "-",
                    ratio(each.ratio, len(each.by_seed)),
                ]
            )
        fixed = "rate/s" if figure == "A" else "history"
        header = ("cell", fixed, "reuse of the trace", "system", "median of the seeds", "decided", "ratio to B0, 95 %")
        blocks += [Heading(title + transport), Grid(header, lines), *_summary(own, figures, rows, mode, figure)]
    return blocks


def _summary(
    own: Sequence[Reached], figures: Sequence[Reached], rows: Sequence[RunRow], mode: str, figure: str
) -> list[Block]:
    """The median, the best and the losing cells of R over B0."""
    ratios = {
        (each.cell, each.rate_per_s): each.ratio.value
        for each in own
        if each.system == System.R
        and each.ratio is not None
        and (figure == "A" or counts_for_b(figures, rows, each.cell, mode))
    }

    def name_of(cell: str, rate_per_s: float) -> str:
        return f"{cell} at {rate_per_s:g}/s" if figure == "A" else cell

    base = {(each.cell, each.rate_per_s): each.value for each in own if each.system == System.B0}
    without = [name_of(*question) for question, value in base.items() if not value]
    losing = []
    left_out: dict[str, list[str]] = {}
    for each in own:
        if each.system != System.R:
            continue
        question = (each.cell, each.rate_per_s)
        name, b0 = name_of(*question), base.get(question, 0)
        if each.ratio is None:
            losing += [f"{name} (R meets it nowhere)"] if b0 > 0 else []
        elif each.ratio.value < 1:
            losing.append(f"{name} ({each.ratio.value:.2f})")
        elif each.value < b0:
            # The ratio leaves out the seeds at which R reaches nothing.
            losing.append(f"{name} (median of all seeds {amount(each.value)}, B0 {amount(b0)})")
        if figure == "B" and question not in ratios:
            why = "B0 does not reach 30 % device use within the deadline"
            if question not in base:
                why = "B0 was not run"
            elif counts_for_b(figures, rows, each.cell, mode):
                why = "no seed has a value of both R and B0"
            left_out.setdefault(why, []).append(name)
    lines = []
    if ratios:
        values, what = sorted(ratios.values()), "pairs of a cell and a rate" if figure == "A" else "cells"
        lines.append(f"R / B0 over {len(values)} {what}: median {statistics.median(values):.2f}, best {values[-1]:.2f}")
    if losing or any(each.system == System.R and each.ratio is not None for each in own):
        lines.append(f"Cells in which R loses to B0: {', '.join(losing) or 'none of those measured'}")
    if without:
        lines.append(f"B0 meets the deadline nowhere in the search: {', '.join(dict.fromkeys(without))}")
    lines += [f"Not counted, because {why}: {', '.join(sorted(names))}" for why, names in left_out.items()]
    return [Bullets(lines)] if lines else []


def _broken(rows: Sequence[RunRow], mode: str) -> list[Block]:
    broken = broken_in(rows, mode)
    if not broken:
        return []
    text = f"Without a value, since each attempt of a run was invalid: {_names_of(broken)}."
    return [Text(text, is_note=True)]


def _unfinished(searches: Sequence[Search]) -> list[Block]:
    if not searches:
        return []
    text = f"Search not finished, so without a value: {_names_of(searches)}. The same command goes on with it."
    return [Text(text, is_note=True)]


def _names_of(searches: Sequence[Search]) -> str:
    def name_of(each: Search) -> str:
        rate = f" at {each.rate_per_s:g}/s" if each.figure == "A" else ""
        return f"{each.cell} {each.system} {each.figure}{rate} seed {each.seed}"

    return ", ".join(map(name_of, searches))


def _speeds(rows: Sequence[RunRow]) -> str:
    known = [row.slowdown for row in rows if not math.isnan(row.slowdown)]
    late = sum(not row.valid and not row.was_slow for row in rows)
    invalid = f" Invalid because the load generator was late: {late} of {len(rows)} runs." if late else ""
    if not known:
        return f"How fast the machine was during the runs is not known.{invalid}"
    counted = sum(row.valid and row.slowdown > SLOW_LIMIT for row in rows)
    slow = f"{counted} runs above {SLOW_LIMIT} count, so the figures are those of a slow machine."
    if not counted:
        slow = (
            f"With five seeds or more, and with --rates, a run above {SLOW_LIMIT} is invalid: "
            f"{sum(row.was_slow for row in rows)} were."
        )
    return (
        f"Speed: fixed work took {min(known):.2f} to {max(known):.2f} times its quiet time during {len(known)} of "
        f"{len(rows)} runs, median {statistics.median(known):.2f}. {slow}{invalid}"
    )


def _checks(rows: Sequence[RunRow], plans: dict[str, CellPlan], mode: str) -> list[Block]:
    """What must hold before a figure may be believed."""
    lags = [row.lag_p999_ms / row.deadline_ms for row in rows]
    foreign = statistics.median(row.foreign_cpu for row in rows)
    is_simulated = _is_simulated(rows)
    measured = [
        f"Generator: P99.9 lag of at most {LAG_LIMIT:.0%} of the deadline, else a run is invalid and does not count. "
        f"{sum(lag > LAG_LIMIT for lag in lags)} of {len(rows)} runs were; the median lag was "
        f"{statistics.median(lags):.2%} of the deadline.",
        _speeds(rows),
        f"Cores that other processes of the machine used: median {foreign:.2f}.",
        *_scores(rows),
    ]
    lines = [
        *([] if is_simulated else measured),
        f"Over-saturated runs, which do not pass: {sum(row.is_oversaturated for row in rows)}. "
        f"Requests ranked on another history than asked for: {sum(row.stale for row in rows)}.",
    ]
    blocks: list[Block] = [Heading("Checks"), Bullets(lines)]
    return [*blocks, *_broken(rows, mode), *_honest_baseline(rows, plans)]


def _against_simulation(out: Path) -> list[Block]:
    """The live runs of the folder beside simulated ones, if they were compared."""
    checked = read_dicts(out / CHECKED)
    if not checked:
        return []
    text = (
        "Medians of live runs, and of virtual time on the same traces with times learnt from the other points of the "
        f"cell. Limits: P50 {P50_LIMIT:.0%}, P99 {P99_LIMIT:.0%}, late {LATE_LIMIT:.0%}, paths {MIX_LIMIT:.0%}, or the "
        "spread of the live runs where it is larger."
    )
    return [Heading("The live runs in virtual time"), Text(text), against_simulation(checked)]


def _honest_baseline(rows: Sequence[RunRow], plans: dict[str, CellPlan]) -> list[Block]:
    """B0 beside the engine alone, and what is not known of it."""
    blocks: list[Block] = []
    honest = baseline(rows, plans)
    missing = sorted({row.cell for row in rows if plan_of(row.cell, plans) is None})
    if missing:
        text = f"The folder `plans` lacks {', '.join(missing)}: without it nothing compares B0 with the engine alone."
        blocks.append(Text(text, is_note=True))
    if honest.rows:
        text = "B0's time in the worker at half load, without the queue, over that of the engine alone:"
        blocks += [Text(text), honest]
    elif not missing:
        text = "B0 was not measured at half load, so nothing says that it is an honest baseline."
        blocks.append(Text(text, is_note=True))
    return blocks


def _scores(rows: Sequence[RunRow]) -> list[str]:
    """How the scores on cached prefixes agree with full inference's, of exact and of approximate systems."""
    told = []
    for is_exact, what in ((True, "Scores on cached prefixes"), (False, "Approximate scores")):
        own = [row for row in rows if FLAGS[System(row.system)].is_exact == is_exact]
        if is_exact or own:
            names = "" if is_exact else f" of {', '.join(sorted({row.system for row in own}))}"
            compared, different = sum(row.scores_compared for row in own), sum(row.scores_different for row in own)
            worst = max((row.scores_worst_error for row in own), default=0.0)
            told.append(
                f"{what}{names} against B0's on the same trace: {compared} compared, {different} different, largest "
                f"difference {worst:.1e} of the largest score."
            )
    return told


def _costs(title: str, same: Sequence[RunRow]) -> list[Block]:
    first = same[0]
    where = f"{first.rate_per_s:g}/s, {first.history:,} behaviours, reuse {first.reuse:.2f}, seed {first.seed}"
    lines = [
        [
            row.system, f"{row.late_share:.1%}", f"{row.p50_ms:.0f} / {row.p99_ms:.0f}", share(row.hit_share),
            f"{row.hbm_share:.0%} / {row.dram_share:.0%} / {row.pending_share:.0%} / {row.full_share:.0%}",
            str(row.truncated), f"{row.cached_token_share:.0%}", f"{row.device_s_per_1000:.1f}",
            f"{row.preinfer_device_s / row.device_s:.0%}" if row.device_s else "-", f"{row.device_use:.0%}",
            f"{row.preinfer_computed} / {row.preinfer_wasted}", f"{row.reloads} x {row.reload_mean_ms:.1f} ms",
            f"{row.cpu_worker:.2f} / {row.cpu_trigger:.2f} / {row.cpu_broker:.2f} / {row.cpu_load:.2f}",
        ]
        for row in same
    ]  # fmt: skip
    header = (
        "system", "late", "P50 / P99 of whole, ms", "hits", "hbm / dram / pending / full", "truncated", "tokens cached",
        "device s per 1,000", "of it pre-infer", "device use", "prefixes computed / wasted", "reloads",
        "cores: worker / trigger / broker / load",
    )  # fmt: skip
    energies = {row.system: row.energy_j_per_1000 for row in same if not math.isnan(row.energy_j_per_1000)}
    told = ", ".join(f"{system} {joules:,.0f} J" for system, joules in energies.items())
    energy = f"Energy of the processors per 1,000 rankings: {told}." if told else "Energy: not readable here."
    note = f"Device times, energy and prefixes include the warm-up of the run. {energy}"
    return [Heading(f"{title} ({where})"), Grid(header, lines), Text(note)]


def _every_run(rows: Sequence[RunRow]) -> list[Block]:
    lines = [
        [
            row.cell, row.figure, row.system, row.variant or "-", f"{row.history:,}", f"{row.rate_per_s:g}",
            str(row.seed), str(row.offered), f"{row.late_share:.1%}",
            str(row.truncated), f"{row.failed} / {row.expired} / {row.lost}", f"{row.offered_p99_ms:.0f}",
            f"{row.lag_p999_ms:.1f}", times(row.slowdown), row.verdict,
        ]
        for row in rows
    ]  # fmt: skip
    header = (
        "cell", "figure", "system", "variant", "history", "rate/s", "seed", "offered", "late", "truncated",
        "failed / expired / lost", "P99 of offered, ms", "generator lag P99.9, ms", "slowdown", "verdict",
    )  # fmt: skip
    return [Heading("Every run"), Grid(header, lines)]


def break_even(cell: Cell, plan: CellPlan, rows: Sequence[RunRow]) -> list[Block]:
    """Where the relay does not pay, calculated."""
    valid = [row for row in rows if row.valid] or rows
    reuse = round(statistics.median(row.reuse for row in valid), 2)
    hops_ms = statistics.median(row.to_worker_p99_ms + row.to_gateway_p99_ms for row in valid)
    ratios = [row.worker_over_engine for row in valid if (row.system, row.history) == (System.B0, cell.history)]
    over_engine = statistics.median(ratios) if ratios else BASELINE_LIMIT
    latency = plan.latency_in_worker(cell, over_engine)
    lengths = [int(cell.history * factor) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4) if factor <= LENGTH_FACTORS[1]]
    rates_per_s = [load * 1000 / plan.full_ms for load in LOADS]
    verdicts, device = [], []
    for length in lengths:
        work = work_of(latency, length, cell.history_sigma, cell.suffix + cell.candidates, cell.growth)
        for gap_s in (cell.return_gap_s, LONG_GAP_S):
            found = [
                verdict_of(
                    work,
                    Demand(
                        rate, reuse, gap_s, plan.deadline_ms * 1000, hops_ms * 1000, plan.lead_ms * 1000,
                        plan.hbm_bytes + plan.dram_bytes, plan.prefix_bytes * length // cell.history,
                    ),
                )
                for rate in rates_per_s
            ]  # fmt: skip
            verdicts.append([f"{length:,}", f"{gap_s:g} s", *(each.value for each in found)])
        full_s = work.full_s()
        costs = [work.relay_s(each) for each in (*REUSES, reuse)]
        device.append(
            [f"{length:,}", f"{full_s:.1f}", *(f"{relay_s:.1f} ({full_s / relay_s:.2f})" for relay_s in costs)]
        )
    whence = "as B0's in the worker" if ratios else "the limit for B0's in the worker, which was not measured"
    return [
        Heading(f"{cell.name}: where the relay pays and where it does not (calculated, not measured)"),
        Text(
            f"Requests with exponential gaps and the traces' spread of lengths pass one device in the order of "
            f"arrival. It takes {over_engine:.2f} times as long as the engine alone, {whence}. Of the deadline of "
            f"{plan.deadline_ms} ms, {hops_ms:.0f} ms are for the hops between processes, their P99 in the runs. The "
            f"lead time is {plan.lead_ms:.0f} ms. Reuse as in the traces, {reuse:g}, as far as the cache keeps it. "
            f"Full: full inference meets the deadline with at most {MOST_LATE:.1%} late, so the relay brings nothing. "
            "The margin to 1 % is for runs at the limit, of which about every second one fails. Relay: only the relay "
            "does. Neither: the lead time, the device or the cache does not suffice. Left out: the noise of the "
            "machine, caches that are still cold, jobs that the trigger does not send."
        ),
        Grid(("history", "return gap", *(f"{rate:.1f}/s" for rate in rates_per_s)), verdicts),
        Text(
            "Device seconds for a thousand rankings. In brackets: full inference / relay. At reuse 0 the relay saves "
            "no device time: it moves the work before the ranking request, and each cut of a prefix into chunks costs "
            "some. Left out: prefixes that no request uses, and the cold cache at the start of a run, which measured "
            "figures include."
        ),
        Grid(
            ("history", "full", *(f"relay at reuse {each:g}" for each in REUSES), f"relay at the traces' {reuse:g}"),
            device,
        ),
    ]
