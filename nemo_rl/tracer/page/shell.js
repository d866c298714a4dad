/** Around the views: heading, runs, tabs, notices, token form, help, keyboard and theme. */

import { choice, h, say, setOptions } from "./dom.js";
import { download, csvOf, fileName, pictureOf } from "./exporter.js";
import { connectionText, notices, quietText } from "./status.js";

const TOKEN = "tracer.token";
const THEME = "tracer.theme";
const KEYS = [
  ["← →", "step back, step forward"], ["Home, End", "first step; follow the newest"], ["Space", "pause, follow"],
  ["N", "first NaN or infinity"], ["1 … 7", "views"], ["W", "watches"], ["P, C", "picture as PNG, numbers as CSV"],
  ["T", "dark, light"], ["Shift + arrows", "from cell to cell of the heat map"], ["?", "these keys"],
];

/** The frame of the page. */
export class Shell {
  constructor(app) {
    this.app = app;
    const button = (text, title, onclick, name = "") => h(
      "button",
      { type: "button", className: name, textContent: text, title, onclick },
    );
    this.runA = choice("Run A", (value) => app.setRuns(value, app.other));
    this.runB = choice("Compare with", (value) => app.setRuns(app.run, value || undefined));
    this.dot = h("span", { className: "dot", "aria-hidden": "true" });
    this.connection = h("span");
    this.pill = h("span", { className: "pill", role: "status" }, this.dot, this.connection);
    this.pill.addEventListener("click", () => app.live.hurry());
    this.watchButton = button("Watches", "What is watched (W)", () => app.watches.toggle(), "wide");
    this.tabs = h("nav", { role: "tablist", "aria-label": "Views" }, ...app.views.map((view, i) => this.tab(view, i)));
    this.notice = h("div", { className: "notice", role: "status" });
    this.main = h("main", { id: "main", role: "tabpanel", tabIndex: -1 });
    this.help = this.makeHelp();
    this.form = this.makeForm();
    const tools = h("div", { className: "head-tools" }, this.watchButton, button(
      "PNG",
      "Picture as PNG (P)",
      () => this.png(),
    ), button(
      "CSV",
      "Numbers as CSV (C)",
      () => this.csv(),
    ),
      button("◐", "Dark, light (T)", () => this.flip(), "icon"), button(
        "?",
        "Keys (?)",
        () => this.help.showModal(),
        "icon",
      ));
    const head = h(
      "header",
      { className: "head" },
      h("h1", { textContent: "Tensor tracer" }),
      h("div", { className: "runs" }, this.runA.root, this.runB.root),
      this.pill,
      tools,
    );
    this.middle = h("div", { className: "middle" }, this.main, app.watches.root);
    document.body.append(
      h("div", { className: "app" }, head, this.tabs, this.notice, this.middle, app.time.root),
      this.help,
      this.form,
    );
  }

  tab(view, i) {
    const onclick = () => this.app.show(view.id);
    return h(
      "button",
      {
        type: "button",
        role: "tab",
        "aria-controls": "main",
        title: `${view.title} (${i + 1})`,
        textContent: view.title,
        onclick,
      },
    );
  }

  makeHelp() {
    const rows = KEYS.flatMap(
      ([key, text]) => [h("dt", {}, h("kbd", { textContent: key })), h("dd", { textContent: text })]
    );
    const close = h(
      "button",
      { type: "button", className: "primary", textContent: "Close", onclick: () => this.help.close() },
    );
    return h(
      "dialog",
      { className: "help", "aria-label": "Keys" },
      h("h2", { textContent: "Keys" }),
      h("dl", {}, ...rows),
      close,
    );
  }

  makeForm() {
    this.tokenField = h("input", { type: "password", autocomplete: "off", spellcheck: false, id: "token" });
    this.tokenText = h("p", { className: "error", role: "alert" });
    const form = h("form", { method: "dialog" }, h("h2", { textContent: "Tensor tracer" }), h(
      "label",
      { for: "token", textContent: "Token of the viewer or the controller" },
    ), this.tokenField,
      h(
        "p",
        {
          className: "key",
          textContent: "It lies in the folder of the run: tracer/viewer.token to watch, " +
            "tracer/controller.token to choose what is watched; nemo-rl trace serve says where its own lies.",
        },
      ), this.tokenText,
      h("button", { type: "submit", className: "primary", textContent: "Connect" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.tokenField.value.trim()) this.connect(this.tokenField.value.trim());
    });
    return h(
      "dialog",
      { className: "token", "aria-label": "Token", oncancel: (event) => event.preventDefault() },
      form,
    );
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
    matchMedia("(prefers-color-scheme: dark)").addEventListener(
      "change",
      () => this.theme(sessionStorage.getItem(THEME)),
    );
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
    [...this.tabs.children].forEach(
      (tab, i) => tab.setAttribute("aria-selected", String(this.app.views[i] === this.app.view))
    );
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
    if (worst === undefined) {
      this.notice.replaceChildren(h("span", { className: "text", textContent: quietText(this.app) }));
      return;
    }
    const parts = [
      h("span", { className: "text", textContent: worst.text, title: worst.text, onclick: () => this.showAll(all) })
    ];
    if (worst.action) parts.push(h("button", { type: "button", textContent: worst.action, onclick: worst.go }));
    const button = (textContent, title, onclick) => parts.push(h("button", { type: "button", title, textContent, onclick }));
    for (const other of rest.filter(({ action }) => action)) button(other.action, other.text, other.go);
    const others = rest.map(({ text }) => text).join("\n");
    if (rest.length > 0) button(`${rest.length} more`, others, () => this.showAll(all));
    this.notice.replaceChildren(...parts);
  }

  showAll(all) {
    const close = h(
      "button",
      { type: "button", className: "primary", textContent: "Close", onclick: () => dialog.remove() },
    );
    const dialog = h(
      "dialog",
      { className: "help", "aria-label": "Notices" },
      h("h2", { textContent: "Notices" }),
      h("ul", {}, ...all.map(({ text }) => h("li", { textContent: text }))),
      close,
    );
    document.body.append(dialog);
    dialog.showModal();
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
    if (event.key === " " && event.target.tagName !== "BUTTON" && event.target.type !== "checkbox") actions[" "] = () => app.time.toggle();
    const act = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act === undefined || event.shiftKey && event.key.startsWith("Arrow")) return;
    event.preventDefault();
    act();
  }
}
