/** States in words: the connection, the run, and what the pictures lack. */

import { clock, count, whole } from "./format.js";

const STATES = { running: "running", ended: "ended", lost: "job lost", recorded: "recorded" };

/**
 * The connection and the run, in a few words.
 * @returns {{level: string, text: string, title: string}} level: good, busy, bad, quiet
 */
export function connectionText(app) {
  const { live } = app;
  if (live.state === "connecting") return { level: "busy", text: "connecting …", title: "" };
  if (live.state === "lost") {
    const wait = Math.max(0, Math.ceil((live.retryAt - Date.now()) / 1000));
    const next = wait > 0 ? `next try in ${wait} s` : "trying again";
    return {
      level: "bad",
      text: `lost since ${clock(live.lostAt)}, ${next}`,
      title: live.refusal || "The hub cannot be reached. Charts stay; missed data is fetched after reconnecting.",
    };
  }
  if (live.state !== "connected") return { level: "quiet", text: "not connected", title: "" };
  const info = app.runInfo();
  const role = live.role === "controller" ? "you control" : "you watch";
  if (app.run === undefined) return { level: "good", text: `connected, ${role}`, title: "No run has come yet." };
  return {
    level: info.state === "running" ? "good" : info.state === "lost" ? "bad" : "quiet",
    text: `${STATES[info.state] ?? info.state}, ${role}`,
    title: info.text ?? "",
  };
}

/**
 * What somebody who watches has to know now, worst first.
 * @returns {Array<{level: string, text: string, action?: string, go?: function(): void}>}
 */
export function notices(app) {
  return [...ofValues(app), ...ofRun(app), ...ofPictures(app), ...ofHub(app), ...ofWatches(app)];
}

function ofValues(app) {
  return app.sides().flatMap(({ run, letter }) => {
    const found = app.firstNonFinite(run);
    if (found === undefined) return [];
    const number = found.num === 1 ? "1 value is" : `${whole(found.num)} values are`;
    const which = app.sides().length > 1 ? `Run ${letter}: ` : "";
    const text = `${which}NaN or infinite: first at step ${found.step}, ${found.phase}, ${found.text} (${number} not finite).`;
    return [{ level: "bad", text, action: "Go to it (N)", go: () => app.goToNonFinite(run) }];
  });
}

function ofRun(app) {
  const info = app.runInfo();
  const why = info.text ? `: ${info.text}` : "";
  if (info.state === "lost") return [{ level: "warn", text: `The job was lost${why}. What is shown came before.` }];
  if (info.state === "recorded") return [{ level: "info", text: `A recording${why}.` }];
  if (info.state === "ended") return [{ level: "info", text: `The job has ended${why}.` }];
  return [];
}

function ofPictures(app) {
  const found = [];
  for (const { run, step, letter } of app.sides()) {
    for (const [phase, gap] of app.store.runs.get(run)?.gaps.get(step) ?? []) {
      const where = `in ${phase} at step ${step}${app.sides().length > 1 ? ` of run ${letter}` : ""}`;
      const ranks = `${gap.missing.length === 1 ? "Rank" : "Ranks"} ${gap.missing.join(", ")}`;
      const dropped = `${count(gap.dropped, "frame")} dropped by ranks`;
      if (gap.missing.length > 0) found.push({ level: "warn", text: `${ranks} missing ${where}: pictures lack their part.` });
      if (gap.dropped > 0) found.push({ level: "warn", text: `${dropped} ${where}: pictures may lack parts.` });
    }
  }
  return found;
}

function ofWatches(app) {
  const isOn = app.live.state === "connected" && app.runInfo().state === "running";
  if (!isOn || app.plan.watches.length > 0) return [];
  return [{ level: "info", text: "No watches yet.", action: "Watches", go: () => app.watches.toggle(true) }];
}

/** What is said where nothing has to be known. */
export function quietText(app) {
  if (app.run === undefined || app.store.run(app.run).steps.size === 0) return "No data yet.";
  return "All watched values are finite, and none is missing.";
}

function ofHub(app) {
  const found = [];
  const go = () => app.live.takeOver();
  if (app.live.role === "viewer" && app.live.busy) {
    found.push({ level: "info", text: "Another viewer has control; this page is read-only.", action: "Take over", go });
  }
  if (app.wasDemoted) found.push({ level: "info", text: "Another viewer has taken over; this page is read-only now.", action: "Take it back", go });
  if (app.stats?.dropped > 0) {
    const frames = count(app.stats.dropped, "frame");
    found.push({ level: "warn", text: `${frames} dropped on the way to this page, which was slower than the run.` });
  }
  const problem = app.problems.at(-1);
  if (problem !== undefined) found.push({ level: "warn", text: `${problem.text} (${clock(problem.at)})` });
  return found;
}
