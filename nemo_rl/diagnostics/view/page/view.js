/** The page of `nemo-rl view`: a table of runs, their curves over each other, and the settings in which they differ. */
"use strict";

const runs = window.nemoRlRuns;
/** Colours that people with any colour vision tell apart (Okabe and Ito); dashes tell more than seven runs apart. */
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const VIEWS = [
  ["Reward", /^(train\/reward|val\/(accuracy|reward|pass@1)$)/],
  ["Loss", /^train\/(.*loss|grad_norm|policy_kl|kl|approx_entropy|clip|lr)/],
  ["Mismatch", /(mismatch|gen_kl|probs_ratio|logprob_error|log_ratio)/],
  ["Staleness", /(staleness|weight_lag|off_policy|versions|queue)/],
  ["Time", /^timing\//],
  ["Engines", /^rollout\/(engine|tokens_per_s|mean_response|truncated)/],
  ["Data plane", /^data_plane\//],
  ["All", /./],
];
const FIRST_CHARTS = 24;
const COLUMNS = [
  ["steps", (run) => run.steps],
  ["reward", (run) => newest(run, "train/reward")],
  ["validation", (run) => newest(run, "val/accuracy")],
  ["loss", (run) => newest(run, "train/loss")],
  ["step s", (run) => newest(run, "timing/step_s")],
  ["tokens/s", (run) => newest(run, "rollout/tokens_per_s")],
];
const state = { shown: new Set(), view: VIEWS[0][0], find: "", all: false };
let plots = [];

function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const newest = (run, metric) => run.curves[metric]?.[1].at(-1);
const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const digits = (value) => (Number.isFinite(value) ? few.format(value) : "");
const color = (i) => COLORS[i % COLORS.length];
const dash = (i) => DASHES[Math.floor(i / COLORS.length) % DASHES.length];
const byId = (id) => document.getElementById(id);

/** A short line as the run's curves have it. */
function swatch(i) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ width: 34, height: 8, "aria-hidden": true })) svg.setAttribute(name, value);
  const look = { x1: 0, x2: 34, y1: 4, y2: 4, stroke: color(i), "stroke-width": 3, "stroke-dasharray": dash(i).join(" ") };
  for (const [name, value] of Object.entries(look)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

function showRuns() {
  const head = ["", "", "run", ...COLUMNS.map(([title]) => title)];
  const rows = runs.map((run, i) => {
    const box = h("input", {
      type: "checkbox", checked: state.shown.has(i), "aria-label": `show ${run.name}`,
      onchange: () => { state.shown[box.checked ? "add" : "delete"](i); show(); },
    });
    const name = run.hasRollouts ? h("a", { href: `rollouts-${i}.html`, title: "its newest rollouts" }, run.name) : run.name;
    const cells = COLUMNS.map(([, value]) => h("td", { className: "number" }, digits(value(run))));
    return h("tr", {}, h("td", {}, box), h("td", {}, swatch(i)), h("td", {}, name), ...cells);
  });
  byId("runs").replaceChildren(
    h("thead", {}, h("tr", {}, ...head.map((text, i) => h("th", { scope: "col", className: i > 2 ? "number" : "" }, text)))),
    h("tbody", {}, ...rows),
  );
}

function showViews() {
  byId("views").replaceChildren(...VIEWS.map(([name], i) => h("button", {
    type: "button", title: `key ${i + 1}`, "aria-pressed": name === state.view,
    onclick: () => { state.view = name; state.all = false; show(); },
  }, name)));
}

/** Metrics of the view, or those that contain what was typed, that a shown run has. */
function metrics() {
  const there = new Set([...state.shown].flatMap((i) => Object.keys(runs[i].curves)));
  const wanted = state.find.toLowerCase(), [, pattern] = VIEWS.find(([name]) => name === state.view);
  return [...there].filter((name) => (wanted ? name.toLowerCase().includes(wanted) : pattern.test(name))).sort();
}

function showCharts() {
  for (const plot of plots) plot.destroy();
  plots = [];
  const found = metrics(), some = state.all ? found : found.slice(0, FIRST_CHARTS);
  const figures = some.map((metric) => h("figure", { className: "chart" }, h("figcaption", {}, metric)));
  const more = h("button", { type: "button", onclick: () => { state.all = true; show(); } }, `show ${found.length - some.length} more`);
  const nothing = state.shown.size ? "no metric of these runs is in this view" : "choose a run";
  byId("charts").replaceChildren(...figures, ...(found.length > some.length ? [more] : []), ...(found.length ? [] : [h("p", {}, nothing)]));
  some.forEach((metric, at) => draw(figures[at], metric));
}

function draw(figure, metric) {
  const having = [...state.shown].filter((i) => runs[i].curves[metric]).sort((a, b) => a - b);
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
  const series = having.map((i) => ({
    label: runs[i].name, stroke: color(i), width: 2, dash: dash(i), spanGaps: true,
    points: { show: runs[i].curves[metric][0].length < 2 },
  }));
  const options = {
    width: Math.max(figure.clientWidth - 18, 120), height: 190, series: [{ label: "step" }, ...series],
    scales: { x: { time: false } }, axes: [axis, { ...axis, size: 60, values: (_, ticks) => ticks.map(digits) }],
    legend: { show: false }, cursor: { sync: { key: "step" } },
  };
  plots.push(new uPlot(options, uPlot.join(having.map((i) => runs[i].curves[metric])), figure));
  const rows = having.map((i) => {
    const [steps, values] = runs[i].curves[metric];
    const known = values.filter((value) => value !== null);
    const cells = [steps.at(-1), values.at(-1), Math.min(...known), Math.max(...known)];
    return h("tr", {}, h("td", {}, swatch(i), " ", runs[i].name), ...cells.map((value) => h("td", { className: "number" }, digits(value))));
  });
  const head = ["run", "step", "newest", "least", "most"].map((text) => h("th", { scope: "col" }, text));
  figure.append(h("details", {}, h("summary", {}, "values"), h("div", { className: "wide" }, h("table", {}, h("tr", {}, ...head), ...rows))));
}

function showSettings() {
  const chosen = [...state.shown].sort((a, b) => a - b);
  const keys = [...new Set(chosen.flatMap((i) => Object.keys(runs[i].settings)))].sort();
  const other = keys.filter((key) => new Set(chosen.map((i) => runs[i].settings[key])).size > 1);
  const rows = other.map((key) => h("tr", {}, h("th", { scope: "row" }, key), ...chosen.map((i) => h("td", {}, runs[i].settings[key] ?? "not set"))));
  const head = h("tr", {}, h("th", {}, "key"), ...chosen.map((i) => h("th", { scope: "col" }, swatch(i), " ", runs[i].name)));
  const nothing = chosen.length < 2 ? "choose two runs or more" : "none";
  byId("settings").replaceChildren(other.length ? h("table", {}, head, ...rows) : h("p", {}, nothing));
}

function show() {
  const parts = { runs: [...state.shown].join(","), view: state.view, find: state.find };
  history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
  showViews();
  showCharts();
  showSettings();
}

function start() {
  const given = new URLSearchParams(location.hash.slice(1));
  const asked = (given.get("runs") ?? "").split(",").filter((text) => text !== "").map(Number).filter((i) => runs[i]);
  state.shown = new Set(asked.length ? asked : runs.keys());
  if (VIEWS.some(([name]) => name === given.get("view"))) state.view = given.get("view");
  byId("find").value = state.find = given.get("find") ?? "";
  byId("find").addEventListener("input", () => { state.find = byId("find").value; state.all = false; show(); });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input[type=search]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const view = VIEWS[Number(event.key) - 1];
    if (event.key === "/") { event.preventDefault(); byId("find").focus(); }
    else if (view) { state.view = view[0]; state.all = false; show(); }
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; showCharts(); } });
  showRuns();
  show();
}

start();
