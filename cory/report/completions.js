"use strict";
// The completions: for each query its chains side by side, with filters, order, search, and tokens by log-ratio.

const AT_ONCE = 20; // queries, before a button shows more
const STAGES = {
  "": "any", fixed: "before and after training", training: "during training", evaluation: "evaluation",
};
const ORDERS = {
  "": "as recorded", best: "reward, highest first", worst: "reward, lowest first", kl: "KL, highest first",
  apart: "difference in reward, largest first",
};
const LONG = 1200, LONG_LINES = 24; // characters and lines of a text that is shown at once
const STEPS = [0.1, 0.5, 1.5]; // nats of a log-ratio from which a token has the next shade

/** Shows the completions in `place`. */
function showCompletions(data, place) {
  const methods = [...new Set(data.chains.map((chain) => chain.method))];
  const seeds = [...new Set(data.chains.map((chain) => chain.seed).filter((seed) => seed !== null))];
  const kinds = new Set(data.chains.map(kindOf));
  const state = {
    methods: new Set(methods.keys()), stage: "", seed: seeds.length > 1 ? String(seeds[0]) : "", order: "",
    words: [], tokens: false, prompts: false, count: AT_ONCE,
  };
  const results = element("div", { className: "queries" });
  const status = element("p", { className: "note", role: "status" });
  const shades = element("p", { className: "note key", hidden: true }, "Log-ratio to the base, per token:",
    ["less", "more"].flatMap((side) => STEPS.map((step, i) => element("span", { className: `token ${side}${i + 1}` },
      `${side === "less" ? `−${step} or less` : `+${step} or more`}`))), "nats. Hover over a token for its value.");
  const more = element("button", { type: "button" }, "Show more");

  function draw() {
    const queries = inOrder(state, grouped(state, data, methods));
    const chains = queries.reduce((sum, query) => sum + query.chains.length, 0);
    const queryWord = queries.length === 1 ? "query" : "queries";
    status.textContent = `${chains} of ${data.chains.length} chains, ${queries.length} ${queryWord}.` +
      (data.left_out ? ` ${data.left_out} more are left out to keep this file small.` : "");
    results.replaceChildren(...queries.slice(0, state.count).map((query) => queryView(data, state, query)));
    more.hidden = queries.length <= state.count;
    shades.hidden = !state.tokens;
  }
  const set = (key) => (value) => { state[key] = value; state.count = AT_ONCE; draw(); };

  more.addEventListener("click", () => {
    const next = state.count;
    state.count += AT_ONCE;
    draw();
    results.children[next].querySelector("h3").focus();
  });
  const search = element("input", { type: "search", placeholder: "words of queries and responses" });
  let waiting;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => set("words")(search.value.toLowerCase().split(/\s+/).filter(Boolean)), 120);
  });
  const stages = Object.entries(STAGES).filter(([stage]) => stage === "" || kinds.has(stage));
  let methodControl = methods.length > 1
    ? choices("Methods", methods, state.methods, () => { state.count = AT_ONCE; draw(); }) : [];
  if (methods.length > 4) {
    methodControl = element("details", { className: "choose" },
      element("summary", {}, `Methods (${methods.length})`), methodControl);
  }
  place.append(
    element("div", { className: "controls" },
      field("Search", search, "wide"),
      select("Order", Object.entries(ORDERS), "", set("order")),
      stages.length > 2 ? select("Stage", stages, "", set("stage")) : [],
      seeds.length > 1
        ? select("Seed", [["", "all"], ...seeds.map((seed) => [String(seed), String(seed)])], state.seed, set("seed")) : [],
      checkbox("Tokens against the base", state.tokens, set("tokens")),
      checkbox("Prompts", state.prompts, set("prompts")),
      methodControl,
    ),
    status, shades, results, more,
  );
  draw();
}

function kindOf(chain) {
  if (chain.stage === "evaluation") return "evaluation";
  return typeof chain.stage === "number" ? "training" : "fixed";
}

/** The chains that pass the filters, by query. */
function grouped(state, data, methods) {
  const queries = new Map();
  for (const chain of data.chains) {
    if (!state.methods.has(methods.indexOf(chain.method))) continue;
    if (state.stage && kindOf(chain) !== state.stage) continue;
    if (state.seed && chain.seed !== null && String(chain.seed) !== state.seed) continue;
    if (state.words.length) {
      chain.found ??= [data.queries[chain.query], ...chain.steps.flatMap((step) => [step.prompt ?? "", step.text])]
        .join("\n").toLowerCase();
      if (!state.words.every((word) => chain.found.includes(word))) continue;
    }
    if (!queries.has(chain.query)) queries.set(chain.query, { query: chain.query, chains: [] });
    queries.get(chain.query).chains.push(chain);
  }
  return [...queries.values()];
}

/** Queries, and the chains of each, in the order that is asked for; those without a number come last. */
function inOrder(state, queries) {
  if (!state.order) return queries;
  const key = state.order === "kl" ? "kl" : "reward", sign = state.order === "worst" ? -1 : 1;
  const rank = ({ steps }) => (steps.at(-1)[key] === null ? -Infinity : sign * steps.at(-1)[key]);
  for (const query of queries) {
    const ranks = query.chains.map(rank).filter(Number.isFinite);
    query.rank = Math.max(...ranks) - (state.order === "apart" ? Math.min(...ranks) : 0);
    if (state.order !== "apart") query.chains.sort((a, b) => rank(b) - rank(a));
  }
  return queries.sort((a, b) => b.rank - a.rank || a.query - b.query); // of two without a number, the first one first
}

function queryView(data, state, query) {
  return element("article", { className: query.chains.length > 1 ? "query several" : "query" },
    element("h3", { className: "text-of", dir: "auto", tabIndex: -1 }, readable(data.queries[query.query])),
    element("div", { className: "chains" }, query.chains.map((chain) => chainView(state, chain))));
}

function chainView(state, chain) {
  const stage = typeof chain.stage === "number" ? `iteration ${chain.stage}`
    : { before: "before training", after: "after training" }[chain.stage] ?? "";
  const title = [chain.method, chain.seed === null ? "" : `seed ${chain.seed}`, stage].filter(Boolean).join(" · ");
  return element("div", { className: "chain" },
    element("h4", {}, readable(title)), chain.steps.map((step) => stepView(state, step)));
}

function stepView(state, step) {
  const who = [step.role, step.agent].filter(Boolean).join(" · ");
  const numbers = [element("span", {}, `reward ${number(step.reward, 2, true)}`)];
  if (step.team !== null) numbers.push(element("span", {}, `team reward ${number(step.team, 2, true)}`));
  if (step.kl !== null) numbers.push(element("span", {}, `KL ${number(step.kl)}`));
  const made = element("div", { className: "step" },
    element("p", { className: "who" }, element("span", {}, readable(who)), element("span", { className: "numbers" }, numbers)));
  if (step.prompt !== null) {
    made.append(element("details", { className: "prompt", open: state.prompts },
      element("summary", {}, "Prompt"), textBox("Prompt", step.prompt, readable(step.prompt))));
  }
  const nodes = state.tokens && step.tokens.length ? step.tokens.map((token, i) => tokenView(token, step.ratios[i]))
    : step.text ? readable(step.text) : [element("span", { className: "none" }, "no text")];
  made.append(textBox("Response", step.text, nodes));
  if (state.tokens) made.append(element("p", { className: "largest" }, largest(step)));
  return made;
}

/** A text as it is, with its own direction; a long one scrolls. */
function textBox(name, text, nodes) {
  const long = text.length > LONG || text.split("\n").length > LONG_LINES;
  const scrolls = long ? { tabIndex: 0, role: "group", "aria-label": name } : {};
  return element("div", { className: long ? "text-of long" : "text-of", dir: "auto", ...scrolls }, nodes);
}

/** A token, shaded by how much likelier (more) or less likely (less) it is than under the base. */
function tokenView(token, ratio) {
  const size = ratio === null ? 0 : STEPS.filter((step) => Math.abs(ratio) >= step).length;
  const shade = size ? ` ${ratio > 0 ? "more" : "less"}${size}` : "";
  return element("span", { className: `token${shade}`, title: `${number(ratio, 2, true)} nats` }, readable(token));
}

/** The tokens whose probability has moved most, in words. */
function largest(step) {
  if (!step.tokens.length) return "No tokens are stored with this response.";
  const moved = step.tokens.map((token, i) => [token.trim(), step.ratios[i]]).filter(([, ratio]) => ratio !== null);
  moved.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  if (!moved.length || Math.abs(moved[0][1]) < 0.005) return "Each token is as likely as under the base.";
  const parts = moved.slice(0, 3).map(([token, ratio]) => ["“", readable(token), `” ${number(ratio, 2, true)}`]);
  return ["log-ratio: ", ...parts.flatMap((part, i) => (i ? [", ", ...part.flat()] : part.flat()))];
}
