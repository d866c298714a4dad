/** Around the views: heading, runs, tabs, notices, token form, help, keyboard and theme. */

import { button, choice, dialog, h, note, say, setOptions } from "./dom.js";
import { download, csvOf, fileName, pictureOf } from "./exporter.js";
import { connectionText, notices, quietText } from "./status.js";

const TOKEN = "tracer.token";
const THEME = "tracer.theme";
const KEYS = [
  ["← →", "step back, step forward"], ["Home, End", "first step; follow the newest"], ["Space", "pause, follow"],
  ["Drag, double click", "zoom into a chart; show all of it again"],
  ["N", "first NaN or infinity"], ["1 … 7", "views"], ["W", "watches"], ["P, C", "picture as PNG, numbers as CSV"],
  ["T", "dark, light"], ["Shift + arrows", "move between cells of the heat map"], ["?", "these keys"],
];

/** The frame of the page. */
export class Shell {
  constructor(app) {
    this.app = app;
    const tool = (text, title, onclick, className = "") => button(text, onclick, { title, className });
    this.runA = choice("Run A", (value) => app.setRuns(value, app.other));
    this.runB = choice("Compare with", (value) => app.setRuns(app.run, value || undefined));
    this.dot = h("span", { className: "dot", "aria-hidden": "true" });
    this.connection = h("span");
    const hurry = () => app.live.hurry();
    this.pill = h("span", { className: "pill", role: "status", onclick: hurry }, this.dot, this.connection);
    this.tabs = h("nav", { role: "tablist", "aria-label": "Views" }, ...app.views.map((view, i) => this.tab(view, i)));
    this.notice = h("div", { className: "notice", role: "status" });
    this.main = h("main", { id: "main", role: "tabpanel", tabIndex: -1 });
    const keys = KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", { textContent: key })), h("dd", { textContent: text })]);
    this.help = dialog("Keys", h("dl", {}, ...keys));
    this.form = this.makeForm();
    const tools = h(
      "div",
      { className: "head-tools" },
      tool("Watches", "What is watched (W)", () => app.watches.toggle(), "wide"),
      tool("PNG", "Picture as PNG (P)", () => this.png()),
      tool("CSV", "Numbers as CSV (C)", () => this.csv()),
      tool("◐", "Dark, light (T)", () => this.flip(), "icon"),
      tool("?", "Keys (?)", () => this.help.showModal(), "icon"),
    );
    const runs = h("div", { className: "runs" }, this.runA.root, this.runB.root);
    const head = h("header", { className: "head" }, h("h1", { textContent: "Tensor tracer" }), runs, this.pill, tools);
    const middle = h("div", { className: "middle" }, this.main, app.watches.root);
    const page = h("div", { className: "app" }, head, this.tabs, this.notice, middle, app.time.root);
    document.body.append(page, this.help, this.form);
  }

  tab(view, i) {
    const more = { role: "tab", "aria-controls": "main", title: `${view.title} (${i + 1})` };
    return button(view.title, () => this.app.show(view.id), more);
  }

  makeForm() {
    this.tokenField = h("input", { type: "password", autocomplete: "off", spellcheck: false, id: "token" });
    this.tokenText = h("p", { className: "error", role: "alert" });
    const where = "It lies in the folder of the run: tracer/viewer.token to watch, tracer/controller.token to choose what " +
      "is watched; nemo-rl trace serve says where its own lies.";
    const onsubmit = (event) => {
      event.preventDefault();
      if (this.tokenField.value.trim()) this.connect(this.tokenField.value.trim());
    };
    const form = h(
      "form",
      { method: "dialog", onsubmit },
      h("h2", { textContent: "Tensor tracer" }),
      h("label", { for: "token", textContent: "Token of the viewer or the controller" }),
      this.tokenField,
      note(where),
      this.tokenText,
      h("button", { type: "submit", className: "primary", textContent: "Connect" }),
    );
    const oncancel = (event) => event.preventDefault();
    return h("dialog", { className: "token", "aria-label": "Token", oncancel }, form);
  }

  /** Reads the token, takes it out of the address, and connects. */
  start() {
    this.theme(sessionStorage.getItem(THEME));
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (location.hash) window.history.replaceState(null, "", location.pathname + location.search);
    const token = given ?? sessionStorage.getItem(TOKEN);
    this.mount();
    if (token) this.connect(token);
    else this.app.changed();
    addEventListener("resize", () => this.app.changed());
    addEventListener("keydown", (event) => this.key(event));
    const followSystem = () => this.theme(sessionStorage.getItem(THEME));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", followSystem);
    new ResizeObserver(() => this.app.changed()).observe(this.main);
    setInterval(() => this.sayState(), 1000);
  }

  connect(token) {
    sessionStorage.setItem(TOKEN, token);
    this.form.close();
    this.app.live.start(token);
  }

  theme(chosen) {
    const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    this.app.changed();
  }

  flip() {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    sessionStorage.setItem(THEME, next);
    this.theme(next);
  }

  /** Puts the view that is shown into its place. */
  mount() {
    this.main.replaceChildren(this.app.view.root);
    this.main.scrollTop = 0;
    const isShown = (i) => String(this.app.views[i] === this.app.view);
    [...this.tabs.children].forEach((tab, i) => tab.setAttribute("aria-selected", isShown(i)));
  }

  render() {
    const { app } = this;
    const runs = [...app.store.runs.keys()].map((id) => [id, app.nameOf(id) === id ? id : `${app.nameOf(id)} (${id})`]);
    setOptions(this.runA.select, runs.length ? runs : [["", "no run yet"]], app.run ?? "");
    const others = runs.filter(([id]) => id !== app.run);
    setOptions(this.runB.select, [["", others.length ? "nothing" : "no other run"], ...others], app.other ?? "");
    this.sayState();
    const refused = app.live.state === "refused" || app.live.state === "idle";
    say(this.tokenText, app.live.refusal && refused ? `The hub refuses: ${app.live.refusal}` : "");
    if (refused && !this.form.open) this.form.showModal();
    document.title = `${app.step === undefined ? "" : `${app.step} · `}${app.run ? app.nameOf(app.run) : "Tensor tracer"}`;
  }

  sayState() {
    const { level, text, title } = connectionText(this.app);
    this.pill.dataset.level = level;
    say(this.connection, text);
    this.pill.title = title;
    this.sayNotice(notices(this.app));
  }

  sayNotice(all) {
    const [worst, ...rest] = all;
    const signature = JSON.stringify([quietText(this.app), all.map(({ text, action }) => [text, action])]);
    if (signature === this.notice.dataset.shown) return;
    this.notice.dataset.shown = signature;
    this.notice.dataset.level = worst?.level ?? "none";
    const text = (of, more) => h("span", { className: "text", textContent: of, ...more });
    if (worst === undefined) return this.notice.replaceChildren(text(quietText(this.app)));
    const showAll = () => this.showAll(all);
    const parts = [text(worst.text, { title: worst.text, onclick: showAll })];
    if (worst.action) parts.push(button(worst.action, worst.go));
    for (const { action, go, text: title } of rest) if (action) parts.push(button(action, go, { title }));
    const others = rest.map((other) => other.text).join("\n");
    if (rest.length > 0) parts.push(button(`${rest.length} more`, showAll, { title: others }));
    this.notice.replaceChildren(...parts);
  }

  showAll(all) {
    const shown = dialog("Notices", h("ul", {}, ...all.map(({ text }) => h("li", { textContent: text }))));
    shown.addEventListener("close", () => shown.remove());
    document.body.append(shown);
    shown.showModal();
  }

  heading() {
    const { app } = this;
    return `${app.view.title}  ·  ${app.sides().map((side) => side.name).join(" and ")}  ·  step ${app.step ?? "–"}`;
  }

  name(suffix) {
    const { app } = this;
    return fileName(["trace", app.run ?? "", app.view.id, `step${app.step ?? ""}`], suffix);
  }

  async png() {
    this.app.render();
    await null; // uPlot draws when what runs now has ended
    download(this.name("png"), await pictureOf(this.app.view, this.heading()));
  }

  csv() {
    download(this.name("csv"), new Blob([csvOf(this.app.numbers())], { type: "text/csv" }));
  }

  key(event) {
    const { app } = this;
    const isTyping = event.target.closest?.("input:not([type=checkbox]), textarea, select, dialog");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => app.time.move(-1),
      ArrowRight: () => app.time.move(1),
      Home: () => app.time.end(-1),
      End: () => app.time.end(1),
      n: () => app.goToNonFinite(),
      w: () => app.watches.toggle(),
      p: () => this.png(),
      c: () => this.csv(),
      t: () => this.flip(),
      "?": () => this.help.showModal(),
      ...Object.fromEntries(app.views.map((view, i) => [String(i + 1), () => app.show(view.id)])),
    };
    const takesSpace = event.target.tagName === "BUTTON" || event.target.type === "checkbox";
    if (event.key === " " && !takesSpace) actions[" "] = () => app.time.toggle();
    const act = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act === undefined || event.shiftKey && event.key.startsWith("Arrow")) return;
    event.preventDefault();
    act();
  }
}
