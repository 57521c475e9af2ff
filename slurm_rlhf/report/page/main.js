"use strict";
// The head of the page, the sections in their order, light and dark.

const SECTIONS = [["Curves", curvesSection], ["Time", timesSection], ["Who waits", timelineSection], ["Ranks", nodesSection], ["Weights", syncSection], ["Evaluation", evaluationSection], ["Samples", samplesSection], ["Events", historySection], ["Configuration", settingsSection]];

const OF_STAGES = ["Curves", "Time", "Configuration"];

function theme(name) {
  document.documentElement.dataset.theme = name;
}

const given = (value) => value !== null && value !== undefined;
const arrow = (before, after) => (given(before) ? `${number(before)} → ${number(after)}` : number(after));

// [value, name] of what one wants to know first.
function facts(run) {
  const s = run.summary;
  const losses = (run.curves.values.loss || []).filter(given);
  return [
    [`${s.steps ?? run.curves.steps.length} / ${s.total_steps ?? "–"}`, "steps"],
    [given(s.eval_before) || given(s.eval_after) ? arrow(s.eval_before, s.eval_after) : null, "evaluation, before → after"],
    isStage(run) ? [arrow(losses[0], losses[losses.length - 1]), "loss, first → last step"] : [arrow(s.reward_first, s.reward_last), "reward, first → last step"],
    isStage(run) ? [seconds(run.curves.seconds[run.curves.seconds.length - 1]), "time of the steps"] : [seconds(s.wall_s), "time of all sessions"],
    [number(run.tokens_per_s), isStage(run) ? "tokens per second" : "sampled tokens per second"],
    [given(run.mfu) ? percent(run.mfu) : null, "MFU"],
    [given(run.gpu_idle) ? percent(run.gpu_idle) : null, "GPUs idle"],
    [run.sessions.length > 1 ? `${run.sessions.length}, after ${run.requeues} requeues` : null, "sessions"],
    [run.restarts ? number(run.restarts) : null, "restarts in place"],
  ];
}

const badge = (run) => run.summary.status && el("span", { class: `badge ${run.summary.status}` }, run.summary.status);

function headOfOne(run) {
  const shown = facts(run).filter(([value]) => value !== null);
  return [el("div", { class: "tiles" }, shown.map(([value, name]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name)))),
    run.summary.error && el("div", { class: "error" }, run.summary.error)];
}

function headOfMany() {
  const all = RUNS.map(facts);
  const columns = all[0].map((_, index) => [[...new Set(all.map((each) => each[index][1]))].join(" / "), index]).filter(([, index]) => all.some((each) => each[index][0] !== null));
  const rows = RUNS.map((run, place) => el("tr", { title: run.root },
    el("td", {}, key(colour(DATA.groups.findIndex((group) => group.includes(place))), run.name)), el("td", {}, badge(run)), columns.map(([, index]) => el("td", {}, all[place][index][0] ?? "–"))));
  return el("div", { class: "card scroll" }, el("table", { class: "tight" }, el("thead", {}, el("tr", {}, ["run", "status", ...columns.map(([name]) => name)].map((name) => el("th", {}, name)))), el("tbody", {}, rows)));
}

function head() {
  const title = COMPARES ? `${RUNS.length} runs` : RUNS[0].name;
  document.title = `${title} · slurm_rlhf`;
  const toggle = el("button", { onclick: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark") }, "light / dark");
  const written = `written ${moment(DATA.made)} by slurm_rlhf ${DATA.version}`;
  document.getElementById("head").append(el("div", { class: "row" }, el("h1", {}, title), !COMPARES && badge(RUNS[0]), el("span", { style: "flex:1" }), toggle),
    el("p", { class: "soft small" }, COMPARES ? written : `${RUNS[0].root} · ${written}`), el("div", {}, COMPARES ? headOfMany() : headOfOne(RUNS[0])));
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", (event) => theme(event.matches ? "dark" : "light"));
  head();
  const made = SECTIONS.filter(([name]) => !stagesOnly() || OF_STAGES.includes(name)).map(([name, build]) => [name, build()]);
  document.getElementById("main").append(...made.map(([, part]) => part));
  document.getElementById("contents").append(el("div", { class: "inner" }, made.map(([name, part]) => el("a", { href: `#${part.id}` }, name))));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(() => redraws.forEach((redraw) => redraw()));
  });
  document.documentElement.dataset.ready = "true";
}

start();
