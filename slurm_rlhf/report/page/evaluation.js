"use strict";
// The newest evaluation of a run and those of `slurm-rlhf eval`: figures, their parts, and failed prompts.

const between = (found) => (found ? `${number(found.value)} [${number(found.low)}, ${number(found.high)}]` : "–");

function evaluationTable(heads, rows) {
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell)))))));
}

function partsTable(title, parts) {
  if (parts.length < 2) return null;
  return el("details", {}, el("summary", {}, `by ${title}`), evaluationTable([title, "prompts", "responses", "mean score, 95 %", "cut off", "tokens"],
    parts.map((part) => [part.name || "(none)", number(part.prompts), number(part.responses), between(part.mean), percent(part.truncated), number(part.response_tokens)])));
}

function failureCard(failure) {
  const facts = [`row ${failure.index}`, failure.source, failure.label === null ? null : `label ${typeof failure.label === "string" ? failure.label : JSON.stringify(failure.label)}`, failure.finish_reason, failure.error].filter(Boolean);
  return el("div", { class: "card sample" }, el("div", { class: "row" }, el("span", { class: "reward" }, `score ${number(failure.score)}`), el("span", { class: "soft small" }, facts.join(" · "))),
    el("pre", { class: "prompt" }, failure.prompt), el("pre", { class: "response" }, failure.response));
}

function dataSetParts(found) {
  const failures = found.failures.length ? el("details", {}, el("summary", {}, `${found.failed} of ${found.whole.prompts} prompts have no correct response; ${found.failures.length} of them`), found.failures.map(failureCard)) : null;
  const parts = [["source", found.sources], ["tokens of the prompt", found.prompt_lengths], ["tokens of the response", found.response_lengths]].map(([title, each]) => partsTable(title, each));
  return el("div", {}, el("h3", {}, found.name), parts, failures);
}

function evaluationCard(run, each) {
  const rows = each.datasets.map((found) => [found.name, number(found.whole.prompts), `${found.samples} ${found.temperature ? `t=${found.temperature}` : "greedy"}`, between(found.whole.mean),
    Object.entries(found.pass_at).map(([k, value]) => `${k}: ${number(value.value)}`).join(", "), between(found.majority), percent(found.whole.truncated), number(found.whole.response_tokens)]);
  return el("div", { class: "card" }, el("h3", {}, [COMPARES ? run.name : null, each.title].filter(Boolean).join(", ")),
    evaluationTable(["data set", "prompts", "samples", "mean score, 95 %", "pass@k", "majority", "cut off", "tokens"], rows), each.datasets.map(dataSetParts));
}

function evaluationSection() {
  const cards = RUNS.flatMap((run) => run.evaluations.map((each) => evaluationCard(run, each)));
  return section("evaluation", "Evaluation", cards.length ? "The newest of the run, and those of slurm-rlhf eval. All responses are in the folder eval." : null,
    cards.length ? cards : empty("Nothing was evaluated: eval.datasets names data sets."));
}
