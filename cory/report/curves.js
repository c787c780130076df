"use strict";
// Curves: one chart for each chosen metric, with bands over seeds, drawn by uPlot.

const SMOOTHING = 10; // iterations of a running mean
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const COLOURS = 8;
const DEFAULT_METRICS = 3;

/** Shows the curves in `place`; returns a function that draws them again, as in other colours. */
function showCurves(data, place) {
  const all = (names) => new Set(names.keys());
  const titles = Object.values(data.metrics);
  const state = {
    by: "agent", smooth: true, log: new Set(),
    groups: all(data.groups), agents: all(data.agents), roles: all(data.roles),
    metrics: new Set([...titles.keys()].slice(0, DEFAULT_METRICS)),
  };
  const last = Math.max(0, ...data.points.map((points) => points.iteration.at(-1) ?? 0));
  const charts = element("div", { className: "charts" });
  const slider = element("input", { type: "range", id: "iteration", min: 0, max: last, step: data.every, value: last });
  const output = element("span", { className: "iteration" });
  const flagsHere = element("span", { className: "flagged" });
  let drawn = [];

  function showAt(iteration) {
    slider.value = iteration;
    slider.setAttribute("aria-valuetext", `iteration ${iteration}`);
    output.textContent = iteration;
    flagsHere.textContent = data.flags
      .filter((flag) => isShown(flag, data, state) &&
        flag.iterations.some((k) => k >= iteration && k < iteration + data.every))
      .map((flag) => `${flag.flag}: ${data.runs[flag.run].name} ${flag.agent}`).join("; ");
    for (const chart of drawn) chart.showAt(iteration);
  }

  function draw() {
    const at = Number(slider.value);
    for (const chart of drawn) chart.destroy();
    charts.replaceChildren();
    drawn = [...state.metrics].sort((a, b) => a - b).map((index) => {
      const metric = Object.keys(data.metrics)[index];
      return drawChart(data, state, metric, charts, showAt, draw);
    });
    for (const chart of drawn) chart.resize(); // the first ones were drawn while the grid had fewer columns
    showAt(at);
  }

  slider.addEventListener("input", () => showAt(Number(slider.value)));
  const by = [["agent", "agent"], ["role", "role"], ["method", "method"], ["run", "run"]];
  const controls = element("div", { className: "controls" },
    select("A line for each", by, state.by, (value) => { state.by = value; draw(); }),
    data.groups.length > 1 ? choices("Methods", data.groups, state.groups, draw) : [],
    data.agents.length > 1 ? choices("Agents", data.agents, state.agents, draw) : [],
    data.roles.length > 1 ? choices("Roles", data.roles, state.roles, draw) : [],
    checkbox(`Running mean over ${SMOOTHING} iterations`, state.smooth, (on) => { state.smooth = on; draw(); }),
    element("details", { className: "choose" }, element("summary", {}, "Metrics"),
      choices("Shown", titles, state.metrics, draw)),
  );
  const several = new Set(data.runs.map((run) => run.group)).size < data.runs.length;
  const notes = [
    several ? "Bands: one standard deviation over seeds." : "",
    "Drag over a chart to zoom, double-click to see all.",
    data.every > 1 ? `A point is the mean over ${data.every} iterations.` : "",
    data.flags.length ? "Marks on the time axis are flags." : "",
  ];
  place.append(
    controls, charts,
    element("div", { className: "at" }, element("label", { htmlFor: "iteration" }, "Iteration"), slider, output, flagsHere),
    element("p", { className: "note" }, notes.filter(Boolean).join(" ")),
    data.flags.length ? flagTable(data) : [],
  );
  new ResizeObserver(() => { for (const chart of drawn) chart.resize(); }).observe(charts);
  return draw;
}

/** The lines of a metric: `x`, and for each line its label, style, number of runs, and its mean and spread over them. */
function linesOf(data, state, metric) {
  const lines = new Map();
  const agentsOf = data.groups.map((_, group) =>
    new Set(data.points.flatMap((points, run) => (data.runs[run].group === group ? points.agent : []))).size);
  data.points.forEach((points, run) => {
    const { group, name } = data.runs[run];
    if (!state.groups.has(group)) return;
    points.values[metric].forEach((value, i) => {
      const agent = points.agent[i], role = points.role[i];
      if (value === null || !state.agents.has(agent) || !state.roles.has(role)) return;
      const kinds = {
        agent: [agent, agentsOf[group] > 1 ? ` ${data.agents[agent]}` : ""],
        role: [role, ` ${data.roles[role]}`], method: [0, ""], run: [run, ""],
      };
      const [part, suffix] = kinds[state.by];
      const key = `${group} ${part}`;
      if (!lines.has(key)) {
        const label = state.by === "run" ? name : data.groups[group].replace(/^[^,]*/, (kind) => kind + suffix);
        lines.set(key, { label, group, part, runs: new Map() });
      }
      const runs = lines.get(key).runs;
      if (!runs.has(run)) runs.set(run, new Map());
      const values = runs.get(run), k = points.iteration[i];
      const [sum, count] = values.get(k) ?? [0, 0];
      values.set(k, [sum + value, count + 1]);
    });
  });
  const ordered = [...lines.values()].sort((a, b) => a.group - b.group || a.part - b.part);
  const x = [...new Set(ordered.flatMap((line) => [...line.runs.values()].flatMap((run) => [...run.keys()])))];
  x.sort((a, b) => a - b);
  const width = state.smooth ? Math.max(1, Math.round(SMOOTHING / data.every)) : 1;
  const alone = new Set(ordered.map((line) => line.group)).size === 1;
  for (const line of ordered) {
    const place = ordered.filter((other) => other.group === line.group).indexOf(line);
    line.colour = (alone ? place : line.group) % COLOURS;
    line.dash = DASHES[place % DASHES.length];
    const series = [...line.runs.values()].map((run) => smoothed(x, run, width));
    line.mean = x.map((_, i) => mean(series.map((values) => values[i])));
    line.spread = x.map((_, i) => deviation(series.map((values) => values[i])));
    line.count = series.length;
  }
  return { x, lines: ordered };
}

/** A run's values at the iterations `x`, each the mean of itself and the `width - 1` before it; null where it has none. */
function smoothed(x, run, width) {
  const seen = [];
  return x.map((k) => {
    if (!run.has(k)) return null;
    const [sum, count] = run.get(k);
    seen.push(sum / count);
    return mean(seen.slice(-width));
  });
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function deviation(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const centre = mean(known);
  return Math.sqrt(known.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (known.length - 1));
}

/** Draws one chart into `charts`. */
function drawChart(data, state, metric, charts, showAt, redraw) {
  const { x, lines } = linesOf(data, state, metric);
  const title = data.metrics[metric];
  const known = lines.flatMap((line) => line.mean.filter((value) => value !== null));
  const allowed = Math.max(...known) > 0 && Math.min(...known) >= -0.01 * Math.max(...known); // a KL of 0 may come out below
  const log = state.log.has(metric) && allowed;
  const positive = (value) => (value === null || (log && value <= 0) ? null : value);
  const smallest = Math.min(...lines.flatMap((line) => line.mean.filter((value) => value > 0)));
  const columns = [x], series = [{}], bands = [];
  for (const line of lines) {
    const stroke = colour(`--c${line.colour}`);
    const spread = (sign) => line.mean.map((value, i) => {
      if (line.spread[i] === null || value === null) return null;
      return log ? Math.max(value + sign * line.spread[i], smallest / 2) : value + sign * line.spread[i];
    });
    columns.push(line.mean.map(positive), spread(1), spread(-1));
    series.push({ stroke, width: 2, dash: line.dash, spanGaps: sparse(data, metric), points: { show: x.length < 2 } });
    series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
    bands.push({ series: [series.length - 2, series.length - 1], fill: stroke.replace(/rgb\((.*)\)/, "rgba($1, 0.16)") });
  }

  const plot = element("div", { className: "plot", role: "img" });
  const legend = element("ul", { className: "legend" });
  const values = lines.map((line) => {
    const value = element("span", { className: "value" });
    const name = line.label + (line.count > 1 ? ` (n = ${line.count})` : "");
    legend.append(element("li", {}, swatch(line), element("span", { className: "name" }, readable(name)), value));
    return value;
  });
  const logarithmic = checkbox("log", log, (on) => {
    if (on) state.log.add(metric);
    else state.log.delete(metric);
    redraw();
    const again = [...charts.querySelectorAll("figure")].find((figure) => figure.dataset.metric === metric);
    again.querySelector("input").focus();
  });
  logarithmic.firstChild.disabled = !allowed;
  logarithmic.title = allowed ? "" : "Values must be positive";
  logarithmic.firstChild.setAttribute("aria-label", `Logarithmic scale, ${title}`);
  const figure = element("figure", {}, element("figcaption", {}, element("span", {}, readable(title)), logarithmic),
    plot, legend, valueTable(x, lines, title));
  figure.dataset.metric = metric;
  charts.append(figure);
  const ends = lines.map((line) => {
    const known = line.mean.filter((value) => value !== null);
    return `${line.label} from ${number(known[0], 3)} to ${number(known.at(-1), 3)}`;
  });
  plot.setAttribute("aria-label", `${title} over ${x.length} iterations: ${ends.join("; ")}`);

  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const chart = new uPlot({
    width: Math.max(plot.clientWidth, 200), height: 220, legend: { show: false },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...axis, size: 32 }, { ...axis, size: 52 }],
    series, bands,
    cursor: { y: false, drag: { x: true, y: false }, sync: { key: "curves" } },
    hooks: {
      draw: [(self) => drawFlags(self, data, state)],
      setCursor: [(self) => { if (self.cursor.event && self.cursor.idx !== null && self.cursor.left >= 0) showAt(x[self.cursor.idx]); }],
    },
  }, columns, plot);

  return {
    destroy: () => chart.destroy(),
    resize: () => { if (Math.abs(chart.width - plot.clientWidth) > 1) chart.setSize({ width: Math.max(plot.clientWidth, 200), height: 220 }); },
    showAt(iteration) {
      const index = nearest(x, iteration);
      lines.forEach((line, i) => {
        const spread = line.spread[index] ?? null;
        values[i].textContent = number(line.mean[index], 3) + (spread === null ? "" : ` ± ${number(spread, 3)}`);
      });
    },
  };
}

/** Whether a metric is missing in some of the rows, as one that is measured every few iterations. */
function sparse(data, metric) {
  return data.points.some((points) => points.values[metric].includes(null));
}

function nearest(x, iteration) {
  return x.reduce((best, k, i) => (Math.abs(k - iteration) < Math.abs(x[best] - iteration) ? i : best), 0);
}

/** A colour of the style sheet as rgb, in the present theme. */
function colour(name) {
  const probe = element("span", {});
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A piece of the line as it is drawn. */
function swatch(line) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const set = (node, attributes) => Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
  set(svg, { width: 28, height: 8, "aria-hidden": true });
  set(stroke, { x1: 0, y1: 4, x2: 28, y2: 4, "stroke-width": 2, "stroke-dasharray": line.dash.join(" "), class: `c${line.colour}` });
  svg.append(stroke);
  return svg;
}

/** Whether the run and the agent of a flag are shown. */
function isShown(flag, data, state) {
  return state.groups.has(data.runs[flag.run].group) && state.agents.has(data.agents.indexOf(flag.agent));
}

/** Marks at the iterations with flags of the runs and agents that are shown. */
function drawFlags(self, data, state) {
  const marked = new Set();
  for (const flag of data.flags.filter((flag) => isShown(flag, data, state))) {
    for (const k of flag.iterations) marked.add(k);
  }
  const { left, top, width, height } = self.bbox, size = 5 * devicePixelRatio;
  self.ctx.save();
  self.ctx.fillStyle = colour("--warn");
  for (const k of marked) {
    const at = self.valToPos(k, "x", true);
    if (at < left || at > left + width) continue;
    self.ctx.beginPath();
    self.ctx.moveTo(at, top + height - size * 1.6);
    self.ctx.lineTo(at - size, top + height);
    self.ctx.lineTo(at + size, top + height);
    self.ctx.fill();
  }
  self.ctx.restore();
}

/** The values of a chart as a table, made when it is opened. */
function valueTable(x, lines, title) {
  const details = element("details", { className: "values" }, element("summary", {}, "Values"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const step = Math.max(1, Math.ceil(x.length / 20));
    const rows = x.map((k, i) => [k, i]).filter(([, i]) => i % step === 0 || i === x.length - 1);
    const cells = (i) => lines.map((line) => element("td", {},
      number(line.mean[i], 3) + (line.spread[i] === null ? "" : ` ± ${number(line.spread[i], 3)}`)));
    const head = ["iteration", ...lines.map((line) => line.label)].map((text) => element("th", { scope: "col" }, readable(text)));
    details.append(element("div", { className: "scroll", role: "region", "aria-label": `Values: ${title}`, tabIndex: 0 },
      element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {},
        rows.map(([k, i]) => element("tr", {}, element("th", { scope: "row" }, String(k)), cells(i)))))));
  });
  return details;
}

/** The flags by run, agent and kind, with their iterations as ranges. */
function flagTable(data) {
  const rows = data.flags.map((flag) => element("tr", {},
    element("th", { scope: "row" }, flag.flag), element("td", {}, readable(`${data.runs[flag.run].name} ${flag.agent}`)),
    element("td", {}, ranges(flag.iterations)), element("td", {}, readable(flag.meaning))));
  const head = ["flag", "run", "iterations", "meaning"].map((text) => element("th", { scope: "col" }, text));
  return element("div", {}, element("h3", {}, "Flags"),
    element("div", { className: "scroll", role: "region", "aria-label": "Flags", tabIndex: 0 },
      element("table", { className: "text" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows))));
}

function ranges(iterations, most = 12) {
  const found = [];
  for (const k of iterations) {
    if (found.length && k <= found.at(-1)[1] + 1) found.at(-1)[1] = k;
    else found.push([k, k]);
  }
  const texts = found.slice(0, most).map(([from, to]) => (from === to ? `${from}` : `${from} to ${to}`));
  return texts.join(", ") + (found.length > most ? `, … (${iterations.length} in all)` : "");
}
