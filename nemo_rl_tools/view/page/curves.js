/** All runs: their table, the curves of those that are chosen, and the settings in which these differ. */
"use strict";

/** What is looked at first, in this order: a name, and the metrics that it is read from. */
const LEARNED = [
  ["Reward", /^train\/reward$/],
  ["Validation", /^val\/(accuracy|reward|pass@1)$/],
  ["Response length", /^rollout\/mean_response_tokens$/],
  ["KL", /^train\/(policy_kl|reference_kl)$/],
  ["Entropy", /^train\/approx_entropy$/],
  ["Gradient norm", /^train\/grad_norm$/],
];
const REST = [/^train\/(reward\/|source\/[^/]+\/reward$)/, /^val\//, /^train\/loss$/, /^train\//, /^rollout\//, /./];
const VIEWS = [
  ["Learning", new RegExp([...LEARNED.map(([, pattern]) => pattern), REST[0]].map(({ source }) => source).join("|"))],
  ["Loss", /^train\/(loss|.*_loss|grad_norm|policy_kl|reference_kl|kl_penalty|approx_entropy|clip|learning_rate|probs_ratio)/],
  ["Mismatch", new RegExp("(mismatch|gen_kl|js_divergence|gen_probs_ratio|token_mult_prob|logprob_error|"
    + "sampling_importance|^r3/(k3|f128|f2|max_ratio)_)")],
  ["Staleness", /(staleness|^async\/|^rollout\/groups_)/],
  ["Routes", /^(r3\/|rollout\/routes_)/],
  ["Time", /^timing\//],
  ["Engines", /^rollout\/(engine|tokens_per_s|mean_response|truncated)/],
  ["Data plane", /^data_plane\//],
  ["All", /./],
  ["Curriculum", /^rollout\/curriculum\//],
];
const MISMATCH = "train/token_mult_prob_error";
const FIRST_CHARTS = 24;
const MOST_CHOSEN = 8;

/** Details of the runs that have been read, by id. */
const details = new Map();

const reading = new Map();

function read(id) {
  if (!reading.has(id)) reading.set(id, load(`run-${id}.js`).then((found) => { details.set(id, found); return found; }));
  return reading.get(id);
}

const chosen = () => [...runs.keys()].filter((i) => state.shown.has(runs[i].id));

/** The curve of a metric: steps and values; undefined where the run has none. */
function curve(id, metric) {
  const run = details.get(id), found = run?.curves?.[metric];
  return found && { steps: run.axes[found[0]], values: found[1] };
}

/** Place of a metric in a list: what is learned comes first. */
function rank(name) {
  return [...LEARNED.map(([, pattern]) => pattern), ...REST].findIndex((pattern) => pattern.test(name));
}

/** Without the other names of one measure: of 0 and 1 the mean reward is the accuracy, and pass@1. */
function measures(names) {
  const one = ["val/accuracy", "val/reward", "val/pass@1"].find((name) => names.includes(name));
  return names.filter((name) => name === one || !LEARNED[1][1].test(name));
}

/** The places of a curve on the axis that is chosen; undefined where the run has no times. */
function places(id, steps) {
  if (state.axis !== "wall") return steps;
  const { axes, wall } = details.get(id);
  if (!wall?.[1].at(-1)) return undefined;
  const known = axes[wall[0]];
  let i = 0;
  return steps.map((step) => {
    while (i + 1 < known.length && known[i + 1] <= step) i += 1;
    return wall[1][i];
  });
}

/** Lines of curves on the axis that is chosen, each with `id`, `steps` and `values`. */
function plotCurves(figure, lines) {
  const placed = lines.map((line) => ({ ...line, at: places(line.id, line.steps) })).filter(({ at }) => at);
  if (!placed.length) return figure.append(p("this run has no times"));
  return plotLines(figure, placed, { smooth: state.smooth, isWall: state.axis === "wall" });
}

/** The state of a run, with its cause where it failed or stopped. */
function stateOf({ outcome }) {
  if (!outcome) return [];
  const { state: name, cause } = outcome;
  const badge = h("span", { className: `state ${name}` }, name);
  return cause ? [badge, h("div", { className: "cause", title: cause }, cause)] : [badge];
}

const stepsOf = ({ steps, mostSteps }) => (mostSteps ? `${steps} of ${mostSteps}` : `${steps}`);

/** The last part of a model's name: a folder can lie deep. */
const modelOf = ({ model }) => model.split("/").filter(Boolean).at(-1) ?? "";

function showRuns() {
  const rows = runs.map((run, i) => {
    const box = h("input", {
      type: "checkbox", checked: state.shown.has(run.id), "aria-label": `show ${run.name}`,
      onchange: () => { state.shown[box.checked ? "add" : "delete"](run.id); showAll(); },
    });
    const page = `rollouts-${run.id}-${run.rollouts}.html`;
    const rollouts = run.rollouts === null ? "" : h("a", { href: page }, `step ${run.rollouts}`);
    const name = h("a", { className: "run", title: "look at this run" }, run.name);
    const { outcome } = run, model = h("span", { title: run.model }, modelOf(run));
    const about = [stateOf(run), outcome ? date(outcome.started) : "", outcome ? seconds(outcome.seconds) : "", model];
    return [box, swatch(look(i)), name, ...about, stepsOf(run), ...run.numbers.map((value) => value ?? undefined), rollouts];
  });
  byId("runs").replaceChildren(...table(["", "", "run", "state", "started", "duration", "model", "steps", ...data.columns, "rollouts"], rows).firstChild.childNodes);
}

/** Metrics of the view, or those that contain what was typed, that a chosen run has. */
function metrics() {
  const there = new Set([...state.shown].flatMap((id) => Object.keys(details.get(id)?.curves ?? {})));
  const wanted = state.find.toLowerCase(), [, pattern] = VIEWS.find(([name]) => name === state.view);
  const found = [...there].filter((name) => (wanted ? name.toLowerCase().includes(wanted) : pattern.test(name))).sort();
  const shown = state.view === VIEWS[0][0] && !wanted ? measures(found) : found;
  return shown.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

function showCharts() {
  clearPlots();
  const found = metrics(), some = state.all ? found : found.slice(0, FIRST_CHARTS);
  const figures = some.map((metric) => h("figure", { className: "chart" }, h("figcaption", {}, metric), h("span", { className: "at" })));
  const showMore = () => { state.all = true; showCharts(); };
  const more = h("button", { type: "button", onclick: showMore }, `show ${found.length - some.length} more`);
  const texts = chosen().map((i) => details.get(runs[i].id)?.problem).filter(Boolean);
  const missing = chosen().filter((i) => !details.has(runs[i].id)).length;
  if (missing) texts.push(`reading ${missing} runs`);
  else if (!state.shown.size) texts.push("choose a run");
  else if (!found.length && !texts.length) texts.push("no metric of these runs is in this view");
  const isCut = found.length > some.length;
  byId("charts").replaceChildren(...texts.map((text) => p(text)), ...figures, ...(isCut ? [more] : []));
  some.forEach((metric, at) => draw(figures[at], metric));
}

function draw(figure, metric) {
  const lines = chosen().flatMap((i) => {
    const found = curve(runs[i].id, metric);
    return found ? [{ id: runs[i].id, label: runs[i].name, ...look(i), ...found }] : [];
  });
  plotCurves(figure, lines);
  const rows = lines.map((line) => {
    const known = line.values.filter((value) => value !== null);
    return [[swatch(line), " ", line.label], line.steps.at(-1), known.at(-1), Math.min(...known), Math.max(...known)];
  });
  figure.append(h("details", {}, h("summary", {}, "values"), table(["run", "step", "newest", "least", "most"], rows)));
}

/** Which command explains the curves of the view. */
function showNote() {
  const about = state.view !== "Mismatch" || state.find ? [] : chosen().filter((i) => details.get(runs[i].id)?.curves);
  const keeping = about.filter((i) => details.get(runs[i].id).kept.length);
  const others = about.filter((i) => !keeping.includes(i));
  const lines = keeping.map((i) => h("div", {}, swatch(look(i)), " ", ...explained(runs[i])));
  if (others.length) {
    const names = others.map((i) => runs[i].name).join(", "), setting = h("code", {}, "diagnostics.keep_steps.enabled=true");
    lines.push(p(`No steps are kept by ${names}; run with `, setting, " to find the causes."));
  }
  byId("note").replaceChildren(...(lines.length ? [h("h2", {}, "Why rollout and trainer differ"), ...lines] : []));
}

/** The command that explains the mismatch of a run, at the worst of the steps that it keeps. */
function explained(run) {
  const { kept, command: folder } = details.get(run.id), found = curve(run.id, MISMATCH);
  const value = (step) => found?.values[found.steps.indexOf(step)] ?? -Infinity;
  const worst = kept.reduce((best, step) => (value(step) >= value(best) ? step : best), kept[0]);
  return [`${run.name}, worst of its ${kept.length} kept steps: `, command(`nemo-rl inspect ${folder} step ${worst} mismatch`)];
}

function showSettings() {
  const of = chosen().map((i) => runs[i]);
  const keys = [...new Set(of.flatMap((run) => Object.keys(run.settings)))].sort();
  const other = keys.filter((key) => new Set(of.map((run) => run.settings[key])).size > 1);
  const names = chosen().map((i) => h("th", { scope: "col" }, swatch(look(i)), " ", runs[i].name));
  const head = h("tr", {}, h("th", {}, "key"), ...names);
  const values = (key) => of.map((run) => h("td", {}, run.settings[key] ?? "not set"));
  const rows = other.map((key) => h("tr", {}, h("th", { scope: "row" }, key), ...values(key)));
  const nothing = of.length < 2 ? "choose two runs or more" : "none";
  const shown = other.length ? h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)) : p(nothing);
  byId("settings").replaceChildren(shown);
}

function showAll() {
  keepAddress();
  document.querySelectorAll("#runs a.run").forEach((link, i) => { link.href = address({ run: runs[i].id }); });
  byId("views").replaceChildren(...VIEWS.map(([name], i) => h("button", {
    type: "button", title: i < 9 ? `key ${i + 1}` : "", "aria-pressed": name === state.view,
    onclick: () => { state.view = name; state.all = false; showAll(); },
  }, name)));
  showNote();
  showCharts();
  showSettings();
  for (const id of state.shown) if (!details.has(id)) read(id).then(() => { if (!state.run) { showNote(); showCharts(); } });
}
