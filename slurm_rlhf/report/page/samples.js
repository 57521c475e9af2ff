"use strict";
// Prompts and responses with their rewards: a plot over the steps, a search, tokens coloured by log-prob.

const AT_ONCE = 12;
const COLOURINGS = {
  "log-prob of the engine": (sample, place) => [sample.logprobs[place], (value) => Math.min(1, -value / 5)],
  "actor − engine": (sample, place) => [sample.actor_logprobs.length ? sample.actor_logprobs[place] - sample.logprobs[place] : null, (value) => Math.max(-1, Math.min(1, value * 5))],
  "no colour": () => [null, () => 0],
};

const allSamples = RUNS.flatMap((run, place) => run.samples.map((sample) => ({ ...sample, run: place })));

function rewardPlot(open) {
  const title = "Rewards of the samples";
  const host = el("div", { class: "plot", "data-plot": title });
  const shown = allSamples.filter((sample) => sample.reward !== null);
  const plot = { title, series: [{ name: "reward", x: shown.map((sample) => sample.step), y: shown.map((sample) => sample.reward), colour: colour(0) }] };
  const draw = drawn(host, (width) => {
    const height = Math.max(130, Math.min(210, width * 0.3));
    const scale = scales(plot, width, height);
    const dots = shown.map((sample) => svg("circle", {
      class: "mark", cx: scale.x(sample.step), cy: scale.y(sample.reward), r: 4, fill: COMPARES ? colour(sample.run) : colour(0), "fill-opacity": 0.55, style: "cursor:pointer",
      onclick: () => open(sample), ...tipped(el("b", {}, `step ${sample.step}: reward ${number(sample.reward)}`), sample.prompt.slice(-120), sample.response.slice(0, 200)),
    }));
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title }, axes(scale, width, height, number), dots);
  });
  queueMicrotask(draw);
  return el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, title), el("span", { class: "soft small" }, "a dot opens its sample")), host);
}

function highlighted(text, wanted) {
  if (!wanted) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}

function tokenSpans(sample, colouring) {
  const observed = new Set();
  for (let pair = 0; pair < (sample.observed || []).length; pair += 2) for (let place = sample.observed[pair]; place < sample.observed[pair + 1]; place++) observed.add(place);
  return sample.tokens.map((token, place) => {
    if (observed.has(place)) return el("span", { class: "token observed", ...tipped("written by the environment") }, token);
    const [value, strength] = COLOURINGS[colouring](sample, place);
    const known = value !== null && value !== undefined && !Number.isNaN(value);
    const amount = known ? strength(value) : 0;
    const fill = amount < 0 ? "var(--c0)" : "var(--c4)";
    const style = amount ? `background:color-mix(in srgb, ${fill} ${Math.round(70 * Math.abs(amount))}%, transparent)` : null;
    const tip = known ? tipped(`${JSON.stringify(token)}\nlog-prob ${number(sample.logprobs[place])}${sample.actor_logprobs.length ? `, of the actor ${number(sample.actor_logprobs[place])}` : ""}`) : {};
    return el("span", { class: "token", style, ...tip }, token);
  });
}

function sampleCard(sample, state) {
  const wanted = state.wanted;
  const coloured = sample.tokens.length && (state.colouring !== "no colour" || (sample.observed || []).length) && !wanted;
  const facts = [`step ${sample.step}`, COMPARES ? RUNS[sample.run].name : null, `row ${sample.prompt_index}`, sample.label === null ? null : `label ${sample.label}`, sample.score === null ? null : `score ${number(sample.score)}`,
    sample.advantage === null ? null : `advantage ${number(sample.advantage)}`, `ended by ${sample.finish_reason}`, `engine ${sample.engine}`, `policy ${sample.version}`].filter(Boolean);
  return el("div", { class: "card sample" },
    el("div", { class: "row" }, el("span", { class: "reward" }, `reward ${number(sample.reward)}`), el("span", { class: "soft small" }, facts.join(" · ")),
      el("button", { onclick: () => state.only(sample.prompt_index) }, "same prompt")),
    sample.failed ? el("div", { class: "small" }, `its reward failed: ${sample.failed}`) : null,
    el("pre", { class: "prompt" }, highlighted(sample.prompt, wanted)),
    el("pre", { class: "response" }, coloured ? tokenSpans(sample, state.colouring) : highlighted(sample.response, wanted)));
}

function samplesSection() {
  if (!allSamples.length) return section("samples", "Samples", null, empty("No responses were kept: logger.samples says how many of each step."));
  const list = el("div", { id: "sample-list" });
  const found = el("span", { class: "soft small" });
  const search = el("input", { type: "search", placeholder: "search in prompts and responses", "aria-label": "search in prompts and responses" });
  const orders = { "newest first": (a, b) => b.step - a.step, "oldest first": (a, b) => a.step - b.step, "highest reward": (a, b) => b.reward - a.reward, "lowest reward": (a, b) => a.reward - b.reward };
  const order = el("select", { "aria-label": "order" }, Object.keys(orders).map((name) => el("option", {}, name)));
  const colouring = el("select", { "aria-label": "colour of the tokens" }, Object.keys(COLOURINGS).map((name) => el("option", {}, name)));
  const state = { wanted: "", colouring: colouring.value, prompt: null, most: AT_ONCE, only: (prompt) => { state.prompt = state.prompt === prompt ? null : prompt; show(); } };
  const show = (first) => {
    state.wanted = search.value.toLowerCase();
    state.colouring = colouring.value;
    const fits = allSamples.filter((sample) => (state.prompt === null || sample.prompt_index === state.prompt) && (!state.wanted || sample.prompt.toLowerCase().includes(state.wanted) || sample.response.toLowerCase().includes(state.wanted)));
    const sorted = [...(first ? [first] : []), ...fits.filter((sample) => sample !== first).sort(orders[order.value])];
    found.textContent = `${fits.length} of ${allSamples.length}${state.prompt === null ? "" : `, prompt of row ${state.prompt}`}`;
    list.replaceChildren(...sorted.slice(0, state.most).map((sample) => sampleCard(sample, state)));
    if (sorted.length > state.most) list.append(el("p", {}, el("button", { onclick: () => { state.most += 4 * AT_ONCE; show(first); } }, `${sorted.length - state.most} more`)));
  };
  for (const control of [search, order, colouring]) control.addEventListener("input", () => { state.most = AT_ONCE; show(); });
  const open = (sample) => { show(sample); list.scrollIntoView({ block: "start" }); };
  show();
  const kept = RUNS.map((run) => run.samples_of).reduce((sum, count) => sum + count, 0);
  const about = "Drawn from each step by the seed. Red tokens were improbable; with actor − engine: red where the actor thinks more of a token, blue where less.";
  const all = kept > allSamples.length ? el("p", { class: "soft small" }, `All ${kept} of them are in samples.jsonl.`) : null;
  return section("samples", "Samples", about, rewardPlot(open), el("div", { class: "row", style: "margin-top:0.7rem" }, search, order, colouring, found), all, list);
}
