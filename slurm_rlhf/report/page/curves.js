"use strict";
// The curves: which metrics share a plot, and how several runs do.

// [title, metrics or a pattern, options]; `asked`: what a plot is missed for, if the run has not recorded it.
const PLOTS = [
  ["Reward", ["reward", "accuracy"]],
  ["Evaluation", /^eval(\/[^/]+\/(mean|maj@\d+))?$/, { asked: "no eval.datasets" }],
  ["KL to the reference", ["kl"]],
  ["Entropy", ["entropy"]],
  ["Response length, tokens", ["response_length"]],
  ["Responses cut off", ["truncated", "repetition"], { format: percent }],
  ["Clip fraction", ["clip_fraction", "value_clip_fraction"], { format: percent }],
  ["KL of the updates", ["approx_kl", "first_approx_kl"]],
  ["Engine against actor: difference of log-probs", ["rollout_logprob_diff", "rollout_logprob_diff_max"], { log: true, asked: "algo.correction.bypass is on" }],
  ["Age of the tokens, updates", ["staleness_max", "staleness_mean", "staleness"], { asked: "vllm.sync_mode = drain: every token is new" }],
  ["Stale tokens and mixed responses", ["stale_tokens", "mixed_responses"], { format: percent }],
  ["Correction: effective sample size", ["correction/ess"], { asked: "algo.correction is off" }],
  ["Correction: weights cut or dropped", ["correction/truncated", "correction/dropped", "correction/masked"], { format: percent }],
  ["Correction: distance of engine and actor", ["correction/k1", "correction/k3", "correction/chi2", "correction/log_rho_mean"]],
  ["Parts of the reward", /^(reward|shaping)\//],
  ["Policy loss", ["policy_loss"]],
  ["Value loss", ["value_loss"]],
  ["Value and return", ["value", "return"]],
  ["Gradient norm", ["actor_grad_norm", "critic_grad_norm"]],
  ["Learning rate", ["actor_lr", "critic_lr"]],
  ["Ratio of new to old probability", ["ratio", "first_ratio"]],
  ["Groups with one reward", ["reward_constant"], { format: percent }],
  ["Tokens per second", ["perf/tokens_per_s", "perf/rollout_tokens_per_s"]],
  ["Tokens per second of each engine", /^perf\/engine\/\d+\/tokens_per_s$/],
  ["GPUs idle", /^perf\/gpu_idle/, { format: percent }],
  ["Model FLOPs utilisation", ["perf/mfu", "perf/mfu_update"], { format: percent }],
];
const ON_CURVES = ["resume", "stop", "requeue", "restart", "hang", "error", "warning", "engine lost", "engine joined"];

const recorded = (run, metric) => (run.curves.values[metric] ? present(run.curves.values[metric]) > 0 : false);
const allMetrics = () => [...new Set(RUNS.flatMap((run) => Object.keys(run.curves.values)))].sort();
const fitting = (names) => (names instanceof RegExp ? allMetrics().filter((metric) => names.test(metric)) : names.filter((name) => allMetrics().includes(name)));

function points(run, metric) {
  const x = run.curves.steps.slice();
  const y = (run.curves.values[metric] || []).slice();
  if (metric === "eval" && run.summary.eval_before !== null && run.summary.eval_before !== undefined && x.length) {
    x.unshift(0);
    y.unshift(run.summary.eval_before);
  }
  if (!metric.startsWith("eval")) return { x, y };
  const kept = x.map((at, index) => [at, y[index]]).filter((pair) => pair[1] !== null && pair[1] !== undefined);
  return { x: kept.map((pair) => pair[0]), y: kept.map((pair) => pair[1]) };
}

// The curves of one metric: of one run, or of every group of runs that are alike, with their mean and range.
function compared(metric) {
  return DATA.groups.flatMap((group, index) => {
    const members = group.filter((place) => recorded(RUNS[place], metric)).map((place) => ({ ...points(RUNS[place], metric), name: RUNS[place].name }));
    if (!members.length) return [];
    if (members.length === 1) return [{ ...members[0], colour: colour(index) }];
    const at = [...new Set(members.flatMap((each) => each.x))].sort((a, b) => a - b);
    const values = at.map((step) => members.map((each) => each.y[each.x.indexOf(step)]).filter((value) => value !== null && value !== undefined));
    const kept = at.map((step, place) => place).filter((place) => values[place].length);
    const mean = { name: `${members.map((each) => each.name).join(", ")}: mean`, x: kept.map((place) => at[place]), colour: colour(index) };
    mean.y = kept.map((place) => values[place].reduce((sum, value) => sum + value, 0) / values[place].length);
    mean.low = kept.map((place) => Math.min(...values[place]));
    mean.high = kept.map((place) => Math.max(...values[place]));
    return [...members.map((each) => ({ ...each, colour: colour(index), thin: true })), mean];
  });
}

const curveEvents = () => (COMPARES ? [] : RUNS[0].events.filter((event) => ON_CURVES.includes(event.event)));

function plotsOf(title, metrics, options) {
  if (COMPARES) return metrics.map((metric) => ({ title: metric, series: compared(metric), events: [], ...options })).filter((plot) => plot.series.length);
  const series = metrics.filter((metric) => recorded(RUNS[0], metric)).map((metric, index) => ({ name: metric, ...points(RUNS[0], metric), colour: colour(index) }));
  return series.length ? [{ title, series, events: curveEvents(), ...options }] : [];
}

function curvesSection() {
  const used = new Set();
  const plots = [];
  const missing = [];
  for (const [title, names, options] of PLOTS) {
    const metrics = fitting(names);
    metrics.forEach((metric) => used.add(metric));
    const found = plotsOf(title, metrics, options);
    plots.push(...found);
    if (!found.length && options && options.asked) missing.push(`${title} (${options.asked})`);
  }
  if (!plots.length) return section("curves", "Curves", null, empty("No step is done yet."));
  const others = allMetrics().filter((metric) => !used.has(metric) && !metric.startsWith("time/"));
  return section("curves", "Curves", COMPARES ? comparisonWords() : "Every number is in metrics.jsonl. Dashed lines: stops, requeues, warnings, errors.",
    el("div", { class: "grid" }, plots.map(linePlot)),
    missing.length ? el("p", { class: "soft small" }, `Not recorded in this run: ${missing.join("; ")}.`) : null,
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
    grid.append(...metrics.flatMap((metric) => plotsOf(metric, [metric], {})).map(linePlot));
  };
  return el("details", { ontoggle: fill }, el("summary", {}, `${metrics.length} more metrics`), grid);
}
