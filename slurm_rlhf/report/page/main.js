"use strict";
// The head of the page, the sections in their order, light and dark.

const SECTIONS = [["Curves", curvesSection], ["Time", timesSection], ["Who waits", timelineSection], ["Ranks", nodesSection], ["Weights", syncSection], ["Samples", samplesSection], ["Events", historySection], ["Configuration", settingsSection]];

function theme(name) {
  document.documentElement.dataset.theme = name;
}

function tiles(run) {
  const s = run.summary;
  const arrow = (before, after) => (before === null || before === undefined ? number(after) : `${number(before)} → ${number(after)}`);
  const found = [[`${s.steps ?? run.curves.steps.length} / ${s.total_steps ?? "–"}`, "steps"]];
  if (s.eval_before !== null && s.eval_before !== undefined) found.push([arrow(s.eval_before, s.eval_after), "evaluation, before → after"]);
  found.push([arrow(s.reward_first, s.reward_last), "reward, first → last step"], [seconds(s.wall_s), "wall time of all sessions"], [number(run.tokens_per_s), "sampled tokens per second"]);
  if (run.mfu !== null) found.push([percent(run.mfu), "MFU"]);
  if (run.gpu_idle !== null) found.push([percent(run.gpu_idle), "GPUs idle"]);
  if (run.sessions.length > 1) found.push([String(run.sessions.length), `sessions, ${run.requeues} requeues`]);
  return el("div", { class: "tiles" }, found.map(([value, name]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name))));
}

function head() {
  const title = COMPARES ? `${RUNS.length} runs` : RUNS[0].name;
  document.title = `${title} · slurm_rlhf`;
  const badge = (run) => run.summary.status && el("span", { class: `badge ${run.summary.status}` }, run.summary.status);
  const toggle = el("button", { onclick: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark") }, "light / dark");
  const one = (run, index) => [
    COMPARES && el("div", { class: "row", style: "margin-top:0.9rem" }, el("i", { style: `background:${colour(DATA.groups.findIndex((group) => group.includes(index)))};width:0.9em;height:0.9em;border-radius:0.2em` }), el("h3", {}, run.name), badge(run)),
    tiles(run), run.summary.error && el("div", { class: "error" }, run.summary.error)];
  document.getElementById("head").append(el("div", { class: "row" }, el("h1", {}, title), !COMPARES && badge(RUNS[0]), el("span", { style: "flex:1" }), toggle),
    el("p", { class: "soft small" }, COMPARES ? "" : `${RUNS[0].root} · `, `written ${moment(DATA.made)} by slurm_rlhf ${DATA.version}`), el("div", {}, RUNS.map(one)));
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", (event) => theme(event.matches ? "dark" : "light"));
  head();
  const made = SECTIONS.map(([name, build]) => [name, build()]);
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
