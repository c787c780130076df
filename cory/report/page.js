"use strict";
// What curves.js and completions.js share, and the start of the page. All text reaches the page as text nodes.

// Characters that act on their surroundings: control (but line breaks and tabs), bidirectional, lone surrogates, tags.
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\u{e0000}-\u{e007f}]|\p{Surrogate}/gu;

/** An element with properties (`className`) or attributes (`aria-label`), and children: elements and text. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat());
  return made;
}

/** Text as nodes, with an escape in place of each character that acts on its surroundings. */
function readable(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(ACTING)) {
    const code = match[0].codePointAt(0);
    const shown = code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
    nodes.push(text.slice(end, match.index), element("span", { className: "escape" }, shown));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

/** A number with its sign's own character; a dash where there is none. */
function number(value, digits = 2, signed = false) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size >= 1e5 || size < 10 ** -digits / 2) ? size.toExponential(1) : size.toFixed(digits);
  return (value < 0 ? "−" : signed ? "+" : "") + text;
}

/** A checkbox with its label; `change` gets whether it is checked. */
function checkbox(text, checked, change) {
  const box = element("input", { type: "checkbox", checked });
  box.addEventListener("change", () => change(box.checked));
  return element("label", {}, box, element("span", {}, readable(text)));
}

/** Checkboxes for the names, of which `shown` holds the indices that are checked. */
function choices(title, names, shown, change) {
  const boxes = names.map((name, index) =>
    checkbox(name, shown.has(index), (checked) => {
      if (checked) shown.add(index);
      else shown.delete(index);
      change();
    }),
  );
  return element("fieldset", {}, element("legend", {}, title), element("div", { className: "choices" }, boxes));
}

/** A control below its label. */
function field(title, control, wide = "") {
  control.id = `control-${title.toLowerCase().replaceAll(" ", "-")}`;
  return element("div", { className: `field ${wide}` }, element("label", { htmlFor: control.id }, title), control);
}

/** A labelled select; options are [value, text], and `change` gets the value. */
function select(title, options, value, change) {
  const made = element("select", {}, options.map(([key, text]) => new Option(text, key, false, key === value)));
  made.addEventListener("change", () => change(made.value));
  return field(title, made);
}

/** The button that switches between light and dark; the system's choice holds until then. */
function themeButton(button, redraw) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
    redraw();
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

(function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const places = ["curves", "completions"].map((id) => document.getElementById(id));
  const redraw = places[0] ? showCurves(data, places[0]) : () => {};
  if (places[1]) showCompletions(data, places[1]);
  themeButton(document.getElementById("theme"), redraw);
})();
