"use strict";
// The curves: which metrics share a plot, and how several runs do.

// [title, {metric: its name next to the title} or a pattern, options]; `absent`: why a run may not have the plot.
const PLOTS = [
  ["Loss", { loss: "in training", "eval/loss": "measured" }],
  ["Pairs in the right order", { preferred: "in training", "eval/preferred": "measured", "eval/accuracy": "measured" }, { format: percent }],
  ["Margin of the pairs", { margin: "in training", "eval/margin": "measured" }],
  ["Log-probs of the answers", { chosen_logprobs: "chosen", rejected_logprobs: "rejected" }],
  ["Calibration error", { "eval/calibration_error": "measured" }, { format: percent }],
  ["Reward", { reward: "reward", accuracy: "accuracy" }, { bands: { reward: ["reward_std", "reward_min", "reward_max"] } }],
  ["Evaluation", /^eval(\/[^/]+\/(mean|maj@\d+))?$/, { exact: true, absent: "no eval.datasets" }],
  ["KL to the reference", { kl: "KL" }, { absent: "no reference: algo.kl.init_coef = 0" }],
  ["Entropy", { entropy: "entropy" }],
  ["Response length, tokens", { response_length: "length" }],
  ["Responses cut off", { truncated: "cut off", repetition: "for repeating itself" }, { format: percent }],
  ["Turns of an episode", { turns: "turns", "tools/calls": "calls of tools" }],
  ["Calls of tools with an error", /^tools\/(?!calls)/, { format: percent }],
  ["Episodes lost", { lost: "share" }, { format: percent }],
  ["Clip fraction", { clip_fraction: "policy", value_clip_fraction: "value" }, { format: percent }],
  ["KL of the updates", { approx_kl: "all updates of a step", first_approx_kl: "first update" }],
  ["Engine against actor: difference of log-probs", { rollout_logprob_diff: "mean", rollout_logprob_diff_max: "largest" }, { log: true, absent: "no token is of the present policy" }],
  ["Age of the tokens, updates", { staleness_max: "oldest" }, { absent: "vllm.sync_mode = drain: every token is new" }],
  ["Stale tokens and mixed responses", { stale_tokens: "stale tokens", mixed_responses: "mixed responses" }, { format: percent }],
  ["Correction: effective sample size", { "correction/ess": "share of the tokens" }, { corrects: true, absent: "algo.correction weighs nothing" }],
  ["Correction: weights cut or dropped", { "correction/truncated": "cut", "correction/dropped": "dropped" }, { corrects: true, format: percent }],
  ["Correction: distance of engine and actor", { "correction/k1": "k1", "correction/k3": "k3", "correction/chi2": "chi-square", "correction/log_rho_mean": "mean log ratio" }, { corrects: true }],
  ["Parts of the reward", /^(reward|shaping)\//],
  ["Policy loss", { policy_loss: "loss" }],
  ["Value loss", { value_loss: "loss" }],
  ["Value and return", { value: "value", return: "return" }],
  ["Gradient norm", { actor_grad_norm: "actor", critic_grad_norm: "critic", grad_norm: "model" }],
  ["Learning rate", { actor_lr: "actor", critic_lr: "critic", lr: "model" }],
  ["Ratio of new to old probability", { ratio: "all updates of a step", first_ratio: "first update" }],
  ["Groups with one reward", { reward_constant: "share" }, { format: percent }],
  ["Tokens per second", { "perf/tokens_per_s": "whole step", "perf/rollout_tokens_per_s": "while sampling" }],
  ["Tokens per second of each engine", /^perf\/engine\/\d+\/tokens_per_s$/],
  ["GPUs idle", /^perf\/gpu_idle/, { format: percent }],
  ["Model FLOPs utilisation", { "perf/mfu": "whole step", "perf/mfu_update": "updates" }, { format: percent }],
];
// Metrics that a pattern finds, as people say them.
const SAID = [
  [/^eval$/, "all data sets"], [/^eval\/(.+)\/mean$/, "$1"], [/^eval\/(.+)\/maj@(\d+)$/, "$1, majority of $2"], [/^reward\/(.+)$/, "$1"],
  [/^shaping\/(.+)$/, "shaping: $1"], [/^perf\/engine\/(\d+)\/tokens_per_s$/, "engine $1"], [/^perf\/gpu_idle$/, "all roles"], [/^perf\/gpu_idle_(.+)$/, "$1"],
];
const ON_CURVES = ["resume", "stop", "requeue", "restart", "hang", "error", "warning", "engine lost", "engine joined"];

// Stages (sft, rm, dpo) sample nothing, and have no roles.
const isStage = (run) => run.curves.values.loss !== undefined;
const stagesOnly = () => RUNS.every(isStage);
const recorded = (run, metric) => (run.curves.values[metric] ? present(run.curves.values[metric]) > 0 : false);
const allMetrics = () => [...new Set(RUNS.flatMap((run) => Object.keys(run.curves.values)))].sort();

function fitting(names) {
  if (!(names instanceof RegExp)) return Object.entries(names).filter(([metric]) => allMetrics().includes(metric));
  return allMetrics().filter((metric) => names.test(metric)).map((metric) => [metric, said(metric)]);
}

function said(metric) {
  const [pattern, words] = SAID.find(([each]) => each.test(metric)) || [/_/g, " "];
  return metric.replace(pattern, words);
}

// Metrics with the same numbers in all runs are one line with both names, as the mean over one data set and that of the set.
function together(metrics) {
  const found = new Map();
  for (const [metric, name] of metrics) {
    const numbers = JSON.stringify(RUNS.map((run) => run.curves.values[metric] || null));
    const same = found.get(numbers);
    found.set(numbers, same ? { ...same, name: `${same.name}, ${name}`, about: `${same.about}, ${metric}` } : { metric, name, about: metric });
  }
  return [...found.values()];
}

function points(run, metric) {
  const x = run.curves.steps.slice();
  const y = (run.curves.values[metric] || []).slice();
  if (metric === "eval" && run.summary.eval_before !== null && run.summary.eval_before !== undefined && x.length) {
    x.unshift(0);
    y.unshift(run.summary.eval_before);
  }
  if (!metric.startsWith("eval")) return { x, y, runs: [run] };
  const kept = x.map((at, index) => [at, y[index]]).filter((pair) => !missing(pair[1]));
  return { x: kept.map((pair) => pair[0]), y: kept.map((pair) => pair[1]), runs: [run] };
}

// The curves of one metric: of one run, or of every group of runs that are alike, with their mean and range.
function compared(metric) {
  return DATA.groups.flatMap((group, index) => {
    const members = group.filter((place) => recorded(RUNS[place], metric)).map((place) => ({ ...points(RUNS[place], metric), name: RUNS[place].name }));
    if (!members.length) return [];
    if (members.length === 1) return [{ ...members[0], colour: colour(index) }];
    const at = [...new Set(members.flatMap((each) => each.x))].sort((a, b) => a - b);
    const values = at.map((step) => members.map((each) => each.y[each.x.indexOf(step)]).filter((value) => !missing(value)));
    const kept = at.map((step, place) => place).filter((place) => values[place].length);
    const mean = { name: `${members.map((each) => each.name).join(", ")}: mean`, x: kept.map((place) => at[place]), colour: colour(index), runs: members.flatMap((each) => each.runs) };
    mean.y = kept.map((place) => values[place].reduce((sum, value) => sum + value, 0) / values[place].length);
    mean.low = kept.map((place) => Math.min(...values[place]));
    mean.high = kept.map((place) => Math.max(...values[place]));
    return [...members.map((each) => ({ ...each, colour: colour(index), thin: true })), mean];
  });
}

const curveEvents = () => (COMPARES ? [] : RUNS[0].events.filter((event) => ON_CURVES.includes(event.event)));

// The deviation around the mean, within the smallest and the largest; these are a wider band.
function bands(run, names) {
  const [deviation, least, most] = names.map((name) => run.curves.values[name]);
  if (!deviation || !least || !most) return {};
  const mean = run.curves.values.reward;
  const edge = (sign, bound, pick) => mean.map((value, index) => (missing(value) || missing(deviation[index]) ? null : pick(bound[index], value + sign * deviation[index])));
  return { low: edge(-1, least, Math.max), high: edge(1, most, Math.min), least, most };
}

function plotsOf(title, metrics, options) {
  const found = together(metrics);
  if (COMPARES) {
    const named = (each) => (found.length > 1 ? `${title}: ${each.name}` : title);
    return found.map((each) => ({ title: named(each), series: compared(each.metric).map((line) => ({ ...line, about: each.about })), events: [], ...options })).filter((plot) => plot.series.length);
  }
  const series = found.filter(({ metric }) => recorded(RUNS[0], metric)).map(({ metric, name, about }, index) => (
    { name, about, ...points(RUNS[0], metric), colour: colour(index), ...(options && options.bands && options.bands[metric] ? bands(RUNS[0], options.bands[metric]) : {}) }));
  return series.length ? [{ title, series, events: curveEvents(), ...options }] : [];
}

function curvesSection() {
  const used = new Set();
  const plots = [];
  const absent = [];
  for (const [title, names, options] of PLOTS) {
    const metrics = options && options.corrects && !RUNS.some((run) => run.corrected) ? [] : fitting(names);
    metrics.forEach(([metric]) => used.add(metric));
    Object.values((options && options.bands) || {}).flat().forEach((metric) => used.add(metric));
    const found = plotsOf(title, metrics, options);
    plots.push(...found);
    if (!found.length && options && options.absent && !stagesOnly()) absent.push(`${title} (${options.absent})`);
  }
  if (!plots.length) return section("curves", "Curves", null, empty("No step is done yet."));
  const others = allMetrics().filter((metric) => !used.has(metric) && !metric.startsWith("time/"));
  return section("curves", "Curves", `${COMPARES ? comparisonWords() : stagesOnly() ? "" : "Dashed lines: stops, requeues, warnings, errors. Reward: its deviation, and its range, as bands."} Every number is in metrics.jsonl; slurm-rlhf docs metrics says what each is.`,
    viewBar(), el("div", { class: "grid" }, plots.map(linePlot)),
    absent.length ? el("p", { class: "soft small" }, `Not in this run: ${absent.join("; ")}.`) : null,
    others.length ? moreCurves(others) : null);
}

function comparisonWords() {
  const alike = DATA.groups.filter((group) => group.length > 1).length;
  return alike ? "Runs that differ in nothing but their seed share a colour: thin lines, their mean, and their range." : "One colour a run.";
}

function moreCurves(metrics) {
  const grid = el("div", { class: "grid" });
  const fill = (event) => {
    if (!event.target.open || grid.childElementCount) return;
    grid.append(...metrics.flatMap((metric) => plotsOf(metric, [[metric, metric]], {})).map(linePlot));
  };
  return el("details", { ontoggle: fill }, el("summary", {}, `${metrics.length} more metrics`), grid);
}
