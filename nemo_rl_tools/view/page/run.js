/** One run: what it has learned, where its time goes, rollouts of any step, the life of a row, its routes, its tracer. */
"use strict";

const PARTS = [
  ["learning", showLearning],
  ["time", showTime],
  ["rollouts", showRollouts],
  ["rows", showRows],
  ["routes", showRoutes],
  ["tracer", showTracer],
];
/** Stages that have their own colour; the others are summed up. */
const COLORED = 6;
const OTHER = { color: "#8a8f98", dash: [1, 2] };
/** Steps of rollouts that have a link. */
const MOST_LINKS = 60;
const ROUTE_METRICS = [
  "rollout/routes_missing_share", "r3/prev_logprobs_live_routes_differ", "r3/train_live_routes_differ",
  "r3/k3_r3", "r3/k3_free", "r3/max_ratio_r3",
];

async function showRun() {
  const run = runs.find(({ id }) => id === state.run);
  byId("views").replaceChildren(...PARTS.map(([name], i) => h("a", {
    href: address({ part: name }), className: "button", title: `key ${i + 1}`,
    "aria-current": name === state.part ? "page" : "false",
  }, name)));
  const alone = (view) => h("a", { href: address({ run: "", runs: run.id, view, find: "" }) }, view);
  const when = ({ started, seconds: took }) => [`started ${date(started)}`, `took ${seconds(took)}`];
  const about = [
    ...stateOf(run), ...(run.outcome ? when(run.outcome) : []),
    `steps ${stepsOf(run)}`, run.model ? h("span", { title: run.model }, `model ${modelOf(run)}`) : "",
  ].filter(Boolean);
  const above = h("div", { className: "about" }, ...about.map((each) => (typeof each === "string" ? h("span", {}, each) : each)));
  const links = p(h("a", { href: address({ run: "" }) }, "all runs"), "; all curves of this one:");
  links.append(...VIEWS.flatMap(([view]) => [" ", alone(view)]));
  above.append(links);
  const body = h("section", { "aria-label": state.part }, p(`reading ${run.name}`));
  byId("one").replaceChildren(above, body);
  clearPlots();
  const found = await read(run.id);
  if (!body.isConnected) return;
  body.replaceChildren();
  if (found.problem) body.append(problem(found.problem));
  else PARTS.find(([name]) => name === state.part)[1](body, run, found);
}

const heading = (text) => h("h2", {}, text);
const problem = (text) => h("p", { className: "problem" }, text);

/** Metrics that a pattern names, by what it captures, as `label`, `steps` and `values`. */
function named(run, pattern) {
  const names = Object.keys(details.get(run.id).curves).map((name) => name.match(pattern)).filter(Boolean);
  return names.map((match) => ({ label: match[1], ...curve(run.id, match[0]) }));
}

/** The curves that are looked at first, each with its values at the start and at the end. */
function showLearning(body, run, { rollouts, curves }) {
  body.append(heading("Learning"));
  const grid = h("div", { className: "grid" }), names = measures(Object.keys(curves));
  const newest = rollouts.length && h("a", { href: `rollouts-${run.id}-${rollouts.at(-1)}.html` }, `rollouts of step ${rollouts.at(-1)}`);
  body.append(grid, ...(newest ? [p("what it writes: ", newest)] : []));
  const drawn = LEARNED.flatMap(([title, pattern]) => {
    const found = names.filter((name) => pattern.test(name));
    if (!found.length) return [];
    const lines = found.map((name, i) => ({ id: run.id, label: name, ...look(i), ...curve(run.id, name) }));
    const ends = lines.map((line) => {
      const known = line.values.filter((value) => value !== null);
      return h("span", { className: "ends" }, ...(lines.length > 1 ? [swatch(line), " "] : []), h("code", {}, line.label),
        ` ${digits(known[0])} \u2192 `, h("b", {}, digits(known.at(-1))));
    });
    const figure = h("figure", {}, h("figcaption", {}, title, h("span", { className: "at" })), ...ends);
    grid.append(figure);
    return [[figure, lines]];
  });
  if (!drawn.length) body.append(p("no step has ended yet"));
  for (const [figure, lines] of drawn) plotCurves(figure, lines);
}

/** Values of a curve at other steps: each counts for the last of these that it follows; 0 where there is none. */
function valuesAt(steps, found) {
  const values = steps.map(() => 0);
  let i = 0;
  found.steps.forEach((step, k) => {
    while (i + 1 < steps.length && steps[i + 1] <= step) i += 1;
    if (step >= steps[i]) values[i] = found.values[k] ?? 0;
  });
  return values;
}

function nearest(steps, wanted) {
  const isNearer = (step, other) => Math.abs(step - wanted) < Math.abs(other - wanted);
  return steps.reduce((best, step) => (isNearer(step, best) ? step : best), steps.at(-1));
}

function showTime(body, run) {
  body.append(heading("Time"));
  const whole = curve(run.id, "timing/step_s");
  const stages = named(run, /^timing\/(.+)_s$/).filter(({ label }) => label !== "step");
  const engines = named(run, /^rollout\/engine_(\d+)\/tokens_per_s$/);
  if (!whole || !stages.length) return body.append(p("this run has no metrics timing/..."));
  const { steps } = whole;
  const sized = stages.map((stage) => ({ label: stage.label, mean: mean(stage.values), values: valuesAt(steps, stage) }));
  sized.sort((a, b) => total(b.values) - total(a.values));
  const figure = h("figure", {}, h("figcaption", {}, "seconds of the stages, on top of each other; dashed: timing/step_s"));
  const input = h("input", { type: "number", min: steps[0], max: steps.at(-1), value: steps.at(-1) });
  const tables = h("div", {});
  const fill = () => {
    const step = nearest(steps, Number(input.value));
    tables.replaceChildren(...timeTables(step, { steps, sized, whole, engines }));
  };
  input.addEventListener("input", fill);
  const about = "Refit, validation and saving follow the update, so a bar can be higher than the dashed line of the step, "
    + "from its rollout to its update.";
  body.append(figure, p(about), h("label", {}, "step ", input, " (or click on a bar)"), tables);
  const drawn = plotStack(figure, steps, colored(sized), whole.values);
  drawn.over.addEventListener("click", () => {
    if (drawn.cursor.idx === null) return;
    input.value = steps[drawn.cursor.idx];
    fill();
  });
  fill();
  if (!engines.length) return;
  const speeds = h("figure", {}, h("figcaption", {}, "tokens/s of each engine"));
  body.append(speeds);
  plotLines(speeds, engines.map((engine, i) => ({ ...engine, ...look(i), at: engine.steps })));
}

/** The largest stages with their colours, and the others as one. */
function colored(sized) {
  const parts = sized.slice(0, COLORED).map((stage, i) => ({ ...stage, ...look(i) })), rest = sized.slice(COLORED);
  const sums = sized[0].values.map((_, i) => total(rest.map((stage) => stage.values[i])));
  return rest.length ? [...parts, { label: "others", ...OTHER, values: sums }] : parts;
}

/** Tables of one step: its stages in the order of the chart, from the foot, and its engines. */
function timeTables(step, { steps, sized, whole, engines }) {
  const i = steps.indexOf(step), sum = total(sized.map((stage) => stage.values[i])) || 1;
  const rows = sized.map((stage, k) => {
    const name = [swatch(k < COLORED ? look(k) : OTHER), " ", stage.label];
    return [name, stage.values[i], (100 * stage.values[i]) / sum, stage.mean];
  });
  rows.push(["step, rollout to update", whole.values[i], undefined, mean(whole.values)]);
  const tables = [h("h3", {}, `Step ${step}`), table(["stage", "seconds", "% of all", "mean where it ran"], rows)];
  if (!engines.length) return tables;
  const speeds = engines.map((engine, k) => (
    [[swatch(look(k)), ` engine ${engine.label}`], valuesAt(steps, engine)[i], mean(engine.values)]));
  return [...tables, h("h3", {}, `Engines in step ${step}`), table(["engine", "tokens/s", "mean"], speeds)];
}

function showRollouts(body, run, { rollouts, command: folder }) {
  body.append(heading("Rollouts"));
  if (!rollouts.length) {
    return body.append(p("this run has none: logger.num_rollouts_to_log is 0, or no step has ended"));
  }
  const there = data.isServed ? rollouts : rollouts.slice(-data.mostSteps);
  const page = (step) => `rollouts-${run.id}-${step}.html`;
  const input = h("input", { type: "number", min: there[0], max: there.at(-1), value: there.at(-1), required: true });
  const open = (event) => {
    event.preventDefault();
    location.href = page(nearest(there, Number(input.value)));
  };
  body.append(h("form", { onsubmit: open }, h("label", {}, "step ", input), " ", h("button", {}, "open")));
  if (there.length < rollouts.length) {
    const bound = `This page holds the newest ${there.length} of ${rollouts.length} steps with rollouts; the others: `;
    body.append(p(bound), command(`nemo-rl inspect ${folder} step N rollouts`));
  }
  const reward = curve(run.id, "train/reward");
  const rewardAt = (step) => {
    const value = reward?.values[reward.steps.indexOf(step)];
    return Number.isFinite(value) ? ` reward ${digits(value)}` : "";
  };
  const newest = there.slice(-MOST_LINKS).reverse();
  const links = newest.map((step) => h("li", {}, h("a", { href: page(step) }, `step ${step}`), rewardAt(step)));
  body.append(h("ul", { className: "steps" }, ...links));
  if (newest.length < there.length) body.append(p(`and ${there.length - newest.length} older ones, by the number above`));
}

function showRows(body, run, { hasEvents, command: folder }) {
  body.append(heading("Life of a row"));
  if (!hasEvents) {
    return body.append(p("this run has no events of the data plane: data_plane.observability.event_log=true writes them"));
  }
  const input = h("input", { type: "text", value: state.key, size: 24, autocomplete: "off", spellcheck: false, required: true });
  const told = h("div", { "aria-live": "polite" });
  const ask = async () => {
    const key = input.value.trim();
    if (!key) return;
    state.key = key;
    keepAddress();
    told.replaceChildren(p(`reading the events of ${key}`));
    const life = await lifeOf(run, key);
    if (state.key !== key) return;
    told.replaceChildren(...(life.problem ? [problem(life.problem)] : lifeTable(life)));
    if (life.problem) told.append(command(`nemo-rl inspect ${folder} row ${/^[\w.-]+$/.test(key) ? key : "KEY"}`));
  };
  const send = (event) => { event.preventDefault(); ask(); };
  const rollouts = h("a", { href: address({ part: "rollouts" }) }, "rollouts");
  body.append(
    h("form", { onsubmit: send }, h("label", {}, "key ", input), " ", h("button", {}, "show")),
    p("A key is the name of a row in the ", rollouts, ", such as 143ea54b4498_g0; there it leads here."), told,
  );
  ask();
}

async function lifeOf(run, key) {
  if (data.isServed) return load(`row-${run.id}.js?key=${encodeURIComponent(key)}`);
  const lives = await load(`rows-${run.id}.js`);
  const bound = `This page holds the rows of the newest ${data.mostSteps} steps with rollouts alone, and ${key} is none.`;
  return lives.problem ? lives : lives[key] ?? { problem: bound };
}

function lifeTable({ key, partition, outcome, moments, leftOut }) {
  const first = moments[0][0], span = moments.at(-1)[0] - first || 1, day = moments[0][1].slice(0, 10);
  const rows = moments.map(([seconds, clock, name, text]) => {
    const mark = h("i", {}), when = h("div", { className: "moment", "aria-hidden": true }, mark);
    mark.style.left = `${(100 * (seconds - first)) / span}%`;
    const time = clock.startsWith(day) ? clock.slice(11) : clock;
    return [time, seconds - first, h("b", {}, name), when, h("div", { className: "text" }, text)];
  });
  const events = table(["time", "seconds", "event", "when", "by whom, and why"], rows);
  events.classList.add("life");
  const more = leftOut ? [p(`${leftOut} events in between are left out.`)] : [];
  return [p(h("b", {}, key), ` of partition ${partition}, made on ${day}: `, h("b", {}, outcome)), events, ...more];
}

function showRoutes(body, run, { traces }) {
  body.append(heading("Routes"));
  const found = ROUTE_METRICS.map((metric) => [metric, curve(run.id, metric)]).filter(([, values]) => values);
  if (found.length) {
    const rows = found.map(([metric, { values }]) => [metric, values.at(-1) ?? undefined, mean(values)]);
    const curves = h("a", { href: address({ run: "", runs: run.id, view: "Routes" }) }, "curves of all metrics of routes");
    body.append(table(["metric", "newest", "mean of all steps"], rows), p(curves));
  } else {
    body.append(p("no metrics of routes: policy.router_replay.enabled is false, or the model has no experts"));
  }
  if (!traces.length) {
    body.append(p("no trace of routes lies below this folder: NRL_R3_TRACE=1 and NRL_R3_TRACE_DIR write one"));
  }
  body.append(...traces.map(checkOf));
}

function checkOf({ id, name, isOwn, command: folder }) {
  const told = h("div", { "aria-live": "polite" });
  const check = async () => {
    told.replaceChildren(p("checking every hop"));
    const found = await load(`trace-${id}.js`);
    if (found.problem) return told.replaceChildren(problem(found.problem));
    const verdict = h("b", { className: found.verdict === "PASS" ? "verdict good" : "verdict" }, found.verdict);
    told.replaceChildren(p(verdict), h("pre", { tabIndex: 0 }, found.lines.join("\n")));
  };
  const button = data.isServed ? [h("button", { type: "button", onclick: check }, `check ${name}`)] : [];
  const title = h("h3", {}, `Trace ${name}`, isOwn ? "" : ", outside the folder of this run");
  return h("div", {}, title, ...button, command(`nemo-rl inspect ${folder} routes`), told);
}

function showTracer(body, run, { tracer, command: folder }) {
  body.append(heading("Tracer"));
  if (!tracer) {
    return body.append(p("nothing was traced: diagnostics.tracer.enabled=true records what the page of the tracer shows"));
  }
  const isOn = tracer.state === "running";
  if (data.isServed) {
    const how = { href: `tracer-${run.id}`, target: "_blank", rel: "noopener", className: "button" };
    body.append(p(h("a", how, "open the tracer"), isOn ? " of the run, which is on" : " with the recording of the run"));
  }
  const where = isOn ? `The run is on, or was killed; its address is in ${tracer.file}` : `Recorded in ${tracer.file}`;
  body.append(p(where), command(`nemo-rl inspect ${folder} ${isOn ? "tracer" : "play"}`));
}
