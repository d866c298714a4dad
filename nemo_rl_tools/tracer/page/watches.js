/** The panel of what is watched: a list of texts for the controller, with a builder made from the catalogue. */

import { button, choice, field, h, note, say, setOptions } from "./dom.js";

const PHASES = ["train", "prev_logprobs", "reference_logprobs", "generation"];
const EXAMPLES = { tiles: "tiles(1, rms)", topk: "topk(5)", sample: "sample(4)", project: "project(NAME)" };
const PRESETS = [
  ["Statistics of every layer", "layer.out, attn.out, mlp.out | stats", "layer.out"],
  ["Tokens: size of the residual stream", "layer.out, mlp.out | tiles(1, rms) | train", "layer.out"],
  ["Load of experts", "moe.topk_ids | counts | train", "moe.topk_ids"],
  ["Most likely next tokens", "logits | topk(5) | train", "logits"],
  ["Histograms, every 5 steps", "layer.out | histogram | train; every 5", "layer.out"],
  ["Gradients of parameters", "grad | norm", "grad"],
];

/** The panel at the side. */
export class WatchPanel {
  constructor(app) {
    this.app = app;
    this.draft = undefined; // texts being edited; undefined: as the hub has them
    this.error = "";
    this.list = h("ol", { className: "watches" });
    this.state = note("", { "aria-live": "polite" });
    this.problem = h("p", { className: "error", role: "alert" });
    this.apply = button("Apply", () => this.send(), { className: "primary" });
    this.undo = button("Discard", () => this.set(undefined));
    this.edit = h("div", { className: "edit" }, this.makeBuilder(), this.makePresets(), this.makeMark());
    const close = button("✕", () => this.toggle(false), { className: "icon", "aria-label": "Close" });
    const head = h("header", {}, h("h2", { textContent: "Watches" }), close);
    this.actions = h("div", { className: "actions" }, this.apply, this.undo);
    const parts = [head, this.state, this.list, this.problem, this.actions, this.edit];
    this.root = h("aside", { className: "panel", hidden: true, "aria-label": "Watches" }, ...parts);
  }

  get canEdit() {
    const { live } = this.app;
    return live.role === "controller" && live.state === "connected" && this.app.runInfo().state !== "recorded";
  }

  get texts() {
    return this.draft ?? this.app.plan.watches;
  }

  toggle(isOpen = this.root.hidden) {
    this.root.hidden = !isOpen;
    document.body.classList.toggle("has-panel", isOpen);
    this.app.changed();
  }

  set(draft) {
    this.draft = draft;
    this.error = "";
    this.shown = undefined;
    this.app.changed();
  }

  add(text) {
    this.set([...this.texts, text]);
    this.toggle(true);
  }

  /** The builder: sites, layers, reducer, phase and how often become a text. */
  makeBuilder() {
    const preview = () => say(this.preview, this.built());
    this.site = choice("Site", () => this.hint());
    this.reducer = choice("Reducer", () => {
      this.parameters.value = EXAMPLES[this.reducer.select.value] ?? this.reducer.select.value;
      this.hint();
    });
    const input = (label, placeholder, type = "text") =>
      h("input", { type, placeholder, "aria-label": label, oninput: preview });
    this.layers = input("Layers", "all, or 0..3");
    this.parameters = input("As", "stats");
    this.every = input("Every … steps", "1", "number");
    this.every.min = "1";
    this.phase = choice("Phase", preview);
    setOptions(this.phase.select, [["", "every one"], ...PHASES.map((phase) => [phase, phase])], "");
    this.meaning = note("");
    this.preview = h("code", { className: "preview" });
    const fields = h(
      "div",
      { className: "fields" },
      this.site.root,
      field("Layers", this.layers),
      this.reducer.root,
      field("As", this.parameters),
      this.phase.root,
      field("Every … steps", this.every),
    );
    return box("Add a watch", fields, this.meaning, this.preview, button("Add to the list", () => this.add(this.built())));
  }

  built() {
    const layers = this.layers.value.trim();
    const when = [this.phase.select.value, Number(this.every.value) > 1 ? `every ${Number(this.every.value)}` : ""];
    const site = layers && layers !== "all" ? `${this.site.select.value} & layer in ${layers}` : this.site.select.value;
    const reducer = this.parameters.value.trim() || this.reducer.select.value;
    return [site, reducer, when.filter(Boolean).join("; ")].filter(Boolean).join(" | ");
  }

  hint() {
    const site = this.app.catalogue.sites.find((one) => one.kind === this.site.select.value);
    const why = this.app.runInfo().unobserved?.[site?.kind];
    const cannot = why ? `Cannot be observed here: ${why}. ` : "";
    const reducer = this.app.catalogue.reducers[this.reducer.select.value] ?? "";
    const how = `${this.reducer.select.value}: ${reducer}.`;
    say(this.meaning, site ? `${site.kind}: ${site.text}, ${site.dims}. ${cannot}${how}` : "");
    this.layers.disabled = site !== undefined && !site.in_layers;
    if (this.layers.disabled) this.layers.value = "";
    say(this.preview, this.built());
  }

  makePresets() {
    this.presets = h("div", { className: "presets" });
    return box("Ready-made", this.presets);
  }

  makeMark() {
    const send = () => {
      if (label.value.trim()) this.app.live.send({ type: "mark", label: label.value.trim() });
      label.value = "";
    };
    const onkeydown = ({ key }) => key === "Enter" && send();
    const placeholder = "such as: lower learning rate";
    const label = h("input", { type: "text", maxLength: 200, placeholder, "aria-label": "Label of the mark", onkeydown });
    return box("Mark this moment", h("div", { className: "row" }, label, button("Mark", send)));
  }

  /** After each welcome: sites and reducers of the hub. */
  setCatalogue({ sites, reducers }) {
    const named = (names) => names.map((name) => [name, name]);
    setOptions(this.site.select, named(sites.map(({ kind }) => kind)), this.site.select.value || "layer.out");
    setOptions(this.reducer.select, named(Object.keys(reducers)), this.reducer.select.value || "stats");
    const fits = PRESETS.filter(([, , needed]) => sites.some(({ kind }) => kind === needed));
    this.presets.replaceChildren(...fits.map(([title, text]) => {
      const preset = button("", () => this.add(text));
      preset.append(h("strong", { textContent: title }), h("code", { textContent: text }));
      return preset;
    }));
    this.hint();
  }

  send() {
    this.error = "";
    this.isSent = true;
    this.app.live.send({ type: "watch", watches: this.texts.map((text) => text.trim()).filter(Boolean) });
    this.app.changed();
  }

  /** The hub has another plan. */
  planned() {
    if (this.isSent) this.draft = undefined;
    this.isSent = false;
    this.shown = undefined;
  }

  /** The hub refuses what was sent. */
  refused(text) {
    [this.error, this.isSent, this.shown] = [text, false, undefined];
    this.toggle(true);
  }

  render() {
    if (this.root.hidden) return;
    const { plan } = this.app;
    const isOn = (plan.effective_step ?? null) !== null;
    const from = isOn ? `in effect from step ${plan.effective_step}` : "not in effect yet; it applies from a later step";
    const what = plan.watches.length === 0 ? "Nothing is watched" : "What is watched";
    const isRecorded = this.app.runInfo().state === "recorded";
    const who = this.canEdit ? "" : isRecorded ? " A recording cannot be changed." : " Only the controller can change it.";
    say(this.state, this.draft === undefined ? `${what}, ${from}.${who}` : "Edited, not applied yet.");
    this.edit.hidden = !this.canEdit;
    this.actions.hidden = !this.canEdit;
    this.apply.disabled = this.draft === undefined;
    this.undo.disabled = this.draft === undefined;
    this.fill();
  }

  fill() {
    const signature = JSON.stringify([this.texts, this.canEdit, this.error]);
    if (signature === this.shown) return;
    const at = this.guilty();
    this.list.replaceChildren(...this.texts.map((text, i) => this.line(text, i, i === at)));
    say(this.problem, at < 0 ? this.error : "");
    this.shown = signature;
  }

  /** Which text the hub complains about: the one whose words its error names; -1: none of them. */
  guilty() {
    if (!this.error) return -1;
    const isNew = (text) => !this.app.plan.watches.includes(text);
    const quoted = [...this.error.matchAll(/'((?:[^'\\]|\\.)*)'/g)].map((match) => match[1]).reverse();
    for (const word of quoted.filter(({ length }) => length > 1)) {
      const at = this.texts.findIndex((text) => text.includes(word) && isNew(text));
      if (at >= 0) return at;
    }
    return this.texts.filter(isNew).length === 1 ? this.texts.findIndex(isNew) : -1;
  }

  line(text, i, isGuilty) {
    const oninput = () => {
      this.draft = this.texts.with(i, area.value);
      // What is being typed stays as it is.
      this.shown = JSON.stringify([this.draft, this.canEdit, this.error]);
      this.app.changed();
    };
    const labels = { "aria-label": `Watch ${i + 1}`, "aria-invalid": String(isGuilty) };
    const area = h("textarea", { rows: 2, value: text, readOnly: !this.canEdit, spellcheck: false, oninput, ...labels });
    const remove = button("✕", () => this.set(this.texts.toSpliced(i, 1)), {
      className: "icon",
      "aria-label": `Remove watch ${i + 1}`,
      hidden: !this.canEdit,
    });
    const problem = { className: "error", role: "alert", textContent: isGuilty ? this.error : "", hidden: !isGuilty };
    return h("li", {}, h("div", { className: "row" }, area, remove), h("p", problem));
  }
}

/** Fields with a heading. */
const box = (title, ...children) => h("fieldset", {}, h("legend", { textContent: title }), ...children);
