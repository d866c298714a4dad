/** Elements without markup: every text goes through `textContent`. */

/**
 * An element with properties, attributes (those with a dash, `role` and `for`), listeners (`on...`) and children.
 * @param {string} tag
 * @param {Object} [properties]
 * @param {...(Node|string)} children
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/**
 * A label and a select below it.
 * @param {string} label
 * @param {function(string): void} onchange
 * @returns {{root: HTMLElement, select: HTMLSelectElement}}
 */
export function choice(label, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) });
  return { root: h("label", { className: "field" }, h("span", {}, label), select), select };
}

/**
 * Puts options into a select, without touching it where they are there already.
 * @param {HTMLSelectElement} select
 * @param {Array<[string, string]>} options value and text
 * @param {string} value
 */
export function setOptions(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.replaceChildren(...options.map(([key, text]) => h("option", { value: key, textContent: text })));
    select.dataset.options = wanted;
  }
  if (select.value !== value) select.value = value;
  select.disabled = options.length < 2;
}

/** A switch with a text. */
export function toggle(text, isOn, onchange) {
  const input = h("input", { type: "checkbox", checked: isOn, onchange: () => onchange(input.checked) });
  return h("label", { className: "toggle" }, input, h("span", {}, text));
}

/** Sets children where they differ, so that pointers and focus stay. */
export function keepChildren(element, children) {
  const isSame = element.children.length === children.length && children.every((child, i) => element.children[i] === child);
  if (!isSame) element.replaceChildren(...children);
}

/** Sets a text where it differs, so that screen readers say it once. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What is said where there is nothing to show. */
export function empty(title, text, ...more) {
  return h("div", { className: "empty" }, h("h2", { textContent: title }), h("p", { textContent: text }), ...more);
}
