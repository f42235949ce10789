// Charts as SVG, drawn anew at each event. Colours are CSS variables, so that they follow the colour scheme.

const NS = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function text(x, y, content, attributes = {}) {
  return svg("text", { x, y, ...attributes }, content);
}

/** A drawing area as large as its container, described in words. */
function canvas(container, label) {
  const width = Math.max(60, container.clientWidth), height = Math.max(16, container.clientHeight);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  container.replaceChildren(root);
  return { root, width, height };
}

/** The colour of an end; a new one needs none of its own. */
export const colour = (kind) => `var(--${kind}, var(--unanswered))`;

/** Round steps of an axis that ends at or above `largest`. */
export function steps(largest, wanted = 4) {
  const raw = Math.max(largest, 1e-9) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const values = [];
  for (let at = 0; at < largest + step * 0.999 && values.length < 12; at += step) values.push(Math.round(at * 1e6) / 1e6);
  return values;
}

export function spark(container, series, label) {
  const { root, width, height } = canvas(container, label);
  const largest = Math.max(1, ...series), slot = width / 120;
  const bars = series.map((value, place) => {
    const tall = (value / largest) * (height - 1);
    const x = width - (series.length - place) * slot;
    return svg("rect", { x, y: height - tall, width: Math.max(0.8, slot - 0.8), height: tall, rx: 0.6, fill: "var(--accent)" });
  });
  root.append(svg("line", { x1: 0, x2: width, y1: height, y2: height, class: "axis" }), ...bars);
}

/** One bar for each `per` neighbours. */
export function cells(container, values, per, label) {
  const { root, width, height } = canvas(container, label);
  const largest = Math.max(1, ...values), slot = width / values.length;
  root.append(svg("line", { x1: 0, x2: width, y1: height, y2: height, class: "axis" }), ...values.map((value, place) => {
    const tall = value ? Math.max(2, (value / largest) * height) : 0;
    const bar = svg("rect", { x: place * slot, y: height - tall, width: Math.max(0.8, slot - 1), height: tall, fill: "var(--accent)" });
    bar.append(svg("title", {}, `partition ${per > 1 ? `${place * per}–${(place + 1) * per - 1}` : place}: ${value}`));
    return bar;
  }));
}

export function stacked(container, kinds, label) {
  const { root, width, height } = canvas(container, label);
  const count = Math.max(0, ...kinds.map((kind) => kind.series.length));
  const per = width < 300 ? 3 : 2, slots = Math.ceil(120 / per), slot = width / slots;
  const sums = [];
  for (let bin = 0; bin < slots; bin++) {
    const end = count - bin * per;
    if (end <= 0) break;
    sums.push(kinds.map((kind) => kind.series.slice(Math.max(0, end - per), end).reduce((sum, each) => sum + each, 0)));
  }
  const largest = Math.max(1, ...sums.map((bin) => bin.reduce((sum, each) => sum + each, 0)));
  sums.forEach((bin, place) => {
    let y = height;
    bin.forEach((value, kind) => {
      if (!value) return;
      const tall = (value / largest) * (height - 2);
      y -= tall;
      const x = width - (place + 1) * slot;
      root.append(svg("rect", { x, y, width: Math.max(0.8, slot - 1), height: tall, fill: colour(kinds[kind].kind) }));
    });
  });
  root.append(svg("line", { x1: 0, x2: width, y1: height, y2: height, class: "axis" }));
}

function path(points, x, y) {
  let drawn = "", open = false;
  points.forEach((value, place) => {
    if (value === null) { open = false; return; }
    drawn += `${open ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return drawn;
}

/** The point of a request; above the axis, a triangle at its upper edge. */
function dot(x, y, isAbove, fill) {
  const above = `M${(x - 3.2).toFixed(1)} ${(y + 5).toFixed(1)}h6.4l-3.2 -5z`;
  return isAbove ? svg("path", { d: above, fill }) : svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 2.1, fill, opacity: 0.72 });
}

/** Whether a box has a part of a line through these points; null: a gap of the line. */
function crosses(points, box) {
  return points.some((point, place) => {
    const before = points[place - 1] ?? point;
    if (!point || !before) return false;
    const [low, high] = [Math.min(point[1], before[1]), Math.max(point[1], before[1])];
    return Math.max(point[0], before[0]) >= box.left && Math.min(point[0], before[0]) <= box.right && high >= box.top && low <= box.bottom;
  });
}

/** A text at the first place where it lies in the area and covers no line and no label; else at the first that is in it. */
function addLabel(root, area, content, places, attributes = {}) {
  const node = text(0, 0, content, attributes);
  root.append(node);
  const own = node.getBBox();
  const box = ([x, y]) => ({ left: x, right: x + own.width, top: y + own.y, bottom: y + own.y + own.height });
  const inside = places.filter((place) => { const each = box(place); return each.left >= area.left && each.right <= area.right && each.top >= area.top && each.bottom <= area.bottom; });
  const isFree = (each) => !area.lines.some((line) => crosses(line, each)) && !area.labels.some((other) => each.left < other.right && other.left < each.right && each.top < other.bottom && other.top < each.bottom);
  const [x, y] = inside.find((place) => isFree(box(place))) ?? inside[0] ?? places[0];
  node.setAttribute("x", x);
  node.setAttribute("y", y);
  area.labels.push(box([x, y]));
}

function deadline(root, area, y, ms) {
  const words = `deadline ${Math.round(ms)} ms`;
  root.append(svg("line", { x1: area.left, x2: area.right, y1: y, y2: y, class: "deadline" }));
  area.lines.push([[area.left, y], [area.right, y]]);
  // As far to the right as it can be; above the line, or else below.
  const across = Array.from({ length: 24 }, (_, place) => area.right - 6.6 * words.length - place * 28);
  addLabel(root, area, words, [...across.map((from) => [from, y - 5]), ...across.map((from) => [from, y + 14])], { class: "deadline-text" });
}

export function latency(container, view, kinds, span, label) {
  const { root, width, height } = canvas(container, label);
  const left = 46, bottom = height - 18, top = 6;
  const tall = [...view.dots.map((dot) => dot[1])].sort((a, b) => a - b);
  const most = tall.length ? tall[Math.min(tall.length - 1, Math.floor(tall.length * 0.995))] : 0;
  const ticks = steps(Math.max(1.25 * (view.budget_ms ?? 0), 1.05 * most, 10));
  const largest = ticks[ticks.length - 1];
  const y = (ms) => Math.max(top, bottom - (ms / largest) * (bottom - top));
  const x = (age) => width - (Math.min(age, span) / span) * (width - left);
  for (const tick of ticks) {
    root.append(svg("line", { x1: left, x2: width, y1: y(tick), y2: y(tick), class: "gridline" }), text(left - 6, y(tick) + (tick === largest ? 10 : 4), tick === largest ? `${tick} ms` : tick, { "text-anchor": "end" }));
  }
  for (const age of [span, (3 * span) / 4, span / 2, span / 4, 0]) {
    root.append(text(x(age), height - 3, age === 0 ? "now" : `−${age} s`, { "text-anchor": age === 0 ? "end" : age === span ? "start" : "middle" }));
  }
  for (const [age, ms, kind] of view.dots) {
    if (age > span) continue;
    root.append(dot(x(age), y(ms), ms > largest, colour(kinds[kind].kind)));
  }
  const age = (series) => (place) => x(series.length - place - 0.5);
  const points = (series) => series.map((value, place) => (value === null || series.length - place > span ? null : [age(series)(place), y(value)]));
  const p50 = points(view.p50_series), p99 = points(view.p99_series);
  root.append(svg("path", { d: path(view.p50_series, age(view.p50_series), y), class: "p50" }));
  root.append(svg("path", { d: path(view.p99_series, age(view.p99_series), y), class: "p99" }));
  const area = { left, right: width, top, bottom, lines: [p99, p50], labels: [] };
  if (view.budget_ms) deadline(root, area, y(view.budget_ms), view.budget_ms);
  // As near to its line as it can be, and then to the beginning of it.
  const beside = (line) => [8, 16, 26, 40, 60].flatMap((off) => line.filter(Boolean).filter((_, place) => place % 4 === 0).flatMap(([from, at]) => [[from + 2, at - off + 2], [from + 2, at + off + 7]]));
  addLabel(root, area, `P99 over ${view.point_s} s`, beside(p99), { "font-weight": 650 });
  addLabel(root, area, `P50 over ${view.point_s} s`, beside(p50));
}

/** What is shown of the stages of a request at its worker, in the order of time. */
export const STAGES = [
  ["way", "to the worker", "var(--other)"],
  ["queue", "queue", "var(--truncated)"],
  ["wait", "waits for its history or prefix", "var(--pending)"],
  ["reload", "reload", "var(--dram)"],
  ["pre_infer", "pre-infer", "var(--full)"],
  ["rank", "ranking", "var(--hbm)"],
  ["rest", "else at the worker", "var(--off)"],
];

/** The durations of a late request in ms, in the order of STAGES. */
export function durations(late) {
  const way = late.received_ms === null ? 0 : Math.max(0, late.received_ms - late.sent_ms);
  const known = late.queue_ms + late.wait_ms + late.reload_ms + late.pre_infer_ms + late.rank_ms;
  // A reload may be a part of the wait, and so may the chunks of another request.
  const waits = Math.max(0, late.wait_ms - late.reload_ms);
  const rest = Math.max(0, late.total_ms - known);
  return [way, late.queue_ms, waits, late.reload_ms, late.pre_infer_ms, late.rank_ms, rest];
}

/** The ms after the ranking request that a waterfall must have room for. */
export function reach(late) {
  const parts = durations(late).reduce((sum, each) => sum + each, 0);
  return Math.max(parts, (late.deadline_ms ?? 0) - late.sent_ms, 1);
}

/** The lead time has a fixed width, so that ranking requests of one scale begin below each other. */
export function waterfall(container, late, span) {
  const parts = durations(late);
  const words = STAGES.map(([, name], place) => [name, parts[place]]).filter(([, ms]) => ms > 0).map(([name, ms]) => `${name} ${ms.toFixed(1)} ms`).join(", ");
  const { root, width, height } = canvas(container, words || "no figures of the worker");
  const start = Math.min(90, width * 0.2), middle = height / 2;
  const x = (ms) => start + (Math.min(Math.max(0, ms), span) / span) * (width - start - 2);
  if (late.sent_ms > 0) {
    root.append(svg("line", { x1: 4, x2: start, y1: middle, y2: middle, class: "lead" }));
    if (late.decided_ms !== null) root.append(svg("circle", { cx: 4 + Math.min(1, Math.max(0, late.decided_ms / late.sent_ms)) * (start - 8), cy: middle, r: 3.2, fill: "var(--accent)" }));
  }
  let at = 0;
  parts.forEach((ms, place) => {
    if (ms <= 0 || at > span) return;
    root.append(svg("rect", { x: x(at), y: 5, width: Math.max(1, x(at + ms) - x(at) - 0.5), height: height - 10, rx: 1.5, fill: STAGES[place][2] }));
    at += ms;
  });
  if (late.deadline_ms !== null) {
    const line = x(late.deadline_ms - late.sent_ms);
    root.append(svg("line", { x1: line, x2: line, y1: 0, y2: height, class: "deadline" }));
  }
}

/** Curves of the share of all offered requests that were answered within a time. */
export function distribution(container, runs, deadline_ms, label) {
  const { root, width, height } = canvas(container, label);
  const left = 38, bottom = height - 20, top = 8;
  const last = Math.max(1.6 * (deadline_ms ?? 0), ...runs.map((run) => { const at = run.distribution.find((point) => point[1] >= 0.985); return at ? at[0] : 0; }), 10);
  const ticks = steps(last), largest = ticks[ticks.length - 1];
  const x = (ms) => left + (Math.min(ms, largest) / largest) * (width - left), y = (share) => bottom - share * (bottom - top);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    root.append(svg("line", { x1: left, x2: width, y1: y(share), y2: y(share), class: "gridline" }), text(left - 6, y(share) + 4, `${share * 100}%`, { "text-anchor": "end" }));
  }
  ticks.forEach((tick, place) => root.append(text(x(tick), height - 4, place === ticks.length - 1 ? `${tick} ms` : tick, { "text-anchor": place === ticks.length - 1 ? "end" : "middle" })));
  const ends = runs.map((run) => run.distribution.filter(([ms]) => ms <= largest).at(-1)), labels = [];
  // A label lies below the end of its curve, or else above it, where it covers neither a curve's end nor a label.
  const isFree = (at) => ends.every((end) => !end || Math.abs(y(end[1]) - (at - 4)) > 9) && labels.every((label) => Math.abs(label - at) >= 14);
  function labelAt(end) {
    let at = y(end[1]) + 16;
    while (!isFree(at) && at < bottom - 22) at += 2;
    if (at < bottom - 22) return at;
    return labelAbove(y(end[1]) - 8);
  }
  function labelAbove(at) {
    while (!isFree(at) && at > top + 10) at -= 2;
    return at;
  }
  if (deadline_ms) {
    labels.push(labelAbove(bottom - 6));
    root.append(svg("line", { x1: x(deadline_ms), x2: x(deadline_ms), y1: top, y2: bottom, class: "deadline" }), text(x(deadline_ms) + 5, labels[0], `deadline ${deadline_ms} ms`, { class: "deadline-text" }));
  }
  runs.forEach((run, place) => {
    let drawn = `M${x(0)} ${y(0)}`;
    for (const [ms, share] of run.distribution) {
      if (ms > largest) break;
      drawn += `L${x(ms).toFixed(1)} ${y(share).toFixed(1)}`;
    }
    const end = ends[place];
    const tone = place === 0 ? "var(--accent)" : "var(--off)";
    // The others got no whole answer: the curve stays where it is.
    if (end) drawn += `L${width} ${y(end[1]).toFixed(1)}`;
    root.append(svg("path", { d: drawn, fill: "none", stroke: tone, "stroke-width": 2.4, "stroke-linejoin": "round" }));
    if (!end) return;
    labels.push(labelAt(end));
    // 100 % means all.
    root.append(text(width - 2, labels.at(-1), `${run.title}: ${Math.floor(end[1] * 100 + 1e-6)} %${width < 420 ? "" : " answered whole"}`, { "text-anchor": "end", "font-weight": 600 }));
  });
}

export function endings(container, runs, known, label) {
  const { root, width, height } = canvas(container, label);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.endings)))];
  names.sort((one, other) => place(one) - place(other));
  function place(name) { const found = known.findIndex((kind) => name.startsWith(kind)); return found < 0 ? known.length : found; }
  const tone = (name) => colour(known[place(name)] ?? "unanswered");
  runs.forEach((run, row) => {
    const top = row * 52 + 18;
    root.append(text(0, top - 5, run.title, { "font-weight": 600 }));
    let x = 0;
    for (const name of names) {
      const wide = ((run.endings[name] ?? 0) / Math.max(1, run.offered)) * width;
      if (!wide) continue;
      const bar = svg("rect", { x, y: top, width: Math.max(1, wide - 1), height: 24, rx: 2, fill: tone(name) });
      bar.append(svg("title", {}, `${name}: ${run.endings[name]}`));
      root.append(bar);
      x += wide;
    }
  });
  let x = 0, y = runs.length * 52 + 26;
  for (const name of names) {
    const counts = runs.map((run) => run.endings[name] ?? 0).join(" / ");
    const shown = `${name} ${counts}`, wide = 22 + shown.length * 6.4;
    if (x + wide > width && x > 0) { x = 0; y += 18; }
    if (y > height + 4) break;
    root.append(svg("rect", { x, y: y - 9, width: 10, height: 10, rx: 3, fill: tone(name) }), text(x + 15, y, shown));
    x += wide + 8;
  }
}

export function schedule(container, runs, deadline_ms, known, label) {
  const { root, width, height } = canvas(container, label);
  const gap = 26, left = 34, bottom = height - 6, top = 20, narrow = width < 520;
  const most = Math.max(...runs.flatMap((run) => run.dots.map((dot) => dot[1])), 1);
  const ticks = steps(Math.min(Math.max(1.3 * (deadline_ms ?? 0), most), 3 * (deadline_ms ?? most))), largest = ticks[ticks.length - 1];
  const columns = narrow ? 1 : runs.length, wide = (width - left - gap * (columns - 1)) / columns;
  const shown = narrow ? runs.slice(0, 2) : runs, tall = narrow ? (bottom - top - 24 * (shown.length - 1)) / shown.length : bottom - top;
  shown.forEach((run, place) => {
    const start = left + (narrow ? 0 : place * (wide + gap)), high = top + (narrow ? place * (tall + 24) : 0), low = high + tall;
    const y = (ms) => low - (Math.min(ms, largest) / largest) * tall;
    const last = Math.max(1, ...run.dots.map((dot) => dot[0]));
    for (const tick of ticks) {
      root.append(svg("line", { x1: start, x2: start + wide, y1: y(tick), y2: y(tick), class: "gridline" }));
      if (place === 0 || narrow) root.append(text(left - 6, y(tick) + 4, tick, { "text-anchor": "end" }));
    }
    root.append(text(start, high - 7, `${run.title}, ms`, { "font-weight": 600 }));
    for (const [number, ms, kind] of run.dots) {
      const tone = colour(known.find((name) => kind.startsWith(name)) ?? "other");
      root.append(dot(start + 3 + (number / last) * (wide - 6), y(ms), ms > largest, tone));
    }
    if (deadline_ms) deadline(root, { left: start, right: start + wide, top: high, bottom: low, lines: [], labels: [] }, y(deadline_ms), deadline_ms);
  });
}
