/** View: the largest values of each token: for logits, the most likely next tokens. */

import { choice, h, say, setOptions } from "./dom.js";
import { exact, short, tokenText } from "./format.js";
import { Picker, placesOf } from "./picker.js";
import { parseReducer } from "./reducer.js";
import { tokensOf } from "./store.js";

const MOST_ROWS = 400;

/** A table per run. */
export class TopKView {
  constructor(app) {
    this.app = app;
    this.id = "next";
    this.title = "Next tokens";
    this.picker = new Picker((seen) => parseReducer(seen.reducer).name === "topk", () => app.changed(), ["logits"]);
    this.place = choice("Layer", () => app.changed());
    this.row = choice("Sample", (value) => {
      this.key = value;
      app.changed();
    });
    this.tools = h(
      "div",
      { className: "tools" },
      this.picker.root,
      h("div", { className: "fields" }, this.place.root, this.row.root),
    );
    this.note = h("p", { className: "key" });
    this.nothing = h("div");
    this.body = h("div", { className: "pair" });
    this.root = h("div", { className: "view" }, this.tools, this.nothing, this.note, this.body);
  }

  choose(wanted) {
    this.picker.choose(wanted);
  }

  isReady(run, step) {
    const { chosen } = this.picker;
    return chosen === undefined || placesOf(chosen).some(
      (place) => this.app.store.frame(run, step, chosen, place.text)
    );
  }

  prepare() {
    this.picker.update(this.app.watchedOf(), this.app.order);
  }

  render() {
    const { chosen } = this.picker;
    [this.body.hidden, this.note.hidden] = [chosen === undefined, chosen === undefined];
    this.nothing.replaceChildren();
    if (chosen === undefined) {
      this.nothing.replaceChildren(
        this.app.nothingYet("The most likely next tokens are not watched yet.", "logits | topk(5) | train")
      );
      return;
    }
    const places = placesOf(chosen);
    const wanted = this.place.select.value;
    setOptions(
      this.place.select,
      places.map((place) => [place.text, place.label]),
      places.some((p) => p.text === wanted) ? wanted : places[0].text,
    );
    this.place.root.hidden = places.length < 2;
    const sides = this.app.sides().map((side) => this.collect(side, chosen, this.place.select.value));
    const keys = [...new Set(sides.flatMap((side) => side?.keys ?? []))];
    const key = keys.includes(this.key) ? this.key : keys[0];
    setOptions(this.row.select, keys.map((name) => [name, name]), key ?? "");
    this.tables = sides.map((side) => (side && key !== undefined ? this.linesOf(side, key) : null));
    say(
      this.note,
      chosen.kind === "logits"
        ? "Logits of each position, largest first; underlined is the token that comes next in the sample."
        : "Largest values of each token, with the feature they are at.",
    );
    this.fill(chosen);
  }

  collect(side, chosen, text) {
    const frame = this.app.store.frame(side.run, side.step, chosen, text);
    const table = frame && this.app.store.table(side.run, frame.header.table);
    if (!frame || !table) return null;
    return { frame, table, keys: table.keys.filter((key) => tokensOf(table, key).length > 0) };
  }

  linesOf({ frame, table }, key) {
    const k = frame.shape[1];
    const places = tokensOf(table, key);
    const idAt = new Map(places.map((place) => [table.positions[place], table.ids[place]]));
    return places.map((place) => {
      const best = Array.from({ length: k }, (_, i) => {
        const [value, feature] = [frame.values[(place * k + i) * 2], frame.values[(place * k + i) * 2 + 1]];
        return { value, feature };
      }).filter(({ feature }) => feature >= 0);
      const [position, id] = [table.positions[place], table.ids[place]];
      return {
        position,
        id,
        text: tokenText(table.texts[id], id),
        next: idAt.get(position + 1),
        best,
        texts: table.texts,
      };
    });
  }

  fill(chosen) {
    const isLogits = chosen.kind === "logits";
    this.body.replaceChildren(...this.tables.map((lines, side) => {
      const title = h("h2", { className: "pane-title", textContent: this.app.sideText(side) });
      if (lines === null) return h(
        "section",
        { className: "pane" },
        title,
        h("p", { className: "key", textContent: "Nothing at this step." }),
      );
      const k = Math.max(0, ...lines.map((line) => line.best.length));
      const ranks = Array.from({ length: k }, (_, i) => h("th", { scope: "col", textContent: String(i + 1) }));
      const head = h(
        "tr",
        {},
        h("th", { scope: "col", textContent: "at" }),
        h("th", { scope: "col", textContent: "token" }),
        ...ranks,
      );
      const rows = lines.slice(0, MOST_ROWS).map((line) => this.rowOf(line, isLogits));
      const cut = lines.length > MOST_ROWS ? [
        h("p", { className: "key", textContent: `The first ${MOST_ROWS} of ${lines.length} tokens; the CSV has all.` })
      ] : [];
      return h(
        "section",
        { className: "pane" },
        title,
        h(
          "div",
          { className: "scroll-x" },
          h("table", { className: "tokens" }, h("thead", {}, head), h("tbody", {}, ...rows)),
        ),
        ...cut,
      );
    }));
  }

  rowOf(line, isLogits) {
    const cells = line.best.map(({ value, feature }) => {
      const text = isLogits ? tokenText(line.texts[feature], feature) : `[${feature}]`;
      const name = isLogits && line.next === feature ? "candidate hit" : "candidate";
      const number = h("small", { textContent: short(value), title: exact(value) });
      return h(
        "td",
        { className: Number.isFinite(value) ? "" : "not-finite" },
        h("span", { className: name, textContent: text }),
        number,
      );
    });
    return h(
      "tr",
      {},
      h("td", { className: "number", textContent: String(line.position) }),
      h("th", { scope: "row", className: "token", textContent: line.text }),
      ...cells,
    );
  }

  canvases() {
    return [];
  }

  /** All candidates. */
  numbers() {
    const columns = [
      "run",
      "step",
      "phase",
      "site",
      "position",
      "token_id",
      "token",
      "rank",
      "feature",
      "feature_text",
      "value",
    ];
    const rows = (this.tables ?? []).flatMap((lines, side) => (lines ?? []).flatMap((line) => line.best.map(({ value, feature }, i) => {
      const { run, step } = this.app.sides()[side];
      const text = this.picker.chosen.kind === "logits" ? tokenText(line.texts[feature], feature) : "";
      return [
        run,
        step,
        this.picker.chosen.phase,
        this.place.select.value,
        line.position,
        line.id,
        line.text,
        i + 1,
        exact(feature),
        text,
        exact(value),
      ];
    })));
    return { columns, rows };
  }
}
