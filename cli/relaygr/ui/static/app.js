// The page: takes one document a second from /events and shows it.

import * as charts from "./charts.js";

const $ = (id) => document.getElementById(id);
const OWNERS = 8;
const STAGE_NAMES = { retrieval: "Retrieval events", preinfer: "Pre-infer jobs", ranking: "Ranking requests", results: "Results" };
const ADMITTED = new Set(["admitted", "no_status_threshold"]);
let last = null, paused = false, heard = 0, ended = "";
let query = "", found = [];

// -- words ---------------------------------------------------------------------------------------

const ms = (value, digits = 1) => (value === null || value === undefined ? "–" : `${value.toFixed(value >= 1000 ? 0 : digits)} ms`);
const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`);
const whole = (value) => value.toLocaleString("en");
const plain = (reason) => reason.replaceAll("_", " ");

function bytes(value) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 1 : 0)} ${unit}`;
  }
  return `${value} B`;
}

function seconds(value) {
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  return value < 3600 ? `${Math.floor(value / 60)} min` : `${Math.floor(value / 3600)} h`;
}

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each !== null));
  return made;
}

function swatch(tone) {
  const made = node("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = tone;
  return made;
}

const owner = (place) => (place < 0 ? "var(--faint)" : `var(--o${place % OWNERS})`);

/** Changes a text only if it differs, so that a selection stays. */
function say(id, content) {
  const target = $(id);
  if (target.textContent !== content) target.textContent = content;
}

// -- sections ------------------------------------------------------------------------------------

function showFlow(live) {
  const list = $("flow");
  if (!list.children.length) {
    live.stages.forEach((stage, place) => {
      if (place) list.append(node("li", { class: "wire", "aria-hidden": "true" }));
      const chart = node("div", { class: "chart" });
      chart.style.height = "38px";
      list.append(node("li", { class: "stage" }, node("div", { class: "name" }, node("span", {}, STAGE_NAMES[stage.stage] ?? stage.stage), node("span", {})), node("b", {}), chart));
    });
  }
  const boxes = list.querySelectorAll(".stage"), wires = list.querySelectorAll(".wire");
  live.stages.forEach((stage, place) => {
    const box = boxes[place], name = box.querySelector(".name").children;
    box.querySelector("b").textContent = `${stage.per_s.toFixed(stage.per_s < 100 ? 1 : 0)} /s`;
    name[1].textContent = stage.stage === "preinfer" && live.admitted_share !== null ? `${share(live.admitted_share)} of events` : "";
    charts.spark(box.querySelector(".chart"), stage.series, `${STAGE_NAMES[stage.stage]} in each of the last ${stage.series.length} seconds, ${stage.per_s} a second now`);
    if (place) {
      const pace = stage.per_s;
      wires[place - 1].className = `wire ${pace <= 0 ? "" : pace < 5 ? "slow" : pace < 50 ? "mid" : "fast"}`;
    }
  });
}

function showLatency(live) {
  const view = live.latency;
  const within = view.p99_ms === null || view.budget_ms === null ? "" : view.p99_ms <= view.budget_ms ? "good" : "bad";
  const lateShare = view.ended ? view.late / view.ended : null;
  const figures = [
    ["P50, last minute", ms(view.p50_ms), ""], ["P99, last minute", ms(view.p99_ms), within],
    ["mean", ms(view.mean_ms), ""], ["of it, prefix not ready", view.not_ready_share === null ? "–" : share(view.not_ready_share), ""],
    ["deadline", ms(view.budget_ms, 0), ""], ["late, failed or truncated", lateShare === null ? "–" : `${share(lateShare)}`, lateShare ? "bad" : ""],
  ];
  if (live.lost !== null) figures.push(["lost, by the gateways", whole(live.lost), live.lost ? "bad" : ""]);
  $("latency-figures").replaceChildren(...figures.map(([name, value, tone]) => node("div", {}, node("dt", {}, name), node("dd", { class: tone }, value))));
  charts.latency($("latency"), view, live.kinds, live.observed_s < 60 ? 60 : 120, `Latency of the last two minutes. In the last minute: P50 ${ms(view.p50_ms)}, P99 ${ms(view.p99_ms)}; deadline ${ms(view.budget_ms, 0)}`);
}

function showPaths(live) {
  charts.stacked($("paths-bars"), live.kinds, "Requests by path over the last two minutes");
  const rows = live.kinds.filter((kind) => kind.kind !== "other" || kind.count).map((kind) =>
    node("tr", { class: kind.count ? null : "none" },
      node("td", {}, swatch(charts.colour(kind.kind)), kind.kind),
      node("td", { class: "num" }, kind.count ? share(kind.share) : "–"),
      node("td", { class: "num" }, whole(kind.count))));
  $("paths").tBodies[0].replaceChildren(...rows);
}

function tier(label, fill, pool = null) {
  if (!fill.capacity_bytes) return node("td", { "data-label": label }, node("span", { class: "small" }, "none"));
  const held = fill.held_bytes / fill.capacity_bytes, cached = (fill.cached_bytes ?? 0) / fill.capacity_bytes;
  const used = Math.min(1, held + cached);
  const meter = node("div", { class: "meter", role: "img", "aria-label": `${label} ${share(used)} full, ${share(held)} held` }, node("i", { class: "held" }), node("i", { class: "cached" }));
  meter.children[0].style.width = `${100 * Math.min(1, held)}%`;
  meter.children[1].style.width = `${100 * Math.min(1 - held, cached)}%`;
  const words = fill.cached_bytes === null ? `${share(held)} held of ${bytes(fill.capacity_bytes)}` : `${share(used)} of ${bytes(fill.capacity_bytes)}`;
  const loaded = pool && node("div", { class: "small" }, "pool: ", pool.away ? node("span", { class: "pill warn" }, "away") : `${whole(pool.written)} written, ${whole(pool.loaded)} loaded`);
  return node("td", { "data-label": label }, meter, node("span", { class: "small" }, words), loaded);
}

function standby(worker) {
  if (worker.standbys === null) return node("span", { class: "small" }, "–");
  return worker.standbys ? node("span", { class: "pill good" }, "ready") : node("span", { class: "pill warn" }, "none");
}

function duty(worker) {
  const slots = worker.pre_infer;
  if (slots) return `pre-infer: ${slots.slots - slots.free} of ${slots.slots} slots busy, ${whole(slots.accepted)} jobs taken, ${whole(slots.refused)} refused`;
  return worker.partitions ? `${worker.partitions} partitions: ${worker.owns.length > 60 ? `${worker.owns.slice(0, 57)}…` : worker.owns}` : "no partition";
}

function showWorkers(live) {
  const rows = live.workers.map((worker, place) => {
    const state = worker.fresh ? "good" : worker.state === "starting" ? "warn" : "bad";
    const words = worker.fresh || worker.state !== "ready" ? worker.state : `silent for ${seconds(worker.age_s)}`;
    return node("tr", {},
      node("td", {}, node("div", {}, swatch(owner(place)), node("span", { class: "name" }, worker.worker_id), " ", node("span", { class: `pill ${state}` }, words)),
        node("div", { class: "small owns" }, duty(worker)),
        node("div", { class: "small owns" }, [worker.host, `model ${worker.revision}`].filter(Boolean).join(", "))),
      tier("HBM", worker.hbm), tier("DRAM", worker.dram, worker.pool),
      node("td", { class: "num", "data-label": "Queue P99" }, ms(worker.queue_p99_ms)),
      node("td", { class: "num", "data-label": "Backlog" }, ms(worker.backlog_ms)),
      node("td", { class: "num", "data-label": "HBM hits" }, share(worker.hit_share)),
      node("td", { class: "num", "data-label": "Device" }, share(worker.device_share)),
      node("td", { "data-label": "Standby" }, standby(worker)));
  });
  if (!rows.length) rows.push(node("tr", {}, node("td", { colspan: "8", class: "muted" }, "No worker has written a status in the last minute.")));
  $("workers").tBodies[0].replaceChildren(...rows);
  const ready = live.workers.filter((worker) => worker.fresh), helpers = ready.filter((worker) => worker.pre_infer).length;
  say("workers-note", [`${ready.length - helpers} ready`, helpers ? `${helpers} pre-infer` : "", live.silent_workers ? `${live.silent_workers} silent or not shown` : ""].filter(Boolean).join(", "));
}

function showPartitions(live) {
  const box = $("partitions"), owned = live.owners.filter((place) => place >= 0).length;
  const many = live.owners.length > 128;
  box.className = many ? "partitions many" : "partitions";
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", live.workers.map((worker) => `${worker.worker_id} owns ${worker.owns || "none"}`).join("; ") || "no partition has an owner");
  box.replaceChildren(...live.owners.map((place, partition) => {
    const cell = node("i", { class: place < 0 ? "none" : null, title: `${partition}: ${place < 0 ? "no owner" : live.workers[place].worker_id}` }, String(partition));
    if (place >= 0) cell.style.background = owner(place);
    return cell;
  }));
  say("partitions-note", owned === live.owners.length ? `all ${owned} owned` : `${owned} of ${live.owners.length} owned`);
}

function showDecisions(live) {
  if (live.decisions === null) {
    $("decisions").replaceChildren(node("p", { class: "muted" }, live.admitted_share === null ? "No events." : `${share(live.admitted_share)} of events became jobs. The reasons are in a trigger’s metrics: start with --scrape http://TRIGGER:PORT/metrics.`));
    return;
  }
  const largest = Math.max(1, ...live.decisions.map((each) => each.count));
  const bars = live.decisions.map((each) => {
    const track = node("span", { class: "track", "aria-hidden": "true" }, node("i"));
    track.firstChild.style.width = `${(100 * each.count) / largest}%`;
    return node("div", { class: ADMITTED.has(each.reason) ? "bar yes" : "bar" }, node("span", {}, plain(each.reason)), track, node("span", { class: "num" }, whole(each.count)));
  });
  $("decisions").replaceChildren(...(bars.length ? bars : [node("p", { class: "muted" }, "No decision in the last minute.")]));
}

const LAG_TONE = { ok: "good", no_commit: "", judging: "", unknown: "", warn: "warn" };

/** The lag of each partition, drawn when its place has a size. */
function strip(group, partitions, strips) {
  const largest = Math.max(0, ...group.cells);
  if (!largest) return null;
  const box = node("div", { class: "chart strip" });
  strips.push(() => charts.cells(box, group.cells, Math.ceil(partitions / group.cells.length), `${group.group}: lag by partition, at most ${whole(largest)} messages`));
  return box;
}

function showLag(live) {
  const strips = [];
  const rows = (live.lag ?? []).map((group) => node("tr", {},
    node("td", { title: group.group }, group.group.startsWith(`${live.prefix}.`) ? group.group.slice(live.prefix.length + 1) : group.group, group.owner_split ? node("div", { class: "over" }, `owners of ${group.owner_split} partitions are split`) : null, strip(group, live.partitions, strips)),
    node("td", {}, node("span", { class: `pill ${LAG_TONE[group.status] ?? "bad"}` }, plain(group.status))),
    node("td", { class: "num" }, group.messages === null ? "–" : whole(group.messages)), node("td", { class: "num" }, group.seconds === null ? "–" : group.seconds.toFixed(1)),
    node("td", { class: "num" }, group.members === null ? "–" : String(group.members))));
  if (!rows.length) rows.push(node("tr", {}, node("td", { colspan: "5", class: "muted" }, live.lag === null ? "Not measured yet." : "No group of this prefix.")));
  $("lag").tBodies[0].replaceChildren(...rows);
  for (const draw of strips) draw();
  say("lag-note", [...new Set((live.lag ?? []).map((group) => group.problem).filter(Boolean))].join(" "));
}

function showLate(live) {
  const shown = query ? found : live.late;
  say("late-title", query ? "Requests found" : "Last late requests");
  say("late-note", query ? "the newest; all late ones are kept for a while, and of the others up to 16 a second" : "late, truncated, expired, failed or unanswered");
  const box = $("late"), known = new Map([...box.querySelectorAll("details")].map((row) => [row.dataset.request, row]));
  if (!$("late-key").children.length) {
    $("late-key").append(...charts.STAGES.map(([, name, tone]) => node("span", {}, swatch(tone), name)), node("span", {}, swatch("var(--accent)"), "dot: job sent"), node("span", {}, swatch("var(--bad)"), "line: deadline"));
  }
  $("late-key").hidden = !shown.length;
  const rows = shown.map((late) => {
    let row = known.get(late.request);
    if (!row) {
      row = node("details", { "data-request": late.request },
        node("summary", {}, node("span", { class: "small age" }), node("span", {}, swatch(charts.colour(late.kind)), late.reason ? `${late.kind}: ${plain(late.reason)}` : late.kind),
          node("span", { class: late.latency_ms > late.budget_ms ? "over" : "", title: "latency" }, late.latency_ms === null ? "–" : ms(late.latency_ms)),
          node("span", {}, late.worker_id || "–"), node("span", { class: "small" }, `user ${late.user || "?"}`), node("span", { class: "fall" })),
        details(late));
    }
    row.querySelector(".age").textContent = `${seconds(late.age_s)} ago`;
    return row;
  });
  if (!rows.length) rows.push(node("p", { class: "muted" }, query ? "No request that is kept." : "None so far."));
  // Rows that stay are not moved: a moved row loses the focus.
  const wanted = new Set(rows);
  for (const child of [...box.children]) if (!wanted.has(child)) child.remove();
  rows.forEach((row, place) => { if (box.children[place] !== row) box.insertBefore(row, box.children[place] ?? null); });
  const budget = live.latency.budget_ms ?? 100;
  const span = Math.min(4 * budget, Math.max(budget, ...shown.map(charts.reach)));
  shown.forEach((late, place) => charts.waterfall(rows[place].querySelector(".fall"), late, span));
}

function details(late) {
  const parts = charts.durations(late);
  const facts = [
    ["request", late.request], ["reason", late.reason ? plain(late.reason) : "–"], ["latency of its budget", `${ms(late.latency_ms)} of ${ms(late.budget_ms, 0)}`],
    ["job sent after", ms(late.decided_ms)], ["ranking request sent after", ms(late.sent_ms)], ["prefix", late.prefix_tokens ? `${whole(late.prefix_tokens)} tokens` : "–"],
    ...charts.STAGES.map(([, name], place) => [name, ms(parts[place])]),
  ];
  return node("dl", {}, ...facts.map(([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, value))));
}

function showComparison(state) {
  const runs = state.runs, kinds = state.live?.kinds.map((each) => each.kind) ?? [], box = $("comparison");
  box.hidden = !runs.length;
  if (!runs.length) return;
  const [on, off] = runs, both = off !== undefined;
  say("comparison-title", state.comparison);
  say("comparison-note", both ? `the same schedule, deadline ${state.deadline_ms} ms` : `deadline ${state.deadline_ms} ms; the second run follows`);
  // Less is better in all of them; null is no answer at all.
  const tiles = [
    ["late, cut or failed", (run) => (run.offered ? run.late / run.offered : 0), (run, value) => share(value)],
    ["P50", (run) => run.p50_ms, (run, value) => ms(value)], ["P99 of answered", (run) => run.p99_ms, (run, value) => ms(value)],
    ["P99 of all offered", (run) => run.offered_p99_ms, (run, value) => (value === null ? "no whole answer" : ms(value))],
    ["lost", (run) => run.lost, (run, value) => `${value} of ${run.offered}`], ["device seconds", (run) => run.device_s, (run, value) => value.toFixed(1)],
  ];
  $("tiles").replaceChildren(...tiles.map(([label, of, words]) => {
    const [mine, other] = [of(on), both ? of(off) : null].map((value) => value ?? Infinity), shown = words(on, of(on));
    const tone = mine < other ? " better" : mine > other ? " worse" : "";
    return node("div", { class: "tile" }, node("div", { class: "label" }, label), node("div", { class: `on${/^\d/.test(shown) ? "" : " words"}${both ? tone : ""}` }, shown), node("div", { class: "off" }, both ? `${off.title}: ${words(off, of(off))}` : on.title));
  }));
  charts.distribution($("plot-distribution"), runs, state.deadline_ms, `Share of all offered requests by latency. ${runs.map((run) => `${run.title}: P50 ${ms(run.p50_ms)}, P99 ${ms(run.p99_ms)}`).join("; ")}`);
  charts.endings($("plot-endings"), runs, kinds, runs.map((run) => `${run.title}: ${Object.entries(run.endings).map(([name, count]) => `${name} ${count}`).join(", ")}`).join("; "));
  charts.schedule($("plot-dots"), runs, state.deadline_ms, kinds, `Latency of each request in the order of the schedule, for ${runs.map((run) => run.title).join(" and ")}`);
  $("gates").replaceChildren(...state.gates.map((gate) => node("li", { class: `pill ${!gate.judged ? "" : gate.passed ? "good" : "bad"}`, title: gate.found }, `${gate.name}${gate.judged ? "" : " (not judged)"}`)));
}

/** The first lines of the page: what is wrong, and which page of the documentation helps. */
function showProblems(problems) {
  const list = $("problems"), names = problems.map((problem) => problem.name).join(" ");
  list.hidden = !problems.length;
  const shown = problems.map((problem) => `${problem.text}\n${problem.page}`).join("\n");
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...problems.map((problem) => node("li", { class: problem.severity }, node("b", {}, `${problem.text}.`), " See ", node("code", {}, problem.page), ".")));
  // Figures change every second; a screen reader hears what is wrong once.
  if (list.dataset.names !== names) say("told", problems.map((problem) => `${problem.text}.`).join(" "));
  list.dataset.names = names;
}

function show(state) {
  const live = state.live;
  document.title = state.phase ? `${state.title}: ${state.phase}` : state.title;
  say("title", state.title);
  $("phase").hidden = !state.phase;
  say("phase", state.phase);
  showComparison(state);
  $("live").hidden = !live;
  $("waiting").hidden = Boolean(live) || state.runs.length > 0;
  // After the end nothing can be mended: the comparison tells how it was.
  showProblems(live && !state.ended ? live.problems : []);
  if (!live) return;
  say("where", `${live.prefix}.* at ${live.cluster}`);
  for (const part of [showFlow, showLatency, showPaths, showWorkers, showPartitions, showDecisions, showLag, showLate]) part(live);
  const notes = [`Observed for ${seconds(live.observed_s)}.`, "User ids are hashed with a key of this process."];
  if (live.skipped) notes.push(`${whole(live.skipped)} messages were counted, not read.`);
  if (live.unreadable) notes.push(`${whole(live.unreadable)} messages could not be read.`);
  say("foot", notes.join(" "));
}

/** Whether nothing was published in the time that the page shows. */
function isIdle(state) {
  return Boolean(state?.live) && !state.ended && state.live.stages.every((stage) => stage.series.every((each) => !each));
}

/** The beginning of a problem's sentence, which is whole in the first lines of the page. */
function brief(problem) {
  const begin = problem.split(/[,:;(]/)[0].trim();
  return begin.length > 44 ? `${begin.slice(0, 43)}…` : begin;
}

function showLink() {
  const silent = performance.now() - heard > 5000;
  const [words, tone] = ended ? [ended, ""] : !heard ? ["connecting", ""] : silent ? ["no answer; trying again", "bad"] : paused ? ["paused", "warn"] : isIdle(last) && !last.live.problems.length ? ["live, no traffic", ""] : last?.ended ? [last.gates.length ? "finished" : "between two runs", ""] : last?.live?.problems.length ? [brief(last.live.problems[0].text), last.live.problems[0].severity === "critical" ? "bad" : "warn"] : ["live", "good"];
  say("link", words);
  $("link").className = `pill ${tone}`;
}

// -- events --------------------------------------------------------------------------------------

/** Asks for the wanted requests again, so that newer ones come and ages stay true. */
async function find() {
  const asked = query;
  const answer = asked ? await fetch("search", { method: "POST", body: new URLSearchParams({ text: asked }) }).catch(() => null) : null;
  if (asked !== query) return;
  found = answer?.ok ? await answer.json() : [];
  if (last?.live && !paused) showLate(last.live);
}

function take(state) {
  heard = performance.now();
  last = state;
  if (query && !paused) find();
  if (!paused) show(state);
  showLink();
}

function connect() {
  const source = new EventSource("events");
  source.onmessage = (event) => take(JSON.parse(event.data));
  const end = (words) => { ended = words; source.close(); showLink(); };
  source.addEventListener("end", () => end("ended; the last figures stay"));
  source.addEventListener("taken", () => end("another browser took this place; reload to watch"));
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000); };
}

function toggle() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (!paused && last) show(last);
  showLink();
}

$("pause").addEventListener("click", toggle);
document.addEventListener("keydown", (event) => {
  if (event.key === "p" && event.target.id !== "wanted" && !event.ctrlKey && !event.metaKey && !event.altKey) toggle();
});
$("search").addEventListener("submit", (event) => { event.preventDefault(); query = $("wanted").value.trim(); find(); });
$("wanted").addEventListener("input", () => { if (!$("wanted").value) { query = ""; find(); } });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (last) show(last); }, 150); });
setInterval(showLink, 1000);
connect();
