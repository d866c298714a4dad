/** The page of `nemo-rl view`: what is looked at, as the address keeps it, and the keys. */
"use strict";

const data = window.nemoRlFiles["data.js"], runs = data.runs;
const state = {};
/** Weight of what came before, in a smoothed curve, until somebody chooses another. */
const SMOOTH = 0.6;

/** The address of the page with some of what it keeps changed. */
function address(changes = {}) {
  const { shown, view, find, run, part, axis, smooth } = state;
  const kept = { runs: [...shown].join(","), view, find, run, part, axis, ...changes };
  if (smooth !== SMOOTH) kept.smooth = String(smooth);
  if (!kept.run) delete kept.part;
  else if (kept.part === "rows") kept.key = state.key;
  return `#${new URLSearchParams(Object.entries(kept).filter(([, value]) => value))}`;
}

const keepAddress = () => history.replaceState(null, "", address());

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), ids = new Set(runs.map(({ id }) => id));
  const asked = (given.get("runs") ?? "").split(",").filter((id) => ids.has(id));
  const newest = runs.toSorted((a, b) => b.changed - a.changed).slice(0, MOST_CHOSEN).map(({ id }) => id);
  state.shown = new Set(asked.length ? asked : newest);
  state.view = VIEWS.some(([name]) => name === given.get("view")) ? given.get("view") : VIEWS[0][0];
  state.find = given.get("find") ?? "";
  state.run = ids.has(given.get("run")) ? given.get("run") : "";
  state.part = PARTS.some(([name]) => name === given.get("part")) ? given.get("part") : PARTS[0][0];
  state.key = given.get("key") ?? "";
  state.axis = given.get("axis") === "wall" ? "wall" : "";
  const smooth = Number(given.get("smooth") ?? SMOOTH);
  state.smooth = smooth >= 0 && smooth < 1 ? smooth : SMOOTH;
  state.all = false;
}

function show() {
  const run = runs.find(({ id }) => id === state.run);
  byId("all").hidden = byId("search").hidden = Boolean(run);
  byId("one").hidden = !run;
  byId("title").textContent = run ? run.name : "Runs";
  document.title = run ? `${run.name} - runs` : "Runs";
  byId("find").value = state.find;
  byId("axis").value = state.axis;
  byId("smooth").value = state.smooth;
  byId("tools").hidden = Boolean(run) && state.part !== PARTS[0][0];
  if (run) return showRun();
  showRuns();
  showAll();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && state.run) location.hash = address({ run: "" });
  if (event.target.closest("input:not([type=checkbox]), select")) return;
  const number = Number(event.key) - 1;
  if (event.key === "/" && !state.run) { event.preventDefault(); byId("find").focus(); }
  else if (state.run && PARTS[number]) location.hash = address({ part: PARTS[number][0] });
  else if (!state.run && VIEWS[number]) { state.view = VIEWS[number][0]; state.all = false; showAll(); }
}

function start() {
  readAddress();
  byId("find").addEventListener("input", () => { state.find = byId("find").value; state.all = false; showAll(); });
  const redraw = () => { keepAddress(); state.run ? showRun() : showCharts(); };
  byId("axis").addEventListener("change", () => { state.axis = byId("axis").value; redraw(); });
  byId("smooth").addEventListener("input", () => { state.smooth = Number(byId("smooth").value); redraw(); });
  document.addEventListener("keydown", press);
  addEventListener("hashchange", () => { readAddress(); show(); scrollTo(0, 0); byId("title").focus(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; state.run ? showRun() : showCharts(); } });
  show();
}

start();
